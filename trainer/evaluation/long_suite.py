"""The long suite: needle tasks at several lengths, scored by length and depth.

An answer is right if each of its tokens is the most likely one after the right tokens before it. Greedy decoding gives the
whole answer in exactly these cases, so that one forward scores all questions of a sequence. The sequences have other templates
and syllables than training's, and are the same for any model with the tokenizer, number of ranks and seed.

Each share of right answers has Wilson's 95 % interval, and the level of a guess among the values that the sequence states.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config.schema import Data, Source
from ringspan.trainer.data.dataset import Dataset
from ringspan.trainer.data.needles import FAMILIES
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.evaluation.held_out import measure

DECILES = 10
Z = 1.959964  # of a two-sided interval of 95 %
Row = dict[str, Any]


def suite_data(
    tokenizer: Tokenizer,
    length: int,
    families: Sequence[str],
    num_questions: int = 16,
    digits: int = 5,
    seen: Sequence[str] = (),
) -> Dataset:
    """Return the suite's sequences of one length, with a source per family.

    Args:
        tokenizer: the model's tokenizer.
        length: tokens per sequence.
        families: names of `FAMILIES`.
        num_questions: questions per sequence.
        digits: digits of a value.
        seen: what the sequences take from training (`needles.SEEN`).
    Raises:
        ValueError: an unknown family, or a length that is too short for the facts and questions.
    """
    options: dict[str, Any] = dict(kind="needles", num_questions=num_questions, digits=digits, seen=list(seen))
    sources = {name: Source(families=[name], **options) for name in families}
    return Dataset(Data(length=length, sources=sources), tokenizer, 0, "held_out")


def score(
    forward: Callable[..., tuple[Tensor, ...]],
    data: Dataset,
    num_sequences: int,
    positions: Tensor,
    device: torch.device,
    micro_batch: int = 1,
    data_rank: int = 0,
    data_size: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> list[Row]:
    """Score a model at one length.

    Args:
        forward: the model's forward; all ranks of a ring call it together.
        data: from `suite_data`.
        num_sequences: sequences of each family.
        positions: int64 (n,), positions of a sequence that this rank owns.
        device: device of the forward.
        micro_batch: sequences per forward.
        data_rank: this rank's index along the data axis.
        data_size: ranks along the data axis.
        reduce: returns the sum of a tensor over all ranks.

    Returns:
        A row per family: family, length, chance, and right, num, share, low, high of all answers, in `deciles` of each tenth
        of the depth, in `far` of the facts that are further away than one rank's tokens; equal on all ranks.
    """
    windows = [(source, number) for source in range(len(data.names)) for number in range(num_sequences)]
    sums = measure(forward, data, windows, micro_batch, np.zeros(1, np.int64), positions, device, data_rank, data_size, reduce)
    rows, begin = [], 0
    for source, family in enumerate(data.names):
        answers = [answer for (index, _), answer in sums.answers.items() if index == source]
        names = "depth", "chance", "distance"
        depth, chance, distance = (np.concatenate([getattr(answer, name) for answer in answers]) for name in names)
        right = sums.right[begin : begin + len(depth)]
        begin += len(depth)
        tenth = np.minimum((depth * DECILES).astype(int), DECILES - 1)
        row = dict(family=family, length=data.length, chance=float(chance.mean())) | share(right)
        row["deciles"] = [share(right[tenth == index]) for index in range(DECILES)]
        row["far"] = share(right[distance > len(positions)])
        rows.append(row)
    return rows


def share(right: np.ndarray) -> Row:
    """Return the share of right answers (num,) with its interval; None without answers."""
    hits, num = int(right.sum()), len(right)
    low, high = wilson(hits, num)
    return dict(right=hits, num=num, share=hits / num if num else None, low=low, high=high)


def wilson(hits: int, num: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share; (0, 1) without trials."""
    if not num:
        return 0.0, 1.0
    mean, weight = hits / num, Z**2 / num
    centre = (mean + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(mean * (1 - mean) / num + weight / (4 * num))
    return max(0.0, centre - half), min(1.0, centre + half)


def report(rows: Sequence[Row], trained_length: int, trained_families: Sequence[str]) -> str:
    """Return the tables: families by length, and for each family lengths by depth.

    Args:
        rows: from `score`, of any lengths.
        trained_length: tokens per sequence of the run.
        trained_families: families in the run's data; the others are marked as transfer.
    """
    lengths = sorted({row["length"] for row in rows})
    table = {(row["family"], row["length"]): row for row in rows}
    heads = [f"{short(length)}{'*' * (length > trained_length)}" for length in lengths]
    families = [name for name in FAMILIES if any(row["family"] == name for row in rows)]
    lines = [f"right answers in %, with 95 % intervals; * beyond the {trained_length} tokens of training"]

    def add_families(cell: Callable[[Row], Row]) -> None:
        lines.append(f"  {'':12}  {'chance':>6}" + "".join(f"  {head:>14}" for head in heads))
        for name in families:
            own = [table.get((name, length)) for length in lengths]
            cells = [_with_interval(cell(row)) if row else "-" for row in own]
            chance = next(row["chance"] for row in own if row)
            transfer = "" if name in trained_families else "  transfer: not in the run's data"
            lines.append(f"  {name:12}  {chance:6.1%}" + "".join(f"  {cell:>14}" for cell in cells) + transfer)

    add_families(lambda row: row)
    if any(row["far"]["num"] for row in rows):
        lines += ["", "right answers in % about facts that are further away than one rank's tokens"]
        add_families(lambda row: row["far"])
    for name in families:
        lines += ["", f"{name}: right answers in %, by depth of the first fact"]
        lines.append(f"  {'':7}" + "".join(f"{index / DECILES:>6.0%}" for index in range(DECILES)))
        for length, head in zip(lengths, heads, strict=True):
            if row := table.get((name, length)):
                cells = ["-" if cell["share"] is None else f"{cell['share']:.0%}" for cell in row["deciles"]]
                lines.append(f"  {head:>7}" + "".join(f"{cell:>6}" for cell in cells))
    return "\n".join(lines)


def _with_interval(cell: Row) -> str:
    return "-" if cell["share"] is None else f"{cell['share']:4.0%} ({cell['low']:.0%}-{cell['high']:.0%})"


def plot(plt: Any, rows: Sequence[Row], trained_length: int, title: str) -> Any:
    """Draw the share by length, whose fall beyond the trained length is the cliff, and a map of length and depth per family.

    Args:
        plt: matplotlib.pyplot.
        rows: from `score`.
        trained_length: tokens per sequence of the run.
        title: title of the figure.
    Returns:
        The figure.
    """
    lengths = sorted({row["length"] for row in rows})
    families = [name for name in FAMILIES if any(row["family"] == name for row in rows)]
    columns = -(-len(families) // 2)
    figure = plt.figure(figsize=(5 + 3 * columns, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 3 * columns))
    curve = left.subplots()
    for name in families:
        own = sorted((row for row in rows if row["family"] == name), key=lambda row: row["length"])
        line = curve.plot([row["length"] for row in own], [row["share"] for row in own], marker="o", label=name)[0]
        bounds = [row["low"] for row in own], [row["high"] for row in own]
        curve.fill_between([row["length"] for row in own], *bounds, alpha=0.15, color=line.get_color())
    curve.axvline(trained_length, color="grey", linestyle="--", label="trained length")
    curve.set_xscale("log", base=2)
    curve.set_xticks(lengths, [short(length) for length in lengths])
    curve.set(xlabel="tokens", ylabel="share of right answers", ylim=(-0.02, 1.02))
    curve.legend(fontsize=8)
    for axes, name in zip(right.subplots(2, columns, squeeze=False).flat, families, strict=False):
        cells = np.full((DECILES, len(lengths)), np.nan)
        for row in (row for row in rows if row["family"] == name):
            cells[:, lengths.index(row["length"])] = [np.nan if c["share"] is None else c["share"] for c in row["deciles"]]
        axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(lengths)), [short(length) for length in lengths], fontsize=7)
        axes.set_yticks(range(0, DECILES, 3), [f"{index / DECILES:.0%}" for index in range(0, DECILES, 3)], fontsize=7)
    figure.suptitle(title)
    return figure


def short(length: int) -> str:
    """Return 32768 as 32k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
