"""The named list of (kernel, configuration, chip) that is compiled ahead of time, without a GPU. Prints JSON.

python -m tests.kernels.ahead            a process of its own: the tests' interpreter would not compile anything
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict

import torch

from kernels import Mask, compat, hopper_backward, hopper_forward
from kernels.segments import whole
from kernels.triton_backward import backward_launches
from kernels.triton_common import Launch, option_arguments
from kernels.triton_forward import forward_launches

CHIPS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # bytes of shared memory
LENGTH = 4096
ZIGZAG = [(0, 1, 2048), (6144, 1, 2048)]
PACKED = Mask(causal=True, window=1024, documents=torch.zeros(2 * LENGTH, dtype=torch.int32))
CONFIGURATIONS = {  # name: (head dim, value head dim, dtype, heads, key heads, everything else)
    "d128-causal": (128, 128, torch.bfloat16, 8, 8, {}),
    "d64-causal": (64, 64, torch.bfloat16, 8, 8, {}),
    "d256-causal": (256, 256, torch.bfloat16, 8, 8, {}),
    "d128-fp32": (128, 128, torch.float32, 8, 8, {}),
    "d192-128": (192, 128, torch.bfloat16, 8, 2, {}),
    "d128-ring": (128, 128, torch.bfloat16, 8, 2, dict(mask=PACKED, at=ZIGZAG, carry=True)),
    "d128-softcap": (128, 128, torch.bfloat16, 8, 2, dict(softcap=20.0)),
    "d128-dropout": (128, 128, torch.float16, 8, 8, dict(dropout=0.1)),
}
EVERYWHERE = ("d128-causal", "d64-causal")
ON_HOPPER = tuple(CONFIGURATIONS)
GLUON = ("d64-causal", "d128-causal", "d256-causal", "d192-128", "d128-ring", "d128-softcap")


def launches(name: str, gluon: bool = False) -> Iterator[Launch]:
    """The forward's and the backward's launches on tensors that hold nothing."""
    width, v_width, dtype, heads, kv_heads, options = CONFIGURATIONS[name]

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    q, k, v = empty(1, LENGTH, heads, width), empty(1, LENGTH, kv_heads, width), empty(1, LENGTH, kv_heads, v_width)
    out, lse = empty(1, LENGTH, heads, v_width), empty(1, heads, LENGTH, dtype=torch.float32)
    carry = (out.float(), lse) if options.get("carry") else None
    mask, at = options.get("mask", Mask(causal=True)), options.get("at", whole(LENGTH))
    dropout = options.get("dropout", 0.0)
    seed = empty(dtype=torch.int64) if dropout else None
    numbers = option_arguments(0, width**-0.5, options.get("softcap", 0.0), dropout, seed)
    forward, backward = (hopper_forward.launch, hopper_backward.launches) if gluon else (None, None)
    yield from forward_launches(q, k, v, mask, at, at, carry, out, lse, numbers, forward)
    grads = (x.float() if carry or (gluon and x is q) else x for x in (q, k, v))
    if not gluon or max(width, v_width) <= 128:
        yield from backward_launches(out, q, k, v, lse, lse, mask, at, at, *grads, numbers, carry is not None, backward)


if __name__ == "__main__":
    results = {}
    for chip in CHIPS:
        os.environ["RINGSPAN_CHIP"] = chip
        for name in ON_HOPPER if chip == "sm_90" else EVERYWHERE:
            for launch in launches(name):
                compiled = asdict(compat.compile_ahead(launch, chip))
                results[f"{chip}/{name}/{launch.kernel.fn.__name__}"] = compiled
    os.environ["RINGSPAN_CHIP"] = "sm_90"
    for name in GLUON:
        for launch in launches(name, gluon=True):
            results[f"hopper/{name}/{launch.kernel.fn.__name__}"] = asdict(compat.compile_ahead(launch, "sm_90"))
    print(json.dumps(results))
