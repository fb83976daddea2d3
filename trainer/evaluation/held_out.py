"""Evaluation of a model on held-out data, with the same ring that trains it.

- Loss by position: whether a token far into its document benefits from its long context. Positions restart per document.
- Recall by distance: the share of right answers about a fact that is a given number of tokens away. `far` counts the
  questions whose fact is further away than one rank's tokens; only the ring can answer them. This holds for a contiguous
  layout; zigzag assigns two ranges to a rank.
- Passkey by depth and length of the text, needles by family and depth.

The windows are the same at every evaluation, for any number of ranks and for any seed of the run. Every rank runs the same
number of forwards and takes part in one all-reduce at the end, after which all ranks have the same numbers.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config.schema import Config
from ringspan.trainer.data.dataset import NO_LABEL, Dataset, Synthetic
from ringspan.trainer.data.needles import Needles
from ringspan.trainer.data.synthetic_tasks import Answers, Recall

WIDTH = 40  # characters of the longest bar
FEW = 10  # below this number of answers a share is marked as uncertain
DISTANCES, DEPTHS = 8, 4  # bins of recall's distance, and of the depth of passkey and needles
DEPTH_LABELS = [f"{i / DEPTHS:.0%}-{(i + 1) / DEPTHS:.0%}" for i in range(DEPTHS)]

WindowKey = tuple[int, int]  # source index, window number


@dataclass
class Table:
    """Means over bins, printed as bars. Empty bins are left out."""

    title: str
    labels: list[str]
    means: list[float]
    counts: list[int]
    chance: float | None = None  # accuracy of guessing; None if the means are losses

    def text(self) -> str:
        top = max([*self.means, 1e-9]) if self.chance is None else 1.0
        width = max(map(len, self.labels), default=0)
        lines = [f"{self.title} (chance {self.chance:.1%})" if self.chance else self.title]
        for label, mean, count in zip(self.labels, self.means, self.counts, strict=True):
            value = f"{mean:.3f}" if self.chance is None else f"{mean:4.0%}"
            warning = f"  of only {count}" if self.chance is not None and count < FEW else ""
            lines.append(f"  {label:>{width}}  {value}  {bar(mean / top)}{warning}")
        return "\n".join(lines)


@dataclass
class Report:
    """Result of an evaluation."""

    loss: float  # per label, over all sources that have text
    sources: dict[str, float]
    tables: list[Table] = field(default_factory=list)
    far: dict[str, float] = field(default_factory=dict)  # recall sources: share of right answers beyond one rank's tokens
    chance: dict[str, float] = field(default_factory=dict)
    change: str = ""  # text about the previous evaluation of the run

    def text(self) -> str:
        parts = [table.text() for table in self.tables if table.labels]
        parts += [
            f"{name}: {right:.0%} right if the fact is further away than one rank's tokens; chance is {self.chance[name]:.1%}"
            for name, right in self.far.items()
        ]
        return "\n\n".join(parts)

    def metrics(self) -> dict[str, float]:
        """Return all numbers under flat names, for metrics.jsonl."""
        values = {"loss": self.loss} | {f"loss/{name}": loss for name, loss in self.sources.items()}
        values |= {f"far/{name}": right for name, right in self.far.items()}
        for table in self.tables:
            values |= {f"{table.title}/{label}": mean for label, mean in zip(table.labels, table.means, strict=True)}
        return values


class MeasuredWindows(NamedTuple):
    """Sums over all ranks of some windows."""

    by_position: np.ndarray  # (sources, bins, 2): loss and labels
    answers: dict[WindowKey, Answers]
    right: np.ndarray  # bool: one per answer, in the order of `answers`


def evaluate(
    forward: Callable[..., tuple[Tensor, ...]],
    data: Dataset,
    config: Config,
    positions: Tensor,
    device: torch.device,
    data_rank: int = 0,
    data_size: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    on_batch: Callable[[int], Any] = lambda number: None,
) -> Report:
    """Evaluate a model on held-out windows.

    Args:
        forward, data, positions, device, data_rank, data_size, reduce, on_batch: as for `measure`.
        config: `data` and `evaluate` are read.

    Returns:
        The report, equal on all ranks.
    """
    per_source = max(1, config.evaluate.batches * config.data.batch // len(data.names))
    windows = [(source, number) for number in range(per_source) for source in range(len(data.names))]
    edges = position_edges(data.length, config.evaluate.bins)
    ranks = data_rank, data_size, reduce, on_batch
    sums = measure(forward, data, windows, config.data.micro_batch, edges, positions, device, *ranks)
    return _report(data, sums.by_position, edges, sums.answers, sums.right, len(positions))


def measure(
    forward: Callable[..., tuple[Tensor, ...]],
    data: Dataset,
    windows: list[WindowKey],
    micro_batch: int,
    edges: np.ndarray,
    positions: Tensor,
    device: torch.device,
    data_rank: int = 0,
    data_size: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    on_batch: Callable[[int], Any] = lambda number: None,
) -> MeasuredWindows:
    """Sum losses by position, and find the right answers. An answer is right if each of its tokens is the most likely one.

    Args:
        forward: the model's forward; all ranks of a ring call it together.
        data: the held-out part.
        windows: windows to measure.
        micro_batch: windows per forward.
        edges: first position of each bin.
        positions: int64 (n,), positions of a window that this rank owns.
        device: device of the forward.
        data_rank: this rank's index along the data axis.
        data_size: ranks along the data axis.
        reduce: returns the sum of a tensor over all ranks.
        on_batch: called with the number of each micro-batch before its forward.

    Returns:
        The sums, equal on all ranks.
    """
    answers = {window: task.answers(window[1]) for window in windows if isinstance(task := data.sources[window[0]], Synthetic)}
    begins = dict(zip(answers, np.cumsum([0, *(len(answer.positions) for answer in answers.values())]), strict=False))
    by_position = np.zeros((len(data.names), len(edges), 2))
    wrong = np.zeros(sum(len(answer.positions) for answer in answers.values()))  # wrong tokens of each answer
    local = np.full(data.length, -1)  # index on this rank of each position of the window
    owned = positions.cpu().numpy()
    local[owned[owned < data.length]] = np.flatnonzero(owned < data.length)

    for number, chunk in enumerate(_micro_batches(windows, micro_batch, data_rank, data_size)):
        on_batch(number)
        batch = data.windows([window or windows[0] for window in chunk], positions)
        batch.labels[[window is None for window in chunk]] = NO_LABEL
        with torch.no_grad():
            _, _, each, right = forward(*batch.to(device).inputs, each=True)
        losses, hits = each.double().cpu().numpy(), right.cpu().numpy()
        for row, window in enumerate(chunk):
            if window is None:
                continue
            valid = batch.labels[row].numpy() != NO_LABEL
            bins = np.searchsorted(edges, batch.positions[row].numpy()[valid], side="right") - 1
            by_position[window[0], :, 0] += np.bincount(bins, losses[row][valid], len(edges))
            by_position[window[0], :, 1] += np.bincount(bins, minlength=len(edges))
            if window in answers:
                indices = local[answers[window].positions]
                begin = begins[window]
                wrong[begin : begin + len(indices)] += ((indices >= 0) & ~hits[row][indices]).sum(1)

    sums = reduce(torch.from_numpy(np.concatenate([by_position.ravel(), wrong])).to(device)).cpu().numpy()
    size = by_position.size
    return MeasuredWindows(sums[:size].reshape(by_position.shape), answers, sums[size:] == 0)


def _report(
    data: Dataset, by_position: np.ndarray, edges: np.ndarray, answers: dict, right: np.ndarray, rank_length: int
) -> Report:
    """Build the report from sums over all ranks; `right` has a flag per answer, `rank_length` the tokens of one rank."""
    totals = by_position.sum(1)
    text = [i for i, source in enumerate(data.sources) if not isinstance(source, Synthetic)]
    counted = totals[text].sum(0) if text else totals.sum(0)
    report = Report(float(counted[0] / max(counted[1], 1)), {})
    for index, (name, source) in enumerate(zip(data.names, data.sources, strict=True)):
        report.sources[name] = float(totals[index, 0] / max(totals[index, 1], 1))
        if not isinstance(source, Synthetic):
            labels = [_span(lo, hi) for lo, hi in zip(edges, [*edges[1:], data.length], strict=True)]
            report.tables.append(_table(f"{name}: loss by position", labels, *by_position[index].T))
            continue
        own_answers = [answers[window] for window in answers if window[0] == index]
        offsets = np.cumsum([0, *(len(answer.positions) for answer in answers.values())])
        ok = np.concatenate([right[offsets[i] :][: len(answers[w].positions)] for i, w in enumerate(answers) if w[0] == index])
        distance, length, depth = (
            np.concatenate([getattr(answer, field) for answer in own_answers]) for field in ("distance", "length", "depth")
        )
        if isinstance(source.task, Recall):
            report.chance[name] = 1 / source.task.num_values
            far = distance > rank_length
            if far.any():
                report.far[name] = float(ok[far].mean())
            bins = np.minimum(distance * DISTANCES // data.length, DISTANCES - 1)
            steps = [data.length * i // DISTANCES for i in range(DISTANCES + 1)]
            labels = [_span(max(lo, 1), hi) for lo, hi in itertools.pairwise(steps)]
            title, chance = f"{name}: right by distance", report.chance[name]
        elif isinstance(source.task, Needles):
            family = np.concatenate([answer.family for answer in own_answers])
            report.chance[name] = float(np.concatenate([answer.chance for answer in own_answers]).mean())
            bins = family * DEPTHS + np.minimum((depth * DEPTHS).astype(int), DEPTHS - 1)
            labels = [f"{kind} at {share}" for kind in source.task.families for share in DEPTH_LABELS]
            title, chance = f"{name}: right by family and depth", report.chance[name]
        else:
            sizes = np.unique(length)
            bins = np.searchsorted(sizes, length) * DEPTHS + np.minimum((depth * DEPTHS).astype(int), DEPTHS - 1)
            labels = [f"{_short(size)} at {share}" for size in sizes for share in DEPTH_LABELS]
            title, chance = f"{name}: right by length and depth", 0.0
        hits, counts = np.bincount(bins, ok, len(labels)), np.bincount(bins, minlength=len(labels))
        report.tables.append(_table(title, labels, hits, counts, chance))
    return report


def _table(title: str, labels: list[str], sums: np.ndarray, counts: np.ndarray, chance: float | None = None) -> Table:
    rows = [(label, float(x / n), int(n)) for label, x, n in zip(labels, sums, counts, strict=True) if n]
    return Table(title, [label for label, _, _ in rows], [mean for _, mean, _ in rows], [n for _, _, n in rows], chance)


def _micro_batches(windows: list, micro_batch: int, data_rank: int, data_size: int) -> Iterator[list]:
    """Yield this data rank's micro-batches; None fills the last ones, so that all ranks have the same number."""
    step = micro_batch * data_size
    padded = windows + [None] * (-len(windows) % step)
    for first in range(data_rank * micro_batch, len(padded), step):
        yield padded[first : first + micro_batch]


def position_edges(length: int, bins: int) -> np.ndarray:
    """Return the first position of each bin; bins grow geometrically, because the loss changes most near the start."""
    return np.unique([0, *(int(length ** (i / bins)) for i in range(1, bins))])


def bar(share: float) -> str:
    """Draw a share between 0 and 1 as a bar of at most WIDTH characters."""
    eighths = round(max(0.0, min(1.0, share)) * WIDTH * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])


def _span(lo: int, hi: int) -> str:
    return _short(lo) if hi - lo <= 1 else f"{_short(lo)}-{_short(hi - 1)}"


def _short(num: int) -> str:
    return f"{num}" if num < 10_000 else f"{num / 1000:.0f}k" if num < 10_000_000 else f"{num / 1e6:.0f}M"
