"""FLOPs, memory and time of a run, computed before it starts. Imports no torch."""
