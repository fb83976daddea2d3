"""The training loop.

A step runs its micro-batches forward and backward, then the optimizer, then one all-reduce. The all-reduce carries the loss,
the losses by source, the stop flag, and the number of labels and a checksum of the next step's samples. Each rank sums the loss
of its own tokens; the total is divided once, by the labels of all ranks. The result does not depend on the number of ranks.
"""

import contextlib
from dataclasses import dataclass

import torch

from ringspan.trainer.data.dataset import Batch
from ringspan.trainer.data.fingerprint import DifferentSamples, signed_checksum
from ringspan.trainer.monitoring.layer_boundaries import StepAbandoned
from ringspan.trainer.optim import learning_rate_fraction
from ringspan.trainer.run import Run


class TooManyBadSteps(RuntimeError):
    """The gradient was not finite, or no token had a label, in several consecutive steps; the message names the samples."""


def train(run: Run) -> bool:
    """Train to the last step or until a stop signal.

    Returns:
        Whether the run reached its last step.

    Raises:
        TooManyBadSteps: the gradient was not finite, or no token had a label, in `debug.bad_steps` consecutive steps.
        DifferentSamples: ranks of a ring read different samples; the step before is saved.
    """
    with contextlib.suppress(StepAbandoned):
        return _train(run)
    run.save()  # the last completed step; its weights and moments are those in memory
    return False


def _train(run: Run) -> bool:
    config, engine, position = run.config, run.engine, run.position
    batches = run.batches()
    next_batch = next(batches)
    first = [_num_labels(next_batch), signed_checksum(next_batch, run.distributed.mesh)]
    num_labels, difference = run.distributed.sum(torch.tensor(first, dtype=torch.float64, device=run.device)).tolist()
    if difference:
        raise DifferentSamples(run.explain_difference(next_batch))
    num_empty = 0
    for step in range(position.step + 1, config.steps + 1):
        batch, sums = next_batch, Sums.zeros(len(run.data.names), run.device)
        with run.profile(step):
            for index, micro in enumerate(batch):
                run.watchdog.update(step, f"micro-batch {index + 1} of {len(batch)}")
                run.progress.begin_micro_batch(step, index, len(batch))
                on_device = micro.to(run.device)
                with run.phase(step, "forward"):
                    loss, count, each, _ = engine(*on_device.inputs, True)
                with run.phase(step, "backward"):
                    engine.backward(loss, num_labels)
                sums.add(loss, count, each, on_device)
            run.progress.end_step()
            run.watchdog.update(step, "optimizer")
            fraction = learning_rate_fraction(config.schedule, step, config.steps)
            with run.phase(step, "step"):
                grad_norm, applied = engine.step(fraction)

        run.watchdog.update(step, "reduction")
        next_batch = next(batches)
        total = sums.reduce(run, batch, run.signals.stop, next_batch)
        position.step, position.applied = step, engine.applied
        position.samples += config.data.batch
        position.tokens += config.data.batch * config.data.length
        run.num_bad = 0 if applied else run.num_bad + 1
        num_empty = 0 if num_labels else num_empty + 1
        run.report(step, total, grad_norm, fraction * config.optim.lr, applied, num_labels)
        num_labels = total.next_labels
        if run.num_bad >= config.debug.bad_steps:
            samples = range(position.samples - config.data.batch, position.samples)
            raise TooManyBadSteps(
                f"the gradient was not finite in {run.num_bad} steps in a row, "
                f"the last of samples {samples[0]} to {samples[-1]} ({_not_finite(run, sums.loss)}): "
                f"lower optim.lr, or look at these samples; {run.how_to_continue()}"
            )
        if num_empty >= config.debug.bad_steps:
            samples = range(position.samples - config.data.batch, position.samples)
            raise TooManyBadSteps(
                f"no token had a label in {num_empty} steps in a row, the last of samples {samples[0]} to {samples[-1]}: "
                f"look at end_token and the files of data.sources (a one-token document has no label); {run.how_to_continue()}"
            )
        if total.difference and step < config.steps:
            run.save()  # the weights have not been trained on these samples
            raise DifferentSamples(run.explain_difference(next_batch))
        last, stop = step == config.steps, total.stop
        if not last and not stop:
            stop = not run.evaluate_if_due(step)
        due = config.checkpoint.every and step % config.checkpoint.every == 0
        if stop or due or (last and config.checkpoint.at_end):
            run.save()
        if stop:
            return last
    return True


def _num_labels(batch: list[Batch]) -> int:
    return sum(int((micro.labels >= 0).sum()) for micro in batch)


def _not_finite(run: Run, loss: torch.Tensor) -> str:
    """Say which ranks' own losses are not finite: one rank among many points to its samples or its GPU."""
    flags = torch.zeros(run.distributed.world, dtype=torch.float64, device=run.device)
    flags[run.distributed.rank] = float(not loss.isfinite().all())
    ranks = run.distributed.sum(flags).nonzero().flatten().tolist()
    if not ranks:
        return "the loss was finite on all ranks"
    return f"the loss was not finite on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass
class Total:
    """A step's numbers over all ranks."""

    loss: float
    sources: dict[str, float]
    source_labels: dict[str, float]
    flops: float
    stop: bool
    next_labels: float
    difference: float  # of the next step's samples between the ranks of a ring; 0: none


@dataclass
class Sums:
    """A step's numbers on this rank. They stay on the device until the step's all-reduce."""

    loss: torch.Tensor  # (2,): loss and labels
    by_source: torch.Tensor  # (sources, 2): loss and labels

    @classmethod
    def zeros(cls, sources: int, device: torch.device) -> "Sums":
        return cls(
            torch.zeros(2, dtype=torch.float64, device=device), torch.zeros(sources, 2, dtype=torch.float64, device=device)
        )

    def add(self, loss: torch.Tensor, count: torch.Tensor, each: torch.Tensor, micro: Batch) -> None:
        """Add a micro-batch; `each` has the loss of every token."""
        self.loss += torch.stack([loss.detach().double(), count.double()])
        rows = torch.stack([each.double().sum(1), (micro.labels >= 0).double().sum(1)], 1)
        # One row at a time: indexing with a list of sources would copy it to the GPU and synchronise.
        for row, source in zip(rows, micro.sources, strict=True):
            self.by_source[source] += row

    def reduce(self, run: Run, batch: list[Batch], stop: bool, next_batch: list[Batch]) -> Total:
        """All-reduce the sums, this rank's stop flag, and labels and checksum of the next step."""
        following = [_num_labels(next_batch), signed_checksum(next_batch, run.distributed.mesh)]
        extra = torch.tensor([run.flops(batch), float(stop), *following], dtype=torch.float64)
        values = torch.cat([self.loss, self.by_source.flatten(), extra.to(self.loss.device)])
        loss, count, *rest = run.distributed.sum(values).tolist()
        flops, num_stopped, labels, difference = rest[-4:]
        pairs = zip(run.data.names, rest[:-4:2], rest[1:-4:2], strict=True)
        by_source = {name: (x, n) for name, x, n in pairs if n}
        sources = {name: x / n for name, (x, n) in by_source.items()}
        source_labels = {name: n for name, (_, n) in by_source.items()}
        return Total(loss / max(count, 1), sources, source_labels, flops, num_stopped > 0, labels, difference)
