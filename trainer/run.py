"""A run put together: ranks, data, model, engine, and what the loop asks of them."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from ringspan.parallel.context_attention import context_attention
from ringspan.trainer import activation_checkpointing, run_messages
from ringspan.trainer.checkpoint import checkpoint, run_folder
from ringspan.trainer.config import validate
from ringspan.trainer.config.compose import Composed, ConfigError
from ringspan.trainer.config.schema import Model
from ringspan.trainer.data import tokenizer
from ringspan.trainer.data.dataset import Batch, Corpus, Dataset, prefetch, samples_of
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine
from ringspan.trainer.evaluate import Report, evaluate
from ringspan.trainer.generate import generate
from ringspan.trainer.model import GPT, fresh
from ringspan.trainer.monitoring import profiling, tracking
from ringspan.trainer.monitoring.stop_signals import StopSignals
from ringspan.trainer.monitoring.watchdog import Watchdog
from ringspan.trainer.optim import jump
from ringspan.trainer.planning import flops
from ringspan.trainer.planning.memory import too_much


class Stopped(Exception):
    """A signal came while something was going on that may be left."""


class Run:
    def __init__(self, composed: Composed) -> None:
        self.config = config = composed.config
        self.signals = StopSignals()
        self.distributed = ranks = DistributedContext(config)
        self.device = ranks.device
        self.folder, self._lock = self._enter(composed)
        self.watchdog = Watchdog(self.folder, ranks.rank, ranks.world, config.debug.watchdog)
        self.tokenizer, self.model_config, self.data, self.held_out = ranks.alike(self._open)
        if ranks.rank == 0:
            self._warn_of_memory()
        self.layout = ranks.mesh.layout(config.parallel.layout, config.data.length)
        self.at = self.layout.positions(ranks.mesh.context_rank)
        self.accumulation = config.data.batch // (config.data.micro_batch * ranks.mesh.data)
        self.attention = partial(
            context_attention,
            layout=self.layout,
            mesh=ranks.mesh,
            backend=config.parallel.attention,
            deterministic=config.debug.deterministic,
        )
        with torch.device("meta"):
            skeleton = GPT(self.model_config, config.rope, self.attention, seed=None)
        self._shapes = {name: weight.shape for name, weight in skeleton.named_parameters()}
        source = self._source()
        if source:
            ranks.alike(lambda: source.check(self._shapes, config.optim.kind))
        values = source.values if source else self._fresh if not config.init_from else ranks.alike(self._converted)
        ranks.alike(partial(self._record, composed, source))
        self.engine = Engine(config, self._build, values, self.device, self.accumulation)
        self.model: GPT = self.engine.module
        self.position, self.unsaved = checkpoint.Position(), ""
        if source:
            self.position = source.position
            self.engine.load_moments(source.values, self.position.applied)
            source.restore_random()
        # Made under ZeRO 3 they would have been rounded to the weights' type.
        self.model.rope_frequencies()
        compiled = validate.compiles(config, self.device.type == "cuda")
        activation_checkpointing.install(self.model, config.engine.activations, config.engine.offload_activations, compiled)
        own = source is not None and source.folder.parent == self.folder / "checkpoints"
        run_id = self.position.run_id if own else ""  # where it only began with another run's weights, that one's curves stay
        self.tracker = tracking.Tracker(config, self.folder, ranks.rank == 0, run_id, self.position.step)
        self.position.run_id = ranks.first(self.tracker.run_id)
        about = run_messages.description(config, self.model_config, ranks.mesh, ranks.world, self.device)
        corpora = run_messages.corpus_lines(config, self.data, self.held_out)
        where = run_messages.short_path(self.folder) + run_messages.resume_note(config, source.position.step if source else 0)
        self.tracker.say("\n".join([about, *corpora, where]))

    def batches(self) -> Iterator[list[Batch]]:
        """Every step's micro-batches of this rank: its samples, and of them its tokens."""
        data, mesh, first = self.config.data, self.distributed.mesh, self.position.samples

        def make(number: int) -> list[Batch]:
            step = [samples_of(0, micro, data, mesh.data_rank, mesh.data) for micro in range(self.accumulation)]
            offset = first + number * data.batch
            return [self.data.batch([offset + sample for sample in samples], self.at) for samples in step]

        return prefetch(make, 0, data.prefetch)

    def flops(self, batch: list[Batch]) -> float:
        """Of these samples, counted on one of the ranks that share them; 3.5× convention (flops.py)."""
        if self.distributed.mesh.context_rank:
            return 0.0
        return flops.training_flops(self.model_config, [length for micro in batch for length in micro.lengths])

    def report(self, step: int, total: Any, grad: float, lr: float, applied: bool, labels: float) -> None:
        config, tracker = self.config, self.tracker
        seconds = tracker.clock.lap()
        tokens = config.data.batch * config.data.length
        values: dict[str, Any] = dict(loss=total.loss, grad=grad, lr=lr, labels=labels, tokens=self.position.tokens)
        values["samples"] = [self.position.samples - config.data.batch, self.position.samples - 1]
        values |= dict(
            seconds=seconds, tokens_per_s=tokens / seconds, tflops=total.flops / seconds / self.distributed.world / 1e12
        )
        if len(self.data.names) > 1:  # also in a step that has only one of them
            values["source"] = total.sources
        if not applied:
            values["skipped"] = step - self.position.applied
        values |= profiling.memory_use(self.device, values["tflops"])
        tracker.log(step, values)
        if step == self.position.step and (step % config.tracking.log_every == 0 or step in (1, config.steps) or not applied):
            tracker.say(tracking.line(step, config.steps, values, tracker.clock.left(step)))
        if not applied:
            tracker.say(
                f"step {step}: the gradient is not finite, so the weights stay as they are ({values['skipped']} skipped so far)"
            )

    @contextlib.contextmanager
    def inspect(self, step: int) -> Iterator[None]:
        with profiling.watch(step, self.config.debug, self.folder, self.distributed.rank, self.device):
            yield

    def evaluate(self, step: int) -> Report | None:
        """Held-out data under the same ring; None if a signal came in between, which all ranks learn together."""
        self.tracker.clock.pause()
        self.model.eval()
        mesh = self.distributed.mesh

        def before_each(number: int) -> None:
            self.watchdog.at(step, f"evaluation, micro-batch {number + 1}")
            if self.distributed.any(self.signals.stop):
                raise Stopped

        where = (self.at, self.device, mesh.data_rank, mesh.data)
        try:
            report = evaluate(self.engine, self.held_out, self.config, *where, self.distributed.sum, before_each)
        except Stopped:
            return None
        finally:
            self.model.train()
            self.tracker.clock.go_on()
        self.tracker.log(step, report.metrics(), kind="held_out")
        for table in report.tables:
            self.tracker.curve(step, table.title, table.labels, table.means)
        return report

    def save(self) -> None:
        """If it fails `unsaved` says why, until one succeeds."""
        self.tracker.clock.pause()
        self.watchdog.at(self.position.step, "checkpoint")
        began = time.perf_counter()
        described = dict(
            model=asdict(self.model_config), rope=asdict(self.config.rope), tokenizer=asdict(self.config.tokenizer)
        )
        described |= dict(length=self.config.data.length, tokens=run_messages.reads_foreign_tokens(self.config))
        folder, options = self.folder / "checkpoints", self.config.checkpoint
        self.unsaved = checkpoint.save(folder, self.engine, self.position, described, self.distributed, options)
        if self.unsaved:
            step = self.position.step
            self.tracker.say(f"step {step}: the checkpoint could not be written, the one before stays: {self.unsaved}")
        elif time.perf_counter() - began > 5:
            self.tracker.say(f"step {self.position.step}: saved in {time.perf_counter() - began:.0f} s")
        self.tracker.clock.go_on()

    def finish(self) -> None:
        """Evaluate after the last step, print the final report and mark the run as finished."""
        config, step = self.config, self.position.step
        lines, metrics = [], {}
        if config.evaluate.batches:
            report = self.evaluate(step)
            if report is None:
                return
            metrics = report.metrics()
            lines = run_messages.held_out_report(report)
        if config.evaluate.sample and not run_messages.reads_foreign_tokens(config):
            self.watchdog.at(step, "sample")
            lines += [self._sample(), ""]
        lines += run_messages.final_report(config, self.folder, step, self.last_saved(), self.unsaved)
        self.tracker.say("\n" + "\n".join(lines))
        if self.distributed.rank == 0 and not self.unsaved:
            run_folder.finish(self.folder, dict(steps=step, tokens=self.position.tokens, held_out=metrics))

    def way_on(self) -> str:
        return run_messages.how_to_continue(self.config, self.last_saved())

    def last_saved(self) -> Path | None:
        return max((self.folder / "checkpoints").glob("step-*[0-9]"), default=None)

    def _sample(self) -> str:
        """How a held-out text goes on. All ranks draw the same: under ZeRO 3 each layer's weights are gathered for all."""
        config = self.config
        text = next((i for i, source in enumerate(self.held_out.sources) if isinstance(source, Corpus)), 0)
        prompt = self.held_out.windows([(text, 0)]).tokens[0, : max(1, config.data.length // 4)][:64].tolist()
        room = min(config.evaluate.sample, config.data.length - len(prompt))
        run_layer, self.model.run_layer = self.model.run_layer, activation_checkpointing.plain
        self.model.eval()
        # The cache counts in Python: layers that are compiled would be compiled again, token by token.
        with self.engine.precision(), torch.compiler.set_stance("force_eager"):
            out = generate(self.model, prompt, room, temperature=config.evaluate.temperature, size=self.tokenizer.size)
        self.model.train()
        self.model.run_layer = run_layer
        return "A held-out text, and from the bar on the model:\n" + "▌".join(map(self.tokenizer.decode, (prompt, out)))

    def close(self, failed: bool = False) -> None:
        self.tracker.close(failed)
        self.watchdog.close()
        self.signals.close()
        self.engine.close()
        self.distributed.close()
        if self._lock:
            self._lock.close()

    def _enter(self, composed: Composed) -> tuple[Path, IO[str] | None]:
        """Rank 0 makes the folder and locks it; the others are told where it is, or why there is none."""
        folder, lock, problem = None, None, ""
        if self.distributed.rank == 0:
            try:
                folder, lock = run_folder.enter(composed)
            except ConfigError as error:
                problem = str(error)
        folder, problem = self.distributed.first((folder, problem))
        if problem:
            raise ConfigError(problem)
        return folder, lock

    def _open(self) -> tuple[tokenizer.Tokenizer, Model, Dataset, Dataset]:
        config, letters = self.config, tokenizer.load(self.config.tokenizer)
        model = tokenizer.resolved(config, letters)
        parts = (Dataset(config.data, letters, config.seed, part, model.vocabulary) for part in ("train", "held_out"))
        return letters, model, *parts

    def _build(self) -> GPT:
        return GPT(self.model_config, self.config.rope, self.attention, seed=None)

    def _fresh(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        return fresh(name, self._shapes[name], self.model_config, self.config.seed, start, stop)

    def _source(self) -> checkpoint.Reader | None:
        """The checkpoint to go on from, if there is one. The run's own comes first: a path is where it began."""
        resume, folder, says = self.config.checkpoint.resume, self.folder / "checkpoints", []
        path, damaged = checkpoint.newest(folder, self.distributed) if resume != "none" else (None, [])
        if not path and resume != "none" and self.distributed.first((self.folder / run_folder.FINISHED).exists()):
            raise ConfigError(
                f"name={self.config.name}: that run is finished, and nothing is left to go on from or to report on "
                f"({'; '.join(damaged) or 'it has no checkpoint'}); give another name, or checkpoint.resume=none to train anew"
            )
        says += [f"{text}; {'the one before it is used' if path else 'there is none before it'}" for text in damaged]
        if resume not in ("auto", "none"):
            given = Path(resume).expanduser().resolve()
            if path and path != given:
                says.append(
                    f"checkpoint.resume={resume} is not used: {run_messages.short_path(path)} is this run's own; to leave it, take a new name"
                )
            elif not path:
                self._check_given(given)
                path = given
        if self.distributed.rank == 0:
            print(*says, sep="\n", end="\n" * bool(says), flush=True)
        return self.distributed.alike(partial(checkpoint.Reader, path)) if path else None

    def _check_given(self, path: Path) -> None:
        """The checkpoint that this run begins at is whole, and nothing else says what it begins with."""
        resume, init_from = self.config.checkpoint.resume, self.config.init_from
        if init_from:
            raise ConfigError(f"init_from={init_from}, checkpoint.resume={resume}: a run begins with one; leave out the other")
        if problems := checkpoint.verify(path, self.distributed):
            raise ConfigError(
                f"checkpoint.resume={resume}: {'; '.join(problems)}; a checkpoint is a folder runs/NAME/checkpoints/step-…"
            )

    def _record(self, composed: Composed, source: checkpoint.Reader | None) -> None:
        """On rank 0, once nothing refuses the run any more: what was refused leaves the folder as it was."""
        if self.distributed.rank:
            return
        step = source.position.step if source else 0
        if source and (told := self._jump(source.folder.parent.parent, step)):
            print(told, flush=True)
        run_folder.record(self.folder, composed, self.distributed.world, run_messages.device_name(self.device), step)
        for name in checkpoint.set_aside(self.folder / "checkpoints", source.folder if source else None):
            print(f"{name} is now {name}.bad", flush=True)

    def _jump(self, began: Path, step: int) -> str:
        """Of the learning rate, against what the run had asked for whose checkpoint this is: itself or another."""
        with contextlib.suppress(OSError, ValueError):  # a checkpoint that was moved, or of a version with other options
            return jump(run_folder.config_of(began), self.config, step)
        return ""

    def _converted(self) -> Callable[[str, str, int, int], torch.Tensor]:
        """Weights from a folder of Hugging Face safetensors."""
        from ringspan.trainer.checkpoint import huggingface

        path, rope = Path(self.config.init_from).expanduser(), self.config.rope
        values = huggingface.values(path, self.model_config, rope)
        if self.distributed.rank == 0 and (told := huggingface.scaled_otherwise(path, rope)):
            print(told, flush=True)
        return values

    def _warn_of_memory(self) -> None:
        """Before it is taken: a machine without enough may end a rank without a word."""
        known = replace(self.config, model=self.model_config)
        there = profiling.memory_of_a_rank(self.device)
        if warning := too_much(known, self.distributed.world, there, self.device.type == "cuda"):
            print(warning, file=sys.stderr, flush=True)
