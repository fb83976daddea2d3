"""What a step keeps in memory: the plan, layers streamed by rows and KV heads, and tensors kept on the device or the host."""
