"""Modules that the fork server of jobs.py imports, so that no forked rank spends seconds on imports."""

import contextlib
import gc
import importlib

from ringspan.trainer.config import compose

PARTS = ["ringspan.kernels.backends.chunked", "ringspan.trainer.loop", "ringspan.trainer.parity", "ringspan.trainer.train"]
LATE = [  # imports that torch and DeepSpeed defer to the first use; a version without one of them only loses time
    "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.op_builder.all_ops", "setuptools.command.build_ext",
]  # fmt: skip
for name in PARTS:
    importlib.import_module(name)
for name in LATE:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
compose.load(["parallel.device=cpu"], world_size=1)  # Hydra searches its plugins
gc.collect()
gc.freeze()  # a rank's collections then neither scan these objects nor copy their pages
