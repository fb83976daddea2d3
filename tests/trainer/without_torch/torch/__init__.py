raise ImportError("a wrong config must be told before torch is imported")
