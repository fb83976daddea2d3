"""Many GPUs: who owns which tokens, how blocks travel, and how one softmax spans them all.

Here belongs what knows of ranks but not of models: the mesh, the layouts, the transports, the ring and ulysses around it.
What a block costs or computes belongs in kernels; how a run is configured, fed and saved belongs in trainer.
"""
