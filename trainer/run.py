"""A run: distributed context, data, model and engine, and the methods that the training loop calls."""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ringspan.parallel.buffered_attention import BufferedAttention
from ringspan.parallel.coordination import progress
from ringspan.trainer import network, run_messages
from ringspan.trainer.checkpoint import checkpoint, compatibility, run_folder
from ringspan.trainer.checkpoint.reader import Position, Reader
from ringspan.trainer.checkpoint.replicas import ReplicasDifferError
from ringspan.trainer.checkpoint.start import Start, StartFinder
from ringspan.trainer.config.compose import Composed
from ringspan.trainer.data import fingerprint
from ringspan.trainer.data.dataset import Batch, open_parts, samples_of
from ringspan.trainer.data.prefetch import prefetch
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.engine import Engine
from ringspan.trainer.evaluation.cut_ring import model_attention
from ringspan.trainer.evaluation.held_out import Report, evaluate
from ringspan.trainer.generate import continue_held_out
from ringspan.trainer.layer import row_functions
from ringspan.trainer.memory.prepare import choose_plan, prepare_layers
from ringspan.trainer.memory.streamed import Streaming
from ringspan.trainer.model import GPT
from ringspan.trainer.monitoring import layer_boundaries, profiling, tracking
from ringspan.trainer.monitoring.check_timer import check_timer
from ringspan.trainer.monitoring.layer_boundaries import LayerBoundaries, StepAbandoned
from ringspan.trainer.monitoring.memory_use import MemoryUse
from ringspan.trainer.monitoring.run_history import RunHistory
from ringspan.trainer.monitoring.step_progress import StepProgress
from ringspan.trainer.monitoring.stop_signals import StopSignals
from ringspan.trainer.monitoring.watchdog import Watchdog
from ringspan.trainer.optim import learning_rate_jump
from ringspan.trainer.planning import flops


class Stopped(Exception):
    """A stop signal interrupted an evaluation."""


