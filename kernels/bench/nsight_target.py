"""One warm call of one kernel between profiler start and stop: the process that nsight.py runs under ncu.

ncu --profile-from-start off python -m ringspan.kernels.bench.nsight_target d128-causal-16k triton backward bf16
"""

import sys

import torch

from ringspan.kernels.bench.measure import DTYPES, kernels, random_inputs
from ringspan.kernels.bench.shapes import SHAPES

DEVICE = "cuda"


def main(name: str, kernel: str, direction: str, dtype: str) -> None:
    """Profile one call of `kernel` on the shape `name`."""
    shape, run = SHAPES[name], kernels()[kernel].run
    *inputs, dout = random_inputs(shape, torch.device(DEVICE), DTYPES[dtype])
    q, k, v = (x.requires_grad_() for x in inputs)

    def call(out: torch.Tensor | None) -> torch.Tensor:
        """A forward without `out`, else its backward."""
        if out is None:
            return run(q, k, v, shape)
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)[0]

    out = call(None)  # warm-up: both directions compile before the profiler starts
    call(out)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call(None if direction == "forward" else out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
