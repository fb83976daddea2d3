"""Many GPUs: who owns which tokens, how blocks travel, and how one softmax spans them all.

    from parallel import Layout, Mesh, context_attention, ring_attention

Here belongs what knows of ranks but not of models: the mesh, the layouts, the transports, the ring and ulysses around it.
What a block costs or computes belongs in kernels; how a run is configured, fed and saved belongs in trainer.
"""

from .context import context_attention
from .layout import Layout
from .mesh import Mesh
from .op import ring_attention

__all__ = ["Layout", "Mesh", "context_attention", "ring_attention"]
