"""The memory plan of a step: what each layer keeps for its backward, where it is kept, and how much is processed at a time.

    none                          autograd keeps every tensor
    x/4@8 outs=32@16 heads=1 rows=8192
        x/4       the input of every 4th layer is kept; the layers between are computed again from it
        outs=32   attention's (out, lse) of 32 layers are kept; the other layers run attention's forward again
        @8, @16   that many of these are kept in the host's memory, the first layers first
        late      they are fetched when they are needed, not one segment ahead: less memory, and the copies take time
        heads=1   attention runs one KV head (and its query heads) at a time
        rows=8192 norms, projections and MLP run 8192 rows at a time

A plan changes memory and time, and results by rounding alone. Imports no torch.
"""

import re
from dataclasses import dataclass

from ringspan.trainer.config.schema import Model

KEYWORDS = ("auto", "least", "none")
FORM = "x/4@8 outs=32@16 heads=1 rows=8192"


@dataclass(frozen=True)
class MemoryPlan:
    """What layers keep. `segment` 0 stands for the plan `none`."""

    segment: int  # layers per kept input
    outs: int = 0  # layers whose (out, lse) are kept: the last ones
    inputs_on_host: int = 0  # kept inputs in host memory: those of the first segments
    outs_on_host: int = 0  # kept (out, lse) in host memory: those of the first layers that keep them
    heads: int = 0  # KV heads per group; 0: all
    rows: int = 0  # rows per chunk; 0: all
    late: bool = False  # fetch from the host only when needed

    @property
    def keeps_everything(self) -> bool:
        return self.segment == 0

    def segments(self, layers: int) -> list[range]:
        """The layers of each segment."""
        size = self.segment or 1
        return [range(first, min(first + size, layers)) for first in range(0, layers, size)]

    def chunk_rows(self, n: int) -> int:
        """Rows of a chunk of n rows: `rows`, or a little less if chunks are of equal size then."""
        if not self.rows or self.rows >= n:
            return n
        fewest = -(-n // self.rows)
        number = next((number for number in range(fewest, fewest + fewest // 8 + 1) if n % number == 0), 0)
        return n // number if number else self.rows

    def keeps_out(self, layer: int, layers: int) -> bool:
        return layer >= layers - self.outs

    def out_on_host(self, layer: int, layers: int) -> bool:
        return 0 <= layer - (layers - self.outs) < self.outs_on_host

    def __str__(self) -> str:
        if self.keeps_everything:
            return "none"
        parts = [f"x/{self.segment}" + f"@{self.inputs_on_host}" * bool(self.inputs_on_host)]
        parts.append(f"outs={self.outs}" + f"@{self.outs_on_host}" * bool(self.outs_on_host))
        parts += ["late"] * self.late
        parts += [f"heads={self.heads}"] * bool(self.heads) + [f"rows={self.rows}"] * bool(self.rows)
        return " ".join(parts)


NONE = MemoryPlan(0)


def parse(text: str, model: Model) -> MemoryPlan:
    """Return the plan that a text describes.

    Args:
        text: `none`, or the form of the module's docstring; outs, heads and rows may be left out.
        model: the model that the plan is for.

    Raises:
        ValueError: the text is no plan, or contradicts itself or the model.
    """
    if text == "none":
        return NONE
    words = text.split()
    first = re.fullmatch(r"x/(\d+)(?:@(\d+))?", words[0]) if words else None
    values: dict[str, int] = {}
    late = words[1:].count("late") == 1
    for word in words[1:]:
        if word == "late" and late:
            continue
        match = re.fullmatch(r"(outs|heads|rows)=(\d+)(?:@(\d+))?", word)
        if match is None or match[1] in values or (match[3] and match[1] != "outs"):
            raise ValueError(f"engine.memory={text!r}: {word!r} is no part of a plan; write auto, least, none or {FORM!r}")
        values[match[1]] = int(match[2])
        if match[3]:
            values["outs_on_host"] = int(match[3])
    if first is None or not words:
        raise ValueError(f"engine.memory={text!r} is no plan; write auto, least, none or {FORM!r}")
    if int(first[1]) == 0:
        raise ValueError(
            f"engine.memory={text!r}: x/0 is for 1 to {model.layers} layers, as the model has; none keeps everything"
        )
    plan = MemoryPlan(int(first[1]), inputs_on_host=int(first[2] or 0), late=late, **values)
    for problem in problems(plan, model):
        raise ValueError(f"engine.memory={text!r}: {problem}")
    return plan


def problems(plan: MemoryPlan, model: Model) -> list[str]:
    """What contradicts itself or the model."""
    if plan.keeps_everything:
        return []
    found = []
    segments = -(-model.layers // max(plan.segment, 1))
    if not 1 <= plan.segment <= model.layers:
        found.append(f"x/{plan.segment} is for 1 to {model.layers} layers, as the model has {model.layers}")
    if plan.outs > model.layers:
        found.append(f"outs={plan.outs} is more than the model's {model.layers} layers")
    if plan.inputs_on_host > segments:
        found.append(f"x/{plan.segment}@{plan.inputs_on_host}: only {segments} inputs are kept")
    if plan.outs_on_host > plan.outs:
        found.append(f"outs={plan.outs}@{plan.outs_on_host}: only {plan.outs} are kept")
    if plan.late and not plan.inputs_on_host + plan.outs_on_host:
        found.append("late is for tensors in host memory, such as x/4@8; none is kept there")
    if plan.heads and (plan.heads > model.kv_heads or model.kv_heads % plan.heads):
        found.append(f"heads={plan.heads} must divide the model's {model.kv_heads} KV heads")
    return found
