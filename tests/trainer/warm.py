"""What the fork server holds before it forks a rank: all that a run imports, so that no rank spends seconds on it again."""

import contextlib
import gc
import importlib

from ringspan.trainer.config import compose

PARTS = ["ringspan.kernels.backends.chunked", "ringspan.trainer.loop", "ringspan.trainer.parity", "ringspan.trainer.train"]
LATE = [  # what torch and DeepSpeed import when it is first used; a version without one of them loses time and nothing else
    "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops", "setuptools.command.build_ext",
]  # fmt: skip
for name in PARTS:
    importlib.import_module(name)
for name in LATE:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
compose.load(["parallel.device=cpu"], world_size=1)  # Hydra looks for its plugins
gc.collect()
gc.freeze()  # a rank's collections need not walk over all this, nor copy its pages
