"""What a model knows of data it never saw, under the same ring that trains it.

- loss by position: does a token far into its document profit from what came before? Positions restart with each document.
- recall by distance: of questions about a fact that stands so many tokens back, how many are answered rightly. `far` are
  those whose fact is further away than one rank's tokens, which nothing but the ring can answer (in a contiguous layout;
  zigzag gives a rank two places).
- passkey by depth and length of the text.

The windows are the same at every evaluation, for any number of ranks and for any seed of the run. Every rank runs as many
forwards as the others and takes part in one reduction at the end; the numbers are then the same on all.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspan.trainer.config.schema import Config
from ringspan.trainer.data.dataset import NO_LABEL, Dataset, Synthetic
from ringspan.trainer.data.synthetic_tasks import Recall

WIDTH = 40  # characters of the longest bar
FEW = 10  # answers whose share says little
DISTANCES, DEPTHS = 8, 4  # bins of recall's distance and of passkey's depth


@dataclass
class Table:
    """Means over bins, to be drawn as bars. Bins that nothing fell into are left out."""

    title: str
    labels: list[str]
    means: list[float]
    counts: list[int]
    chance: float | None = None  # of accuracies

    def text(self) -> str:
        top = max([*self.means, 1e-9]) if self.chance is None else 1.0
        width = max(map(len, self.labels), default=0)
        lines = [f"{self.title} (chance {self.chance:.1%})" if self.chance else self.title]
        for label, mean, count in zip(self.labels, self.means, self.counts, strict=True):
            value = f"{mean:.3f}" if self.chance is None else f"{mean:4.0%}"
            few = f"  of only {count}" if self.chance is not None and count < FEW else ""
            lines.append(f"  {label:>{width}}  {value}  {bar(mean / top)}{few}")
        return "\n".join(lines)


@dataclass
class Report:
    loss: float  # per label, over all sources that have text
    sources: dict[str, float]
    tables: list[Table] = field(default_factory=list)
    far: dict[str, float] = field(default_factory=dict)  # recall sources: share right beyond one rank's tokens
    chance: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        parts = [table.text() for table in self.tables if table.labels]
        parts += [
            f"{name}: {right:.0%} right of what is further away than one rank's tokens; chance is {self.chance[name]:.1%}"
            for name, right in self.far.items()
        ]
        return "\n\n".join(parts)

    def metrics(self) -> dict[str, float]:
        """Flat, for curves."""
        found = {"loss": self.loss} | {f"loss/{name}": loss for name, loss in self.sources.items()}
        found |= {f"far/{name}": right for name, right in self.far.items()}
        for table in self.tables:
            found |= {f"{table.title}/{label}": mean for label, mean in zip(table.labels, table.means, strict=True)}
        return found


def evaluate(
    forward: Callable[..., tuple[Tensor, ...]],  # the model's; under the ring all its ranks call together
    data: Dataset,  # the held-out part
    config: Config,
    at: Tensor,  # the positions that this rank owns
    device: torch.device,
    data_rank: int = 0,
    data_size: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,  # the sum over all ranks
    before_each: Callable[[int], Any] = lambda number: None,  # the watchdog wants to know
) -> Report:
    per_source = max(1, config.evaluate.batches * config.data.batch // len(data.names))
    places = [(source, number) for number in range(per_source) for source in range(len(data.names))]
    answers = {place: task.answers(place[1]) for place in places if isinstance(task := data.sources[place[0]], Synthetic)}
    begins = dict(zip(answers, np.cumsum([0, *(len(found.at) for found in answers.values())]), strict=False))
    edges = position_edges(data.length, config.evaluate.bins)
    by_position = np.zeros((len(data.names), len(edges), 2))  # loss and labels
    missed = np.zeros(sum(len(found.at) for found in answers.values()))
    local = np.full(data.length, -1)  # where a position of the window is on this rank
    owned = at.cpu().numpy()
    local[owned[owned < data.length]] = np.flatnonzero(owned < data.length)

    for number, chunk in enumerate(_shares(places, config.data.micro_batch, data_rank, data_size)):
        before_each(number)
        batch = data.windows([place or (0, 0) for place in chunk], at)
        batch.labels[[place is None for place in chunk]] = NO_LABEL
        with torch.no_grad():
            _, _, each, right = forward(*batch.to(device).inputs, each=True)
        losses, hits = each.double().cpu().numpy(), right.cpu().numpy()
        for row, place in enumerate(chunk):
            if place is None:
                continue
            valid = batch.labels[row].numpy() != NO_LABEL
            bins = np.searchsorted(edges, batch.positions[row].numpy()[valid], side="right") - 1
            by_position[place[0], :, 0] += np.bincount(bins, losses[row][valid], len(edges))
            by_position[place[0], :, 1] += np.bincount(bins, minlength=len(edges))
            if place in answers:
                where = local[answers[place].at]
                begin = begins[place]
                missed[begin : begin + len(where)] += ((where >= 0) & ~hits[row][where]).sum(1)

    sums = reduce(torch.from_numpy(np.concatenate([by_position.ravel(), missed])).to(device)).cpu().numpy()
    by_position = sums[: by_position.size].reshape(by_position.shape)
    return _report(data, by_position, edges, answers, sums[by_position.size :] == 0, len(owned))


def _report(
    data: Dataset, by_position: np.ndarray, edges: np.ndarray, answers: dict, right: np.ndarray, rank_length: int
) -> Report:
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
        found = [answers[place] for place in answers if place[0] == index]
        offsets = np.cumsum([0, *(len(a.at) for a in answers.values())])
        ok = np.concatenate([right[offsets[i] :][: len(answers[p].at)] for i, p in enumerate(answers) if p[0] == index])
        distance, length, depth = (
            np.concatenate([getattr(a, what) for a in found]) for what in ("distance", "length", "depth")
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
        else:
            sizes = np.unique(length)
            bins = np.searchsorted(sizes, length) * DEPTHS + np.minimum((depth * DEPTHS).astype(int), DEPTHS - 1)
            shares = [f"{i / DEPTHS:.0%}-{(i + 1) / DEPTHS:.0%}" for i in range(DEPTHS)]
            labels = [f"{_short(size)} at {share}" for size in sizes for share in shares]
            title, chance = f"{name}: right by length and depth", 0.0
        hits, counts = np.bincount(bins, ok, len(labels)), np.bincount(bins, minlength=len(labels))
        report.tables.append(_table(title, labels, hits, counts, chance))
    return report


def _table(title: str, labels: list[str], sums: np.ndarray, counts: np.ndarray, chance: float | None = None) -> Table:
    rows = [(label, float(x / n), int(n)) for label, x, n in zip(labels, sums, counts, strict=True) if n]
    return Table(title, [label for label, _, _ in rows], [mean for _, mean, _ in rows], [n for _, _, n in rows], chance)


def _shares(places: list, micro_batch: int, data_rank: int, data_size: int) -> Iterator[list]:
    """This data rank's windows, micro-batch by micro-batch; the last is filled up with None, so that all have as many."""
    step = micro_batch * data_size
    padded = places + [None] * (-len(places) % step)
    for first in range(data_rank * micro_batch, len(padded), step):
        yield padded[first : first + micro_batch]


def position_edges(length: int, bins: int) -> np.ndarray:
    """Where bins begin: each is so many times longer than the one before, because what changes does so near the start."""
    return np.unique([0, *(int(length ** (i / bins)) for i in range(1, bins))])


def bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * WIDTH * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])


def _span(lo: int, hi: int) -> str:
    return _short(lo) if hi - lo <= 1 else f"{_short(lo)}-{_short(hi - 1)}"


def _short(num: int) -> str:
    return f"{num}" if num < 10_000 else f"{num / 1000:.0f}k" if num < 10_000_000 else f"{num / 1e6:.0f}M"


def main() -> None:
    """There is no such command: only a run has the ring and the held-out data."""
    print(
        "python -m ringspan.trainer.evaluate: a run evaluates itself, every evaluate.every steps and at its end. To see it again, give "
        "the command of a run that has a name once more: ringspan launch name=… reports, and trains no further.",
        file=sys.stderr,
    )
    raise SystemExit(2)


if __name__ == "__main__":
    main()
