"""The list of (kernel, configuration, chip) that is compiled ahead of time, without a GPU. Prints JSON.

python -m tests.kernels.runtime.ahead                    all, in a process of its own: the interpreter of tests compiles nothing
python -m tests.kernels.runtime.ahead hopper sm_90       only these
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import triton

from ringspan import Mask
from ringspan.kernels.backends.block import Block, Gradients
from ringspan.kernels.backends.hopper import backward as hopper_backward
from ringspan.kernels.backends.hopper import forward as hopper_forward
from ringspan.kernels.backends.triton import paged_decode, sum_gradients
from ringspan.kernels.backends.triton.backward import backward_launches
from ringspan.kernels.backends.triton.forward import forward_launches
from ringspan.kernels.runtime.ahead_of_time import compile_ahead
from ringspan.kernels.runtime.launch import Launch

CHIPS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # bytes of shared memory
LENGTH = 4096
ZIGZAG = ((0, 1, 2048), (6144, 1, 2048))
DOCUMENTS = Mask(causal=True, documents=torch.zeros(LENGTH, dtype=torch.int32))
PACKED = Mask(causal=True, window=1024, documents=torch.zeros(2 * LENGTH, dtype=torch.int32))
CONFIGURATIONS = {  # name: (head dim, value head dim, dtype, heads, key heads, options)
    "d128-causal": (128, 128, torch.bfloat16, 8, 8, {}),
    "d64-causal": (64, 64, torch.bfloat16, 8, 8, {}),
    "d256-causal": (256, 256, torch.bfloat16, 8, 8, {}),
    "d128-fp32": (128, 128, torch.float32, 8, 8, {}),
    "d192-128": (192, 128, torch.bfloat16, 8, 2, {}),
    "d192-128-ring": (192, 128, torch.bfloat16, 8, 2, dict(mask=PACKED, at=ZIGZAG, carry=True)),
    "d80-causal": (80, 80, torch.bfloat16, 8, 8, {}),
    "d96-causal": (96, 96, torch.bfloat16, 8, 8, {}),
    "d96-ring": (96, 96, torch.bfloat16, 8, 2, dict(mask=PACKED, at=ZIGZAG, carry=True)),
    "d96-window": (96, 96, torch.bfloat16, 8, 8, dict(mask=Mask(causal=True, window=1024))),  # tiles of short windows
    "d112-causal": (112, 112, torch.bfloat16, 8, 8, {}),
    "d160-causal": (160, 160, torch.bfloat16, 8, 8, {}),
    "d128-ring": (128, 128, torch.bfloat16, 8, 2, dict(mask=PACKED, at=ZIGZAG, carry=True)),
    "d128-softcap": (128, 128, torch.bfloat16, 8, 2, dict(softcap=20.0)),
    "d128-docs": (128, 128, torch.bfloat16, 8, 8, dict(mask=DOCUMENTS)),
    "d128-full": (128, 128, torch.bfloat16, 8, 8, dict(mask=Mask())),
    "d128-block": (128, 128, torch.bfloat16, 8, 8, dict(mask=Mask(), at=ZIGZAG, carry=True)),  # a fully visible block of a ring
    "d128-visible": (128, 128, torch.bfloat16, 8, 8, dict(mask=Mask(), carry=True)),  # the remote block in a ring of two
    "d128-sums": (128, 128, torch.bfloat16, 8, 8, dict(sums=True, at=ZIGZAG)),  # the local block of a ring
    "d128-ordered": (128, 128, torch.bfloat16, 8, 2, dict(deterministic=True)),
    "d128-dropout": (128, 128, torch.float16, 8, 8, dict(dropout=0.1)),
}
ALL_CHIPS = ("d128-causal", "d64-causal")
# Portable kernels are the same without a mask, with ordered sums and with fp32 results; with documents they are d128-ring's.
# Of head dims in two chunks they compile d96-causal and d192-128.
CHUNKED = ("d80-causal", "d96-causal", "d96-ring", "d96-window", "d112-causal", "d160-causal", "d192-128-ring")
ONLY_GLUON = (
    *("d128-docs", "d128-full", "d128-block", "d128-sums", "d128-ordered"),
    *(name for name in CHUNKED if name != "d96-causal"),
)
SM_90 = tuple(name for name in CONFIGURATIONS if name not in ONLY_GLUON)
# Gluon has no fp32 and no dropout; its visible block is d128-block. d128-full differs from d128-causal in the forward only,
# d128-ordered in the backward only.
ONLY_PORTABLE = ("d128-fp32", "d128-dropout", "d128-visible")
GLUON_BOTH = tuple(name for name in CONFIGURATIONS if name not in (*ONLY_PORTABLE, "d128-full", "d128-ordered"))
GLUON_FORWARD = (*GLUON_BOTH, "d128-full")
GLUON_BACKWARD = (*GLUON_BOTH, "d128-ordered")
GLUON = (*GLUON_BOTH, "d128-full", "d128-ordered")

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkdv")
KERNEL_NAMES = [
    f"{chip}/{name}/{kernel}" for chip in CHIPS for name in (SM_90 if chip == "sm_90" else ALL_CHIPS) for kernel in KERNELS
]
AUXILIARY_KERNELS = ("sum_and_cast", "paged_forward")
KERNEL_NAMES += [f"{chip}/{name}/{kernel}" for chip in CHIPS for name in ALL_CHIPS for kernel in AUXILIARY_KERNELS]
KERNEL_NAMES += [f"hopper/{name}/attention_forward" for name in GLUON_FORWARD]
KERNEL_NAMES += [f"hopper/{name}/attention_backward" for name in GLUON_BACKWARD]
# Bytes that a thread may spill; kernels that are not listed may spill none. The tiles of d64, d128 and d256 were measured to
# be faster than smaller ones without spills. The others need more registers at every tile size.
SPILL_LIMITS = {
    "sm_90/d64-causal/attention_backward_dq": 8,
    "sm_90/d128-causal/attention_backward_dkdv": 16,
    "sm_90/d256-causal/attention_backward_dkdv": 304,
    "sm_90/d128-fp32/attention_backward_dq": 32,
    "sm_90/d128-fp32/attention_backward_dkdv": 16,
    "sm_90/d128-ring/attention_backward_dkdv": 80,
    "sm_90/d128-dropout/attention_backward_dq": 8,
    "sm_90/d128-dropout/attention_backward_dkdv": 32,
    "sm_100/d128-causal/attention_backward_dkdv": 16,
    "hopper/d128-causal/attention_backward": 8,
    "hopper/d256-causal/attention_forward": 48,
    "hopper/d96-ring/attention_forward": 32,
    "hopper/d112-causal/attention_forward": 8,
    "hopper/d112-causal/attention_backward": 8,
    "hopper/d160-causal/attention_forward": 16,
    "hopper/d160-causal/attention_backward": 48,
    "hopper/d192-128/attention_forward": 24,
    "hopper/d192-128/attention_backward": 48,
    "hopper/d192-128-ring/attention_forward": 56,
    "hopper/d192-128-ring/attention_backward": 56,
    "hopper/d128-ring/attention_forward": 64,
    "hopper/d128-ring/attention_backward": 32,
    "hopper/d128-block/attention_forward": 32,
    "hopper/d128-block/attention_backward": 16,
    "hopper/d128-softcap/attention_backward": 248,
    "hopper/d128-full/attention_forward": 8,
    "hopper/d128-sums/attention_forward": 8,
    "hopper/d128-sums/attention_backward": 16,
    "hopper/d128-docs/attention_forward": 16,
    "hopper/d128-docs/attention_backward": 40,
    "hopper/d128-ordered/attention_backward": 24,
}
# Measured spills with these versions of the compiler. Their cost in speed is not measured. With 3.6 some kernels spilled less
# when 16 was known to divide the length: the dk/dv kernels of d128-causal and d256-causal 24 and 320 bytes, the forward of
# d256-causal 0, Hopper's backward of d128-docs 40.
SPILL_LIMITS_BY_VERSION = {
    "3.6": {
        "sm_90/d128-causal/attention_forward": 8,
        "sm_90/d128-causal/attention_backward_dkdv": 40,
        "sm_90/d256-causal/attention_forward": 8,
        "sm_90/d256-causal/attention_backward_dkdv": 392,
        "sm_90/d96-causal/attention_backward_dkdv": 16,
        "sm_90/d128-ring/attention_forward": 56,
        "sm_90/d128-ring/attention_backward_dkdv": 272,
        "sm_90/d128-visible/attention_backward_dkdv": 24,
        "sm_90/d128-dropout/attention_backward_dkdv": 64,
        "hopper/d128-docs/attention_backward": 48,
        "hopper/d192-128-ring/attention_backward": 64,
    },
    "3.7": {
        "hopper/d128-docs/attention_backward": 56,
    },
    "3.8": {
        "sm_90/d128-ring/attention_backward_dkdv": 104,
        "sm_90/d128-dropout/attention_backward_dq": 24,
        "hopper/d128-docs/attention_backward": 56,
        "hopper/d192-128-ring/attention_backward": 72,
        "hopper/d128-causal/attention_backward": 24,
        "hopper/d128-sums/attention_backward": 72,
        "hopper/d128-ordered/attention_backward": 40,
    },
    "3.9": {
        "sm_90/d128-causal/attention_forward": 16,
        "sm_90/d128-causal/attention_backward_dkdv": 32,
        "sm_90/d256-causal/attention_forward": 24,
        "sm_90/d256-causal/attention_backward_dkdv": 392,
        "sm_90/d192-128/attention_backward_dkdv": 80,
        "sm_90/d128-fp32/attention_backward_dq": 56,
        "sm_90/d128-fp32/attention_backward_dkdv": 24,
        "sm_90/d128-ring/attention_backward_dkdv": 200,
        "sm_90/d128-visible/attention_backward_dkdv": 16,
        "sm_90/d128-dropout/attention_backward_dkdv": 64,
        "hopper/d128-causal/attention_forward": 8,
        "hopper/d256-causal/attention_forward": 80,
        "hopper/d128-ring/attention_forward": 80,
        "hopper/d128-full/attention_forward": 16,
        "hopper/d128-block/attention_forward": 48,
        "hopper/d96-causal/attention_forward": 40,
        "hopper/d192-128/attention_forward": 40,
        "hopper/d128-softcap/attention_forward": 32,
        "hopper/d128-docs/attention_forward": 32,
        "hopper/d128-causal/attention_backward": 48,
        "hopper/d128-sums/attention_backward": 40,
        "hopper/d128-ordered/attention_backward": 64,
        "hopper/d128-ring/attention_backward": 56,
        "hopper/d128-block/attention_backward": 32,
        "hopper/d128-softcap/attention_backward": 264,
    },
}


def launches(name: str, gluon: bool = False) -> Iterator[Launch]:
    """Yield the launches of the forward and the backward on meta tensors."""
    width, v_width, dtype, heads, kv_heads, options = CONFIGURATIONS[name]

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    q, k, v = empty(1, LENGTH, heads, width), empty(1, LENGTH, kv_heads, width), empty(1, LENGTH, kv_heads, v_width)
    out, lse = empty(1, LENGTH, heads, v_width), empty(1, heads, LENGTH, dtype=torch.float32)
    result = out.float() if options.get("sums") else out
    carry = (out.float(), lse) if options.get("carry") else None
    at = options.get("at", ((0, 1, LENGTH),))
    dropout = options.get("dropout", 0.0)
    seed = empty(dtype=torch.int64) if dropout else None
    numbers = dict(scale=width**-0.5, softcap=options.get("softcap", 0.0), dropout=dropout, seed=seed)
    numbers |= dict(deterministic=options.get("deterministic", False))
    block = Block(q, k, v, options.get("mask", Mask(causal=True)), at, at, **numbers)
    forward, backward = (hopper_forward.launch, hopper_backward.launches) if gluon else (None, None)
    yield from forward_launches(block, carry, result, lse, forward)
    in_ring = carry is not None or "sums" in options
    grads = (x.float() if in_ring or (gluon and x is q) else x for x in (q, k, v))
    yield from backward_launches(block, Gradients(out, lse, lse, *grads), "dq" if in_ring else False, backward)
    if not gluon and name in ALL_CHIPS:
        total = empty(LENGTH, 1, kv_heads, width + v_width, dtype=torch.float32)
        yield sum_gradients.launch([sum_gradients.Summand(total)] * 3, k, v)
        pages = [x.view(LENGTH // 64, 64, kv_heads, width) for x in (k, v)]
        table, lengths = empty(4, 16, dtype=torch.int32), empty(4, dtype=torch.int32)
        parts, stats = empty(4, 5, heads, width, dtype=torch.float32), empty(4, 5, heads, dtype=torch.float32)
        yield paged_decode.launch(q[0, :4], *pages, table, lengths, parts, stats, 2**31 - 1, width**-0.5, 0.0)


# A spilled register that is read for each tile made the local block of a ring 5 % slower. These versions have none. Consumers
# that compute dq have some, and are faster than those that leave dq to a warpgroup.
CONSUMERS_COMPUTE_DQ = ("d160-causal", "d192-128-ring")
NO_RELOADS = (
    *("hopper/d128-causal/attention_backward", "hopper/d128-sums/attention_backward"),
    *(f"hopper/{name}/attention_forward" for name in (*CHUNKED, "d192-128")),
    *(f"hopper/{name}/attention_backward" for name in CHUNKED if name not in CONSUMERS_COMPUTE_DQ),
)
NO_RELOAD_VERSIONS = ("3.6", "3.7")


def problems(name: str, kernel: dict[str, Any], version: str = triton.__version__) -> str:
    """Return the limits that a kernel compiled by this Triton exceeds; empty if there are none."""
    if "error" in kernel:
        return kernel["error"]
    messages = []
    if kernel["shared"] > (limit := CHIPS.get(name.split("/")[0], CHIPS["sm_90"])):
        messages.append(f"shared memory above {limit}")
    minor = ".".join(version.split(".")[:2])
    limits = SPILL_LIMITS | SPILL_LIMITS_BY_VERSION.get(minor, {})
    if kernel["spills"] > (limit := limits.get(name, 0)):
        messages.append(f"spills above {limit}")
    if kernel["reloads"] and name in NO_RELOADS and minor in NO_RELOAD_VERSIONS:
        messages.append(f"{kernel['reloads']} spilled registers are read for each tile")
    if "serialized" in kernel["log"]:
        messages.append("serialized: matmuls wait for each other")
    uses_wgmma = "fp32" not in name and not name.endswith(AUXILIARY_KERNELS)  # a tile of 16 rows is too small for wgmma
    if name.startswith(("sm_90/", "hopper/")) and uses_wgmma and not kernel["warpgroup"]:
        messages.append("Hopper's wgmma is not used")
    if kernel["missing_barrier"]:
        messages.append(f"a barrier is missing in a partition: {kernel['missing_barrier']}")
    return ", ".join(messages)


ARRIVE, COPY_OUT = r"\bmbarrier\.arrive\.shared", r"\bcp\.(reduce\.)?async\.bulk\.tensor\.\dd\.global\.shared"
THREAD_ACCESS = r"\b((st|ld|atom|red)\.shared|(st|ld)matrix\.|wgmma\.|cp\.async\.bulk\.wait_group)"


def missing_barrier(ptx: str) -> str:
    """Return a place where one thread acts for all threads of its partition without a barrier; empty if there is none.

    Such a thread arrives, copies out or waits for a copy while others may still access the memory. Triton inserts the
    barriers, and the emulator assumes them. Lines are read in the order of the text; branches are not followed.
    """
    lines = ptx.splitlines()
    if "setmaxnreg" in ptx and not re.search(ARRIVE, ptx):
        return "no arrival is recognised"
    if "wait_group.read" in ptx and not re.search(COPY_OUT, ptx):
        return "no copy to memory is recognised"
    for number, line in enumerate(lines):
        access = ""
        if re.search(f"{ARRIVE}|{COPY_OUT}", line):
            access = unsynchronised_access(lines[:number][::-1])
        elif "cp.async.bulk.wait_group.read" in line:
            access = unsynchronised_access(lines[number + 1 :])
        if access:
            return f"{line.strip()} without a barrier to {access}"
    return ""


def unsynchronised_access(lines: list[str]) -> str:
    """Return an access of each thread before the next barrier. A warp barrier suffices for a partition of one warp."""
    before_warp_barrier, after_warp_barrier, passed_warp_barrier = "", "", False
    for line in lines:
        if re.search(r"\bbar\.sync\b", line):  # the barrier of a partition of several warps
            return before_warp_barrier or after_warp_barrier
        if re.search(r"\bbarrier\.sync\b", line):  # begin or end of a partition
            break
        if "bar.warp.sync" in line:
            passed_warp_barrier = True
        elif re.search(THREAD_ACCESS, line) and passed_warp_barrier:
            after_warp_barrier = line.strip()
        elif re.search(THREAD_ACCESS, line):
            before_warp_barrier = line.strip()
    return before_warp_barrier


def reloads(sass: str) -> int:
    """Count reads of spilled registers in loops over tiles: innermost loops with wgmma instructions."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    # Only conditional branches end a loop. The slow path of a wait is at the end of the code and jumps back unconditionally.
    branches = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"^@.*\bBRA.* 0x([0-9a-f]+)", text))]
    bodies = {(first, last): [text for at, text in code if first <= at <= last] for first, last in branches if first < last}
    loops = [loop for loop, body in bodies.items() if any("HGMMA" in text for text in body)]
    if "HGMMA" in sass and not loops:
        raise ValueError("no loop over tiles is recognised in this listing")
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b for c, d in loops if (a, b) != (c, d))]
    return sum("LDL" in text for loop in inner for text in bodies[loop])


def compile_all(selected: list[str]) -> dict[str, dict[str, Any]]:
    """Return each selected kernel's resources, or the error of its compilation.

    Args:
        selected: Chips, or "hopper" for the Gluon kernels, or names from KERNEL_NAMES.
    """
    results: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(name.partition("/")[0] for name in selected):
        chip = "sm_90" if group == "hopper" else group
        os.environ["RINGSPAN_CHIP"] = chip
        for name in GLUON if group == "hopper" else SM_90 if chip == "sm_90" else ALL_CHIPS:
            for launch in launches(name, group == "hopper"):
                kernel = f"{group}/{name}/{launch.kernel.fn.__name__}"
                if kernel not in KERNEL_NAMES or not {group, kernel} & set(selected):
                    continue
                try:
                    result = asdict(compile_ahead(launch, chip))
                    result["missing_barrier"] = missing_barrier(result.pop("ptx"))
                    result["reloads"] = reloads(result.pop("sass"))
                except Exception as error:  # any error of a compiler; the other kernels are still compiled
                    result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
                results[kernel] = result
    return results


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1:] or [*CHIPS, "hopper"])))
