"""A warp that runs the inline PTX of the kernels on a CPU: a register is a tensor of its 32 threads' numbers.

Only the instructions that the kernels use. A warp's threads stay together: a branch that only some take is an error.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

LANES = 32
Registers = dict[str, Tensor]


def run(source: str, operands: Registers, limit: int = 10) -> None:
    """Instructions on registers; operands, "$0", "$1", …, are changed in place. limit: how often a label may be jumped to."""
    lines = instructions(source)
    labels = {line.removesuffix(":"): number for number, line in enumerate(lines) if line.endswith(":")}
    registers, jumps, number = dict(operands), 0, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.endswith(":"):
            continue
        guard, line = re.fullmatch(r"(?:@(!?\w+) +)?(.*)", line).groups()  # type: ignore[union-attr]
        name, *given = re.split(r"[ ,]+", line)
        if name == "bra":
            taken = registers[guard.removeprefix("!")] ^ guard.startswith("!")
            assert taken.all() or not taken.any(), f"some threads of a warp take {line}"
            if taken.all():
                jumps += 1
                assert jumps <= limit, f"{line} again and again"
                number = labels[given[0]]
            continue
        assert guard is None, f"{line}: only jumps are guarded"
        to, *values = given
        registers[to] = OPERATIONS[name](*(value(x, registers) for x in values))
    operands |= {name: registers[name] for name in operands}


def instructions(source: str) -> list[str]:
    """Without declarations; a label is a line of its own."""
    inside = re.fullmatch(r"\s*\{(.*)\}\s*", source, re.DOTALL).group(1)  # type: ignore[union-attr]
    lines = [line.strip() for line in re.sub(r"(\b[a-z]+:)", r"\1;", inside).split(";")]
    return [line for line in lines if line and not line.startswith(".reg")]


def value(x: str, registers: Registers) -> Tensor:
    if x.startswith("!"):
        return ~registers[x[1:]]
    if re.fullmatch(r"\$?[a-z]\w*|\$\d+", x):
        return registers[x]
    return torch.full([LANES], int(x, 0) if re.fullmatch(r"-?\d+|0x\w+", x) else float(x), dtype=torch.float64)


def of_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Worked out in fp64 and rounded once, as the GPU does."""
    return lambda *x: function(*(y.float().double() for y in x)).float()


def of_neighbours(x: Tensor, distance: Tensor, clamp: Tensor, members: Tensor) -> Tensor:
    assert (clamp == LANES - 1).all() and (members == 2**LANES - 1).all()
    return x[torch.arange(LANES) ^ distance.long()]


def any_votes(x: Tensor, members: Tensor) -> Tensor:
    assert (members == 2**LANES - 1).all()
    return x.any().expand(LANES)


def without_tiny(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def in_pairs(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """The second becomes the lower half."""
    return lambda high, low: torch.stack([low, high], 1).to(dtype).view(torch.int32)[:, 0]


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.f32": of_fp32(lambda x: x),
    "mov.b32": lambda x: x.to(torch.int32),
    "neg.f32": of_fp32(torch.neg),
    "add.f32": of_fp32(torch.add),
    "sub.f32": of_fp32(torch.sub),
    "mul.f32": of_fp32(torch.mul),
    "fma.rn.f32": of_fp32(lambda x, y, z: x * y + z),
    "max.f32": torch.fmax,  # of a number and NaN the number
    "ex2.approx.ftz.f32": of_fp32(lambda x: without_tiny(torch.exp2(x))),
    "setp.eq.f32": lambda x, y: x == y.float(),
    "setp.eq.s32": torch.eq,
    "setp.gt.f32": torch.gt,
    "setp.gt.and.f32": lambda x, y, other: (x > y) & other,
    "setp.eq.or.f32": lambda x, y, other: (x == y.float()) | other,
    "selp.f32": lambda x, y, which: torch.where(which, x, y),
    "or.pred": torch.logical_or,
    "xor.pred": torch.logical_xor,
    "vote.sync.any.pred": any_votes,
    "shfl.sync.bfly.b32": of_neighbours,
    "cvt.rn.bf16x2.f32": in_pairs(torch.bfloat16),
    "cvt.rn.f16x2.f32": in_pairs(torch.float16),
}
