"""The named list of (kernel, configuration, chip) that is compiled ahead of time, without a GPU. Prints JSON.

python -m tests.kernels.ahead                    a process of its own: the tests' interpreter would not compile anything
python -m tests.kernels.ahead hopper sm_90       only these
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
from ringspan.kernels.backends.triton import paged_decode as triton_paged
from ringspan.kernels.backends.triton import sum_gradients
from ringspan.kernels.backends.triton.backward import backward_launches
from ringspan.kernels.backends.triton.forward import forward_launches
from ringspan.kernels.runtime import triton_compat
from ringspan.kernels.runtime.launch import Launch

CHIPS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # bytes of shared memory
LENGTH = 4096
ZIGZAG = ((0, 1, 2048), (6144, 1, 2048))
DOCUMENTS = Mask(causal=True, documents=torch.zeros(LENGTH, dtype=torch.int32))
PACKED = Mask(causal=True, window=1024, documents=torch.zeros(2 * LENGTH, dtype=torch.int32))
CONFIGURATIONS = {  # name: (head dim, value head dim, dtype, heads, key heads, everything else)
    "d128-causal": (128, 128, torch.bfloat16, 8, 8, {}),
    "d64-causal": (64, 64, torch.bfloat16, 8, 8, {}),
    "d256-causal": (256, 256, torch.bfloat16, 8, 8, {}),
    "d128-fp32": (128, 128, torch.float32, 8, 8, {}),
    "d192-128": (192, 128, torch.bfloat16, 8, 2, {}),
    "d128-ring": (128, 128, torch.bfloat16, 8, 2, dict(mask=PACKED, at=ZIGZAG, carry=True)),
    "d128-softcap": (128, 128, torch.bfloat16, 8, 2, dict(softcap=20.0)),
    "d128-docs": (128, 128, torch.bfloat16, 8, 8, dict(mask=DOCUMENTS)),
    "d128-full": (128, 128, torch.bfloat16, 8, 8, dict(mask=Mask())),
    "d128-block": (128, 128, torch.bfloat16, 8, 8, dict(mask=Mask(), at=ZIGZAG, carry=True)),  # a ring's that is seen whole
    "d128-sums": (128, 128, torch.bfloat16, 8, 8, dict(sums=True, at=ZIGZAG)),  # a ring's own block
    "d128-ordered": (128, 128, torch.bfloat16, 8, 2, dict(deterministic=True)),
    "d128-dropout": (128, 128, torch.float16, 8, 8, dict(dropout=0.1)),
}
EVERYWHERE = ("d128-causal", "d64-causal")
# portable kernels are the same without a mask, in order and with sums for results, and with documents d128-ring's
ONLY_GLUON = ("d128-docs", "d128-full", "d128-block", "d128-sums", "d128-ordered")
ON_HOPPER = tuple(name for name in CONFIGURATIONS if name not in ONLY_GLUON)
# Gluon has no fp32 and no dropout; without a mask and a carry only the forward is another kernel, in order only the backward
GLUON_BOTH = tuple(name for name in CONFIGURATIONS if name not in ("d128-fp32", "d128-full", "d128-ordered", "d128-dropout"))
GLUON_FORWARD = (*GLUON_BOTH, "d128-full")
GLUON_BACKWARD = (*GLUON_BOTH, "d128-ordered")
GLUON = (*GLUON_BOTH, "d128-full", "d128-ordered")

KERNELS = ("attention_forward", "attention_backward_dq", "attention_backward_dkdv")
NAMED = [
    f"{chip}/{name}/{kernel}" for chip in CHIPS for name in (ON_HOPPER if chip == "sm_90" else EVERYWHERE) for kernel in KERNELS
]
OTHERS = ("sum_and_cast", "paged_forward")
NAMED += [f"{chip}/{name}/{kernel}" for chip in CHIPS for name in EVERYWHERE for kernel in OTHERS]
NAMED += [f"hopper/{name}/attention_forward" for name in GLUON_FORWARD]
NAMED += [f"hopper/{name}/attention_backward" for name in GLUON_BACKWARD]
# Bytes a thread may spill; whatever is not named here may spill nothing. These tiles were measured to be faster than smaller
# ones that do not spill (d64, d128, d256), or hold more than any tile leaves room for.
MAY_SPILL = {
    "sm_90/d64-causal/attention_backward_dq": 16,
    "sm_90/d128-causal/attention_forward": 16,
    "sm_90/d128-causal/attention_backward_dkdv": 64,
    "sm_90/d256-causal/attention_backward_dkdv": 384,
    "sm_90/d192-128/attention_backward_dkdv": 384,
    "sm_90/d128-fp32/attention_backward_dq": 32,
    "sm_90/d128-fp32/attention_backward_dkdv": 32,
    "sm_90/d128-ring/attention_forward": 128,
    "sm_90/d128-ring/attention_backward_dkdv": 384,
    "sm_90/d128-softcap/attention_backward_dkdv": 64,
    "sm_90/d128-dropout/attention_backward_dq": 64,
    "sm_90/d128-dropout/attention_backward_dkdv": 64,
    "hopper/d128-causal/attention_backward": 8,
    "hopper/d256-causal/attention_forward": 48,
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
# What these versions' compilers spill instead, as measured. What that costs in speed has not been: no GPU ran them.
SPILL_MORE = {
    "3.6": {
        "sm_90/d128-ring/attention_forward": 200,
    },
    "3.7": {
        "hopper/d128-docs/attention_backward": 56,
    },
    "3.8": {
        "hopper/d128-docs/attention_backward": 56,
        "sm_90/d128-fp32/attention_backward_dq": 40,
        "hopper/d128-causal/attention_backward": 24,
        "hopper/d128-sums/attention_backward": 64,
        "hopper/d128-ordered/attention_backward": 40,
    },
    "3.9": {
        "sm_90/d128-fp32/attention_backward_dq": 56,
        "sm_90/d128-ring/attention_forward": 200,
        "sm_90/d128-ring/attention_backward_dq": 32,
        "sm_90/d128-ring/attention_backward_dkdv": 432,
        "sm_90/d128-softcap/attention_backward_dkdv": 72,
        "hopper/d128-causal/attention_forward": 8,
        "hopper/d256-causal/attention_forward": 80,
        "hopper/d128-ring/attention_forward": 80,
        "hopper/d128-full/attention_forward": 16,
        "hopper/d128-block/attention_forward": 48,
        "hopper/d192-128/attention_forward": 24,
        "hopper/d128-softcap/attention_forward": 32,
        "hopper/d128-docs/attention_forward": 32,
        "hopper/d128-causal/attention_backward": 48,
        "hopper/d128-sums/attention_backward": 40,
        "hopper/d128-ordered/attention_backward": 64,
        "hopper/d128-ring/attention_backward": 56,
        "hopper/d128-block/attention_backward": 32,
        "hopper/d128-softcap/attention_backward": 256,
    },
}


def launches(name: str, gluon: bool = False) -> Iterator[Launch]:
    """The forward's and the backward's launches on tensors that hold nothing."""
    width, v_width, dtype, heads, kv_heads, options = CONFIGURATIONS[name]

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    q, k, v = empty(1, LENGTH, heads, width), empty(1, LENGTH, kv_heads, width), empty(1, LENGTH, kv_heads, v_width)
    out, lse = empty(1, LENGTH, heads, v_width), empty(1, heads, LENGTH, dtype=torch.float32)
    written = out.float() if options.get("sums") else out
    carry = (out.float(), lse) if options.get("carry") else None
    at = options.get("at", ((0, 1, LENGTH),))
    dropout = options.get("dropout", 0.0)
    seed = empty(dtype=torch.int64) if dropout else None
    numbers = dict(scale=width**-0.5, softcap=options.get("softcap", 0.0), dropout=dropout, seed=seed)
    numbers |= dict(deterministic=options.get("deterministic", False))
    block = Block(q, k, v, options.get("mask", Mask(causal=True)), at, at, **numbers)
    forward, backward = (hopper_forward.launch, hopper_backward.launches) if gluon else (None, None)
    yield from forward_launches(block, carry, written, lse, forward)
    of_ring = carry is not None or "sums" in options
    grads = (x.float() if of_ring or (gluon and x is q) else x for x in (q, k, v))
    yield from backward_launches(block, Gradients(out, lse, lse, *grads), "dq" if of_ring else False, backward)
    if not gluon and name in EVERYWHERE:
        total = empty(LENGTH, 1, kv_heads, width + v_width, dtype=torch.float32)
        yield sum_gradients.launch(
            [sum_gradients.Summand(total), sum_gradients.Summand(total[:2048], 2048), sum_gradients.Summand(total)], k, v
        )
        pages = [x.view(LENGTH // 64, 64, kv_heads, width) for x in (k, v)]
        table, lengths = empty(4, 16, dtype=torch.int32), empty(4, dtype=torch.int32)
        parts, stats = empty(4, 5, heads, width, dtype=torch.float32), empty(4, 5, heads, dtype=torch.float32)
        yield triton_paged.launch(q[0, :4], *pages, table, lengths, parts, stats, 2**31 - 1, width**-0.5, 0.0)


# One spilled register that was read for each tile made a ring's own block 5 % slower. With these versions none is.
RELOADS_NOTHING = ("hopper/d128-causal/attention_backward", "hopper/d128-sums/attention_backward")
RELOADS_NOTHING_BY = ("3.6", "3.7")


def wrong(name: str, kernel: dict[str, Any], version: str = triton.__version__) -> str:
    """What is wrong with what this Triton compiled; nothing if all is well."""
    if "error" in kernel:
        return kernel["error"]
    found = []
    if kernel["shared"] > (most := CHIPS.get(name.split("/")[0], CHIPS["sm_90"])):
        found.append(f"shared memory above {most}")
    minor = ".".join(version.split(".")[:2])
    limits = MAY_SPILL | SPILL_MORE.get(minor, {})
    if kernel["spills"] > (most := limits.get(name, 0)):
        found.append(f"spills above {most}")
    if kernel["reloads"] and name in RELOADS_NOTHING and minor in RELOADS_NOTHING_BY:
        found.append(f"{kernel['reloads']} spilled registers are read for each tile")
    if "serialized" in kernel["log"]:
        found.append("serialized: products wait for each other")
    multiplies = "fp32" not in name and not name.endswith(OTHERS)  # a tile of 16 rows is too small for a warpgroup's product
    if name.startswith(("sm_90/", "hopper/")) and multiplies and not kernel["warpgroup"]:
        found.append("Hopper's products are not used")
    if kernel["ahead"]:
        found.append(f"one thread does not wait for its party: {kernel['ahead']}")
    return ", ".join(found)


ARRIVES, SENDS = r"\bmbarrier\.arrive\.shared", r"\bcp\.(reduce\.)?async\.bulk\.tensor\.\dd\.global\.shared"
OF_EACH = r"\b((st|ld|atom|red)\.shared|(st|ld)matrix\.|wgmma\.|cp\.async\.bulk\.wait_group)"


def goes_ahead(ptx: str) -> str:
    """Where one thread acts for its party though others may still read or write, or others do though only it has waited.

    Triton puts barriers there, and the emulator takes them for granted. Lines are looked at as they stand in the text, so
    jumps are not followed.
    """
    lines = ptx.splitlines()
    if "setmaxnreg" in ptx and not re.search(ARRIVES, ptx):
        return "no arrival is known"
    if "wait_group.read" in ptx and not re.search(SENDS, ptx):
        return "no copy to memory is known"
    for number, line in enumerate(lines):
        found = ""
        if re.search(f"{ARRIVES}|{SENDS}", line):
            found = not_met(lines[:number][::-1])
        elif "cp.async.bulk.wait_group.read" in line:
            found = not_met(lines[number + 1 :])
        if found:
            return f"{line.strip()} beside {found}"
    return ""


def not_met(lines: list[str]) -> str:
    """What each thread does on the way to the next barrier. One of a warp is enough for a party that has no other."""
    alone, behind, warps_meet = "", "", False
    for line in lines:
        if re.search(r"\bbar\.sync\b", line):  # of a party of several warps
            return alone or behind
        if re.search(r"\bbarrier\.sync\b", line):  # where parties begin and end
            break
        if "bar.warp.sync" in line:
            warps_meet = True
        elif re.search(OF_EACH, line) and warps_meet:
            behind = line.strip()
        elif re.search(OF_EACH, line):
            alone = line.strip()
    return alone


def reloads(sass: str) -> int:
    """Reads of spilled registers in loops over tiles: those that have a warpgroup's products and no such loop in them."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    # (A wait that takes long stands behind everything else, and jumps back to where it was called in any case.)
    back = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"^@.*\bBRA.* 0x([0-9a-f]+)", text))]
    bodies = {(first, last): [text for at, text in code if first <= at <= last] for first, last in back if first < last}
    loops = [loop for loop, body in bodies.items() if any("HGMMA" in text for text in body)]
    if "HGMMA" in sass and not loops:
        raise ValueError("no loop over tiles is known in this listing")
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b for c, d in loops if (a, b) != (c, d))]
    return sum("LDL" in text for loop in inner for text in bodies[loop])


def compile_all(groups: list[str]) -> dict[str, dict[str, Any]]:
    """What each kernel takes, or the error that compiling it was."""
    results: dict[str, dict[str, Any]] = {}
    for group in groups:
        chip = "sm_90" if group == "hopper" else group
        os.environ["RINGSPAN_CHIP"] = chip
        for name in GLUON if group == "hopper" else ON_HOPPER if chip == "sm_90" else EVERYWHERE:
            for launch in launches(name, group == "hopper"):
                kernel = f"{group}/{name}/{launch.kernel.fn.__name__}"
                if kernel not in NAMED:
                    continue
                try:
                    result = asdict(triton_compat.compile_ahead(launch, chip))
                    result["ahead"] = goes_ahead(result.pop("ptx"))
                    result["reloads"] = reloads(result.pop("sass"))
                except Exception as error:  # anything that a compiler can throw; the others are still worth knowing
                    result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
                results[kernel] = result
    return results


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1:] or [*CHIPS, "hopper"])))