class Run:
    """One rank of a run, ready to train from its first step or its checkpoint.

    Args:
        composed: a valid config.

    Raises:
        ConfigError: the run cannot start; raised on all ranks.
        ValueError: this rank cannot start.
    """

    def __init__(self, composed: Composed) -> None:
        self.config = config = composed.config
        self.signals = StopSignals()
        self.distributed = distributed = DistributedContext(config)
        self.device = distributed.device
        self.folder, self._lock = run_folder.enter_on_all_ranks(composed, distributed)
        self.watchdog = Watchdog(self.folder, distributed.rank, distributed.world, config.debug.watchdog)
        self.tokenizer, self.model_config, self.data, self.held_out = distributed.call_on_all_ranks(partial(open_parts, config))
        self.described_data = fingerprint.describe(self.data, self.tokenizer)
        fingerprint.require_equal(self.described_data, distributed.gather)
        device_name = run_messages.device_name(self.device)
        self.planner, self.planned = choose_plan(config, self.model_config, device_name, distributed)
        mesh = distributed.mesh
        self.layout = mesh.layout(config.parallel.layout, config.data.length)
        self.local_positions = self.layout.positions(mesh.context_rank)
        self.accumulation = config.data.batch // (config.data.micro_batch * mesh.data)
        deterministic = config.debug.deterministic
        backend, cut = config.parallel.attention, config.debug.cut_ring
        self.attention = model_attention(self.layout, mesh, backend, deterministic, cut)
        self.streaming: Streaming | None = None
        if not self.planned.plan.keeps_everything and isinstance(self.attention, BufferedAttention):
            layers, functions = self.model_config.layers, row_functions(self.model_config)
            self.streaming = Streaming(self.planned.plan, layers, self.attention, functions)
        with torch.device("meta"):
            skeleton = self._build_model()
        self._shapes = {name: weight.shape for name, weight in skeleton.named_parameters()}
        finder = StartFinder(composed, self.folder, self.model_config, self._shapes, self.described_data, distributed)
        start = finder.find()
        source = start.source
        distributed.call_on_all_ranks(partial(self._record_start, composed, start))
        self.engine = Engine(config, self._build_model, start.values, self.device, self.accumulation)
        self.model = cast(GPT, self.engine.module)
        self.position, self.unsaved = Position(), ""
        self._saved = source.position.step if source and source.folder.parent == self.folder / "checkpoints" else 0
        self.num_bad = 0  # skipped steps in a row
        if source:
            self.position = source.position
            self.engine.load_moments(source.values, self.position.applied)
            source.restore_random()
        elif config.optim.kind == "adamw":  # Muon's first step may begin from other moments than zeros
            self.engine.allocate_moments()
        self.model.set_rope_frequencies()  # ZeRO 3 made them in the weights' dtype
        num_rows = len(self.local_positions)
        distributed.call_on_all_ranks(partial(prepare_layers, self.model, self.streaming, config, num_rows, self.device))
        host = self.streaming.kept.host_bytes if self.streaming else 0
        self.memory_use = MemoryUse(self.device, self.planned, host, is_warm=config.debug.warm_up > 0)
        if config.debug.warm_up:
            self._warm_up(config.debug.warm_up)
        self._start_tracking(source)
        self._watch_layer_boundaries()

    def _warm_up(self, length: int) -> None:
        """Run a forward and backward of the first `length` tokens. Their gradients are dropped."""
        mesh, samples = self.distributed.mesh, list(range(self.config.data.micro_batch))
        self.attention.layout = layout = mesh.layout(self.config.parallel.layout, length)
        batch = self.data.batch(samples, layout.positions(mesh.context_rank)).to(self.device)
        batch = batch._replace(documents=batch.documents[:, :length])
        self.engine.warm_up(self.model.embedding.weight, *batch.inputs, each=True)
        self.attention.layout = self.layout

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step: this rank's samples, and of each sample its positions."""
        data, mesh, first = self.config.data, self.distributed.mesh, self.position.samples

        def make(number: int) -> list[Batch]:
            step = [samples_of(0, micro, data, mesh.data_rank, mesh.data) for micro in range(self.accumulation)]
            offset = first + number * data.batch
            return [self.data.batch([offset + sample for sample in samples], self.local_positions) for samples in step]

        return prefetch(make, 0, data.prefetch, data.workers)

    def explain_difference(self, batch: list[Batch]) -> str:
        """Return which ranks read a step's samples from files that differ, and how to continue."""
        text = fingerprint.explain_difference(self.data, batch, self.distributed.mesh, self.distributed.gather)
        return f"{text}; copy the same files to every host; {self.how_to_continue()}"

    def flops(self, batch: list[Batch]) -> float:
        """Return the FLOPs of a step's samples, attention counted 3.5×, on one of the ranks that share them; else 0."""
        if self.distributed.mesh.context_rank:
            return 0.0
        return flops.training_flops(self.model_config, [length for micro in batch for length in micro.lengths])

    def report(self, step: int, total: Any, grad: float, lr: float, applied: bool, labels: float) -> None:
        """Write a step's metrics and its console line.

        Args:
            step: the step, counted from 1.
            total: the step's loop.Total.
            grad: norm of the gradient.
            lr: learning rate.
            applied: whether the weights changed.
            labels: labels of all ranks.
        """
        config, tracker = self.config, self.tracker
        seconds = tracker.clock.lap()
        tokens = config.data.batch * config.data.length
        values: dict[str, Any] = dict(loss=total.loss, grad=grad, lr=lr, labels=labels, tokens=self.position.tokens)
        values["samples"] = [self.position.samples - config.data.batch, self.position.samples - 1]
        values |= dict(
            seconds=seconds, tokens_per_s=tokens / seconds, tflops=total.flops / seconds / self.distributed.world / 1e12
        )
        if len(self.data.names) > 1:  # also if the step has samples of one source only
            values["source"] = total.sources
        if not applied:
            values["skipped"] = step - self.position.applied
        values["checks"] = check_timer.take()
        values |= profiling.memory_metrics(self.device, values["tflops"], *self.memory_use.peaks)
        if phases := self.memory_use.step(seconds):
            values["phases"] = phases
        tracker.log(step, values)
        self.history.add_step(values, tokens, total.source_labels)
        if step == self.position.step and (step % config.tracking.log_every == 0 or step in (1, config.steps) or not applied):
            values["loss"], values["source"] = self.history.recent()
            tracker.print(tracking.line(step, config.steps, values, self.history.elapsed, tracker.clock.remaining(step)))
        if not applied:
            tracker.print(f"step {step}: the gradient is not finite; the step is skipped ({values['skipped']} so far)")

    @contextlib.contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Measure a phase of a step: "forward", "backward" or "step". The first step's phases are written at once."""
        with self.memory_use.phase(name):
            yield
        if self.memory_use.first:
            self.tracker.log(step, self.memory_use.finished(), kind="phase")

    @contextlib.contextmanager
    def profile(self, step: int) -> Iterator[None]:
        with profiling.profile_step(step, self.config.debug, self.folder, self.distributed.rank, self.device):
            yield

    def evaluate(self, step: int) -> Report | None:
        """Evaluate on held-out data; None on all ranks if a stop signal interrupted it."""
        began = time.perf_counter()
        self.tracker.clock.pause()
        self.model.eval()
        mesh = self.distributed.mesh

        def on_batch(number: int) -> None:
            self.watchdog.update(step, f"evaluation, micro-batch {number + 1}")
            if self.distributed.any(self.signals.stop):
                raise Stopped

        rank = (self.local_positions, self.device, mesh.data_rank, mesh.data)
        try:
            report = evaluate(self.engine, self.held_out, self.config, *rank, self.distributed.sum, on_batch)
        except (Stopped, StepAbandoned):
            return None
        finally:
            self.model.train()
            self.tracker.clock.resume()
        seconds = time.perf_counter() - began
        about = dict(batches=self.config.evaluate.batches, seconds=seconds)
        self.tracker.log(step, report.metrics() | about, kind="held_out")
        report.change = self.history.add_evaluation(step, report.loss, seconds, self.config.evaluate.batches)
        for table in report.tables:
            self.tracker.log_table(step, table.title, table.labels, table.means)
        return report

    def evaluate_if_due(self, step: int) -> bool:
        """Evaluate and print a sample, where the options ask for it; False if a stop signal interrupted it."""
        options = self.config.evaluate
        if options.every and options.batches and not step % options.every:
            if (report := self.evaluate(step)) is None:
                return False
            self.tracker.print(run_messages.held_out_line(step, report))
        if options.sample_every and step % options.sample_every == 0 and run_messages.can_sample(self.config):
            self.tracker.clock.pause()
            try:
                self.tracker.print(self._sample())
            except StepAbandoned:
                return False
            finally:
                self.tracker.clock.resume()
        return True

    def save(self) -> None:
        """Save a checkpoint, unless this step is saved, or skipped. `unsaved` has the reason until a save succeeds."""
        if self.position.step == self._saved:
            return
        step = self.position.step
        if self.num_bad:  # the weights may be the cause, and would replace good checkpoints
            self.unsaved = f"the gradient was not finite in the last {self.num_bad} steps"
            self.tracker.print(f"step {step}: no checkpoint is saved, {self._previous_note()}: {self.unsaved}")
            return
        self.progress.end_step()
        self.tracker.clock.pause()
        self.watchdog.update(step, "checkpoint")
        began = time.perf_counter()
        folder, options = self.folder / "checkpoints", self.config.checkpoint
        described = compatibility.describe(self.config, self.model_config)
        described["fingerprint"] = fingerprint.for_checkpoint(self.described_data)
        try:
            self.unsaved = checkpoint.save(folder, self.engine, self.position, described, self.distributed, options)
        except ReplicasDifferError as error:
            raise ReplicasDifferError(f"step {step}: {error}; nothing is saved; {self.how_to_continue()}") from None
        self.history.seconds["saving"] += time.perf_counter() - began
        if not self.unsaved:
            self.tracker.log(step, dict(seconds=time.perf_counter() - began), kind="checkpoint")
        if self.unsaved:
            self.tracker.print(f"step {step}: the checkpoint cannot be written, {self._previous_note()}: {self.unsaved}")
        elif time.perf_counter() - began > 5:
            self.tracker.print(f"step {step}: saved in {time.perf_counter() - began:.0f} s")
        self._saved = self._saved if self.unsaved else step
        self.tracker.clock.resume()

    def finish(self) -> None:
        """Evaluate after the last step, print the final report and mark the run as finished."""
        config, step = self.config, self.position.step
        lines, metrics, report = [], {}, None
        if config.evaluate.batches:
            report = self.evaluate(step)
            if report is None:
                return
            metrics = report.metrics()
            lines = run_messages.held_out_report(report)
        if run_messages.can_sample(self.config):
            with contextlib.suppress(StepAbandoned):
                lines += [self._sample(), ""]
        if self.distributed.rank == 0:
            bits = run_messages.bits_per_byte(config, self.tokenizer, self.held_out, report)
            lines += self.history.report(bits, run_messages.epochs(config, self.data, self.position.samples))
        lines += self.memory_use.report()
        lines += run_messages.final_report(config, self.folder, step, self._last_checkpoint(), self.unsaved)
        self.tracker.print("\n" + "\n".join(lines))
        problem = self.unsaved
        if self.distributed.rank == 0 and not problem:
            problem = run_folder.finish(self.folder, dict(steps=step, tokens=self.position.tokens, held_out=metrics))
            if problem:
                self.tracker.print(problem)
        self.unsaved = self.distributed.broadcast(problem)

    def out_of_memory(self) -> str:
        """Return a message about an out-of-memory error: phase, bytes, and the next plan to try."""
        smaller = self.planner.next_smaller(self.planned.plan)
        last = self._last_checkpoint()
        saved = f"{last.name} is the last checkpoint" if last else "no checkpoint was saved"
        return f"{self.memory_use.out_of_memory(smaller, self.planner.target.memory)}; {saved}"

    def how_to_continue(self) -> str:
        return run_messages.how_to_continue(self.config, self._last_checkpoint())

    def close(self, failed: bool = False) -> None:
        layer_boundaries.activate(None)
        self.progress.close()
        progress.enter("the end of the run")
        self.tracker.close(failed)
        self.distributed.barrier()  # a rank that exits with code 1 ends those that still upload their metrics
        self.watchdog.close()
        self.signals.close()
        self.engine.close()
        self.distributed.close()
        if self._lock:
            self._lock.close()

    def _watch_layer_boundaries(self) -> None:
        rank, world, timeout = self.distributed.rank, self.distributed.world, self.distributed.timeout
        store = network.store_client(timeout) if world > 1 else None
        signals, seconds = self.signals, timeout.total_seconds()
        boundaries = LayerBoundaries(rank, world, lambda: signals.stop, store, seconds)
        layer_boundaries.activate(boundaries)
        self.progress = StepProgress(self.model_config.layers, lambda: boundaries.layers, self.tracker.print, rank == 0)

    def _previous_note(self) -> str:
        return "the previous one remains" if self._last_checkpoint() else "there is no earlier one"

    def _last_checkpoint(self) -> Path | None:
        return max((self.folder / "checkpoints").glob("step-*[0-9]"), default=None)

    def _sample(self) -> str:
        """Continue a held-out text. All ranks draw the same tokens: under ZeRO 3 each layer's weights are gathered for all."""
        self.watchdog.update(self.position.step, "sample")
        self.model.eval()
        # The cache counts tokens in Python: compiled layers would be recompiled for every token.
        with self.engine.precision(), torch.compiler.set_stance("force_eager"):
            text = continue_held_out(self.model, self.held_out, self.tokenizer, self.config)
        self.model.train()
        return text

    def _build_model(self) -> GPT:
        model = GPT(self.model_config, self.config.rope, self.attention, seed=None)
        if self.streaming is not None:
            model.stream(self.streaming)
        return model

    def _record_start(self, composed: Composed, start: Start) -> None:
        """Write the start to the run's folder on rank 0. Nothing rejects the run after this; a rejected run changes no file."""
        if self.distributed.rank:
            return
        source = start.source
        step = source.position.step if source else 0
        if source:
            with contextlib.suppress(OSError, ValueError):  # a checkpoint that was moved, or of a version with other options
                if warning := learning_rate_jump(run_folder.config_of(source.folder.parent.parent), self.config, step):
                    print(warning, flush=True)
        device, plan = run_messages.device_name(self.device), str(self.planned.plan)
        if start.accepted:
            print(f"checkpoint.changed accepts {', '.join(start.accepted.values())}", flush=True)
        run_folder.record(self.folder, composed, self.distributed.world, device, step, plan, start.accepted)
        for name in checkpoint.set_aside(self.folder / "checkpoints", source.folder if source else None):
            print(f"{name} is renamed to {name}.bad", flush=True)

    def _start_tracking(self, source: Reader | None) -> None:
        config, distributed = self.config, self.distributed
        own = source is not None and source.folder.parent == self.folder / "checkpoints"
        run_id = self.position.run_id if own else ""  # a run that starts from another run's checkpoint has its own curves
        self.tracker = tracking.Tracker(config, self.folder, distributed.rank == 0, run_id, self.position.step)
        self.history = RunHistory(self.folder)
        self.position.run_id = distributed.broadcast(self.tracker.run_id)
        description = run_messages.description(config, self.model_config, distributed.mesh, distributed.world, self.device)
        corpora = run_messages.corpus_lines(config, self.data, self.held_out)
        folder = run_messages.short_path(self.folder) + run_messages.resume_note(config, source.position.step if source else 0)
        memory = run_messages.memory_line(self.planned, self.planner.target)
        self.tracker.print("\n".join([description, memory, *corpora, folder]))
        self.tracker.log(self.position.step, self.memory_use.start(), kind="start")
