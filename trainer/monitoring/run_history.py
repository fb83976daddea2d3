"""History of a run on one rank: mean losses for the console line, held-out losses, and where the time went.

Held-out losses of earlier starts are read from metrics.jsonl, so that a resumed run knows its best one. Times and speeds are
those of this start.
"""

import contextlib
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from ringspan.trainer.monitoring import records
from ringspan.trainer.monitoring.tracking import duration, with_unit

MANY_EPOCHS = 4  # repeated text is worth nearly as much as new text up to about four epochs (Muennighoff et al., 2023)


class HeldOut(NamedTuple):
    """An evaluation's loss."""

    step: int
    loss: float
    batches: int = 0  # that it was evaluated on; 0: unknown


class RunHistory:
    """Collects steps, evaluations and saves from construction on.

    Args:
        folder: the run's folder, whose metrics.jsonl is truncated to the checkpoint already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by "training", "evaluation", "saving"
        self.steps, self.tokens = 0, 0.0
        self.best_speed, self._mfu = 0.0, 0.0  # sum over steps
        self.evaluations = _evaluations(folder / "metrics.jsonl")
        self._recent: dict[str, list[float]] = {}  # source, or "" for all: loss and labels since the last console line

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def add_step(self, values: dict[str, Any], tokens: int, source_labels: dict[str, float]) -> None:
        """Add a step.

        Args:
            values: the step's metrics.
            tokens: tokens of the step.
            source_labels: labels by source.
        """
        self.seconds["training"] += values["seconds"]
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.best_speed = max(self.best_speed, values["tokens_per_s"])
        self._mfu += values.get("mfu", 0.0)
        losses = {"": (values["loss"], values["labels"])}
        losses |= {name: (loss, source_labels[name]) for name, loss in values.get("source", {}).items()}
        for name, (loss, labels) in losses.items():
            if not math.isfinite(loss):  # the step is skipped, and has a line of its own
                continue
            sums = self._recent.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + loss * labels, sums[1] + labels

    def recent(self) -> tuple[float, dict[str, float]]:
        """Return the mean loss per label since the previous call, of all sources and by source."""
        means = {name: loss / labels if labels else math.nan for name, (loss, labels) in self._recent.items()}
        self._recent = {}
        return means.pop("", math.nan), means

    def add_evaluation(self, step: int, loss: float, seconds: float, batches: int = 0) -> str:
        """Add an evaluation; return the change since the previous one, such as " (−0.120 since step 20)", or "".

        Evaluations on another number of batches are forgotten: their losses do not compare.
        """
        self.seconds["evaluation"] += seconds
        earlier = [each for each in self.evaluations if each.step < step and each.batches == batches]
        self.evaluations = [*earlier, HeldOut(step, loss, batches)]
        return f" ({_signed(loss - earlier[-1].loss)} since step {earlier[-1].step})" if earlier else ""

    def report(self, bits: dict[str, float], epochs: dict[str, float]) -> list[str]:
        """Return the summary at the end of a run: time, speed, held-out loss, epochs, best checkpoint, profile.

        Args:
            bits: bits per byte of the held-out text, by source.
            epochs: how often the run has read each text.
        """
        total = self.elapsed
        parts = [f"{name} {duration(self.seconds[name])}" for name in ("training", "evaluation", "saving")]
        other = total - sum(self.seconds.values())
        lines = [f"time: {duration(total)} ({', '.join(parts)}, other {duration(max(other, 0.0))})"]
        if self.steps:
            seconds = self.seconds["training"]
            mfu = f", {self._mfu / self.steps:.1%} MFU (3.5×)" if self._mfu else ""
            mean, best = with_unit(self.tokens / seconds), with_unit(self.best_speed)
            lines.append(f"speed: {self.steps} steps of {with_unit(self.tokens)} tokens; {mean} tokens/s, {best} at best{mfu}")
        if self.evaluations:
            last, best_of_all = self.evaluations[-1], min(self.evaluations, key=lambda each: each.loss)
            note = f", the best is {best_of_all.loss:.3f} at step {best_of_all.step}" if best_of_all != last else ", the best"
            per_byte = "".join(f"; {name} {value:.3f} bits per byte" for name, value in bits.items())
            lines.append(f"held out: loss {last.loss:.3f} at step {last.step}{note * (len(self.evaluations) > 1)}{per_byte}")
            lines += self._best_checkpoint(best_of_all)
        if epochs:
            lines.append("data: " + ", ".join(f"{name} read {_times(number)}" for name, number in epochs.items()))
        many = [f"{name} was read {number:,.0f} times" for name, number in epochs.items() if number > MANY_EPOCHS]
        if many:
            lines.append(
                f"warning: {' and '.join(many)}: the model may repeat the text instead of learning from it; "
                "add text, or run fewer steps"
            )
        if any((self.folder / "profile").glob("step-*")):
            lines.append(f"profile: {self.folder / 'profile'}; open its .json files with ui.perfetto.dev")
        return [*lines, ""]

    def _best_checkpoint(self, best: HeldOut) -> list[str]:
        """A line about the checkpoint with the least held-out loss."""
        folders = {int(path.name.removeprefix("step-")): path for path in (self.folder / "checkpoints").glob("step-*[0-9]")}
        saved = [each for each in self.evaluations if each.step in folders]
        if not saved:
            return []
        chosen = min(saved, key=lambda each: each.loss)
        note = f" (step {best.step}, the best, is not saved: checkpoint.every saves more)" if chosen != best else ""
        return [f"best checkpoint: {folders[chosen.step]}, held-out loss {chosen.loss:.3f}{note}"]


def _evaluations(path: Path) -> list[HeldOut]:
    with contextlib.suppress(OSError, ValueError):
        lines = [line for line in records.read(path) if line and line.get("kind") == "held_out"]
        found: list[tuple[Any, ...]] = [(line.get("step"), line.get("loss"), line.get("batches", 0)) for line in lines]
        return [HeldOut(*each) for each in found if all(isinstance(value, int | float) for value in each)]
    return []


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}"


def _times(number: float) -> str:
    return f"{number:.3g} times" if number < 1000 else f"{number:,.0f} times"
