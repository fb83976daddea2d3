"""Interpreter of the kernels' inline PTX for one warp: a register is a tensor with the values of the 32 threads.

It supports the instructions that the kernels use. Threads of a warp do not diverge: a branch that only some take is an error.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

LANES = 32
Registers = dict[str, Tensor]


def run(source: str, operands: Registers, max_jumps: int = 10) -> None:
    """Run instructions; the operands "$0", "$1", … are updated in place. max_jumps: number of jumps allowed."""
    lines = instructions(source)
    labels = {line.removesuffix(":"): line_index for line_index, line in enumerate(lines) if line.endswith(":")}
    registers, jumps, line_index = dict(operands), 0, 0
    while line_index < len(lines):
        line = lines[line_index]
        line_index += 1
        if line.endswith(":"):
            continue
        guard, line = re.fullmatch(r"(?:@(!?\w+) +)?(.*)", line).groups()  # type: ignore[union-attr]
        name, *operand_names = re.split(r"[ ,]+", line)
        if name == "bra":
            condition = registers[guard.removeprefix("!")] ^ guard.startswith("!")
            assert condition.all() or not condition.any(), f"some threads of a warp take {line}, others do not"
            if condition.all():
                jumps += 1
                assert jumps <= max_jumps, f"{line}: more than {max_jumps} jumps"
                line_index = labels[operand_names[0]]
            continue
        assert guard is None, f"{line}: only jumps may have a guard"
        target, *values = operand_names
        registers[target] = OPERATIONS[name](*(operand(x, registers) for x in values))
    operands |= {name: registers[name] for name in operands}


def instructions(source: str) -> list[str]:
    """Split PTX into lines without declarations; each label is one line."""
    body = re.fullmatch(r"\s*\{(.*)\}\s*", source, re.DOTALL).group(1)  # type: ignore[union-attr]
    lines = [line.strip() for line in re.sub(r"(\b[a-z]+:)", r"\1;", body).split(";")]
    return [line for line in lines if line and not line.startswith(".reg")]


def operand(x: str, registers: Registers) -> Tensor:
    if x.startswith("!"):
        return ~registers[x[1:]]
    if re.fullmatch(r"\$?[a-z]\w*|\$\d+", x):
        return registers[x]
    return torch.full([LANES], int(x, 0) if re.fullmatch(r"-?\d+|0x\w+", x) else float(x), dtype=torch.float64)


def fp32_operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in fp64 and round once to fp32, as the GPU does."""
    return lambda *x: function(*(y.float().double() for y in x)).float()


def shuffle(x: Tensor, distance: Tensor, clamp: Tensor, members: Tensor) -> Tensor:
    assert (clamp == LANES - 1).all() and (members == 2**LANES - 1).all()
    return x[torch.arange(LANES) ^ distance.long()]


def vote_any(x: Tensor, members: Tensor) -> Tensor:
    assert (members == 2**LANES - 1).all()
    return x.any().expand(LANES)


def flush_denormals(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)


def pack_pairs(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Pack two numbers into 32 bits; the second is the lower half."""
    return lambda high, low: torch.stack([low, high], 1).to(dtype).view(torch.int32)[:, 0]


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.f32": fp32_operation(lambda x: x),
    "mov.b32": lambda x: x.to(torch.int32),
    "neg.f32": fp32_operation(torch.neg),
    "add.f32": fp32_operation(torch.add),
    "sub.f32": fp32_operation(torch.sub),
    "mul.f32": fp32_operation(torch.mul),
    "fma.rn.f32": fp32_operation(lambda x, y, z: x * y + z),
    "max.f32": torch.fmax,  # returns the number if the other operand is NaN
    "ex2.approx.ftz.f32": fp32_operation(lambda x: flush_denormals(torch.exp2(x))),
    "setp.eq.f32": lambda x, y: x == y.float(),
    "setp.eq.s32": torch.eq,
    "setp.gt.f32": torch.gt,
    "setp.gt.and.f32": lambda x, y, other: (x > y) & other,
    "setp.eq.or.f32": lambda x, y, other: (x == y.float()) | other,
    "selp.f32": lambda x, y, condition: torch.where(condition, x, y),
    "or.pred": torch.logical_or,
    "xor.pred": torch.logical_xor,
    "vote.sync.any.pred": vote_any,
    "shfl.sync.bfly.b32": shuffle,
    "cvt.rn.bf16x2.f32": pack_pairs(torch.bfloat16),
    "cvt.rn.f16x2.f32": pack_pairs(torch.float16),
}
