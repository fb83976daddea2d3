"""Console text of a run: its description, data, resume note, final report and next commands."""

import contextlib
import errno
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ringspan.parallel.mesh import Mesh
from ringspan.trainer.config.compose import Composed
from ringspan.trainer.config.mixture import BLOCK, only_shards
from ringspan.trainer.config.schema import Config, Model
from ringspan.trainer.data.cache import Damaged
from ringspan.trainer.data.dataset import Corpus, Dataset, PackedCorpus
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.evaluation.held_out import Report
from ringspan.trainer.monitoring import tracking
from ringspan.trainer.planning import flops
from ringspan.trainer.planning.machines import Machine
from ringspan.trainer.planning.memory import GIB
from ringspan.trainer.planning.plans import PlannedStep

SYNTHETIC = {"recall", "passkey"}  # kinds of sources without prose, whose models continue no prompt
TOKENS_PER_BYTE_SAMPLE = 2**16  # held-out tokens that are decoded to count their bytes


def description(config: Config, model: Model, mesh: Mesh, world: int, device: torch.device) -> str:
    """Describe model, batch, devices and parallelism in one line."""
    total = flops.parameters(model).total
    split = f"data {mesh.data} × ring {mesh.ring} × ulysses {mesh.ulysses}, ZeRO {config.engine.zero}"
    batch = f"{config.data.batch} sequences of {config.data.length:,} tokens per step"
    return f"{config.model.name}: {total:,} weights; {batch}; {world} × {device_name(device)}, {split}"


def memory_line(planned: PlannedStep, machine: Machine) -> str:
    """Describe the memory plan in one line, with its planned memory and time."""
    need = planned.need
    host = f" and {need.on_host / GIB:.1f} of host memory" if need.on_host else ""
    seconds = f", {planned.seconds:.3g} s per step" if machine.peak else ""  # the speed of other machines is unknown
    return f"memory plan {planned.plan}: {need.peak / GIB:.2f} of {machine.memory / GIB:.1f} GiB{host} planned{seconds}"


def corpus_lines(config: Config, data: Dataset, held_out: Dataset) -> Iterator[str]:
    """Yield a line per corpus: its tokens, and how many of them this run reads."""
    pairs = zip(data.sources, held_out.sources, strict=True)
    for name, share, (source, test) in zip(data.names, data.shares, pairs, strict=True):
        if isinstance(source, Corpus) and isinstance(test, Corpus):
            read = config.steps * config.data.batch * config.data.length * share / BLOCK
            sizes = f"{tracking.with_unit(len(source.stream))} tokens and {tracking.with_unit(len(test.stream))} held out"
            packing = _packing(source) if isinstance(source, PackedCorpus) else ""
            yield f"{name}: {sizes}; {config.steps} steps read {tracking.with_unit(read)}{packing}"


def _packing(source: PackedCorpus) -> str:
    best, stream = (f"{share:.1%} of the documents" for share in (source.bins.cut, source.bins.stream_cut))
    return f"; best fit has {source.bins.padding:.1%} padding and cuts {best}, a stream has none and cuts {stream}"


def resume_note(config: Config, step: int) -> str:
    """Return the text after the folder's name when the run starts from a checkpoint of `step`."""
    if not step:
        return ""
    hint = " (a larger steps= continues the training)" if config.name else ""
    last = f", its last step: it only reports{hint}" if step >= config.steps else ""
    return f": continuing after step {step}{last}"


def held_out_line(step: int, report: Report) -> str:
    """Return the console line of an evaluation during a run, with the change since the previous one."""
    return f"step {step}: {_held_out_losses(report)}"


def _held_out_losses(report: Report) -> str:
    sources = "".join(f"  {name} {loss:.3f}" for name, loss in report.sources.items()) * (len(report.sources) > 1)
    return f"held-out loss {report.loss:.3f}{report.change}{sources}"


def bits_per_byte(config: Config, tokenizer: Tokenizer, held_out: Dataset, report: Report | None) -> dict[str, float]:
    """Return the held-out losses of texts in bits per byte, which compare between tokenizers.

    Args:
        config: the run's config.
        tokenizer: the run's tokenizer.
        held_out: the held-out part, of which the first tokens are decoded.
        report: the evaluation; None without one.
    """
    bits: dict[str, float] = {}
    if report is None or reads_foreign_tokens(config):
        return bits
    for name, source in zip(held_out.names, held_out.sources, strict=True):
        if not isinstance(source, Corpus):
            continue
        with contextlib.suppress(Damaged, OSError, ValueError):
            tokens = source.stream.read(np.arange(min(len(source.stream), TOKENS_PER_BYTE_SAMPLE)))
            num_bytes = len(tokenizer.decode(tokens.tolist()).encode())
            bits[name] = report.sources[name] / math.log(2) * len(tokens) / max(num_bytes, 1)
    return bits


def epochs(config: Config, data: Dataset, samples: int) -> dict[str, float]:
    """Return how often each text was read in that many samples."""
    triples = zip(data.names, data.sources, data.shares, strict=True)
    tokens = samples * config.data.length / BLOCK
    return {name: tokens * share / len(source.stream) for name, source, share in triples if isinstance(source, Corpus)}


def held_out_report(report: Report) -> list[str]:
    return [_held_out_losses(report), "", report.text(), ""]


def final_report(config: Config, folder: Path, step: int, last: Path | None, unsaved: str) -> list[str]:
    """Return lines that name the run's files and the next commands, or why the last step is not saved.

    Args:
        config: the run's config.
        folder: the run's folder.
        step: its last step.
        last: the newest checkpoint, if there is one.
        unsaved: why the last step is not saved; "" if it is.
    """
    path = short_path(folder)
    contents = {"metrics.jsonl": "every step", "config.yaml": "the full config"}
    contents |= {"checkpoints": f"the weights of step {int(last.name.removeprefix('step-'))}"} if last else {}
    present = [name for name in contents if (folder / name).exists()]
    deleted = [name for name in contents if name not in present]
    lines = [f"{path}: deleted during the run: {', '.join(deleted)}"] if deleted else []
    if present:
        lines.append(", ".join(f"{path}/{name}{' has' * (name == present[0])} {contents[name]}" for name in present) + ".")
    if unsaved:
        is_full = any(os.strerror(code) in unsaved for code in (errno.ENOSPC, errno.EDQUOT))
        remedy = "Free disk space; the" if is_full else "The"
        way_on = "continues from the last checkpoint" if last else "starts again"
        return [*lines, f"Step {step} is not saved: {unsaved}. {remedy} same command {way_on}."]
    return lines if deleted else [*lines, "Next steps:", *next_steps(config, path, last is not None)]


def next_steps(config: Config, path: str, saved: bool) -> Iterator[str]:
    kinds = {source.kind for source in config.data.sources.values()}
    own_files = bool(kinds & {"text", "tokens"})
    ringspan = command()
    if saved and not reads_foreign_tokens(config) and kinds - SYNTHETIC:
        yield f'  {ringspan} generate checkpoint={path} prompt="{"The" if own_files else "def main("}"'
    others = os.path.join(os.path.dirname(path), "…")
    yield f"  {ringspan} compare {path} {others}   # with other runs; --html report.html writes a page"
    if not own_files:
        files = "'data.sources.text.paths=[\"~/my-texts\"]'"
        yield f"  {ringspan} launch experiment=laptop data=text {files}   # your own files"
    yield f"  {ringspan} check experiment=llama_8b_1m hardware=h200 hardware.gpus=4   # does it fit?"


def how_to_continue(config: Config, last: Path | None) -> str:
    """Return how a run with other options continues from the last checkpoint."""
    if last is None:
        return "no checkpoint was saved, so a new run starts from the beginning"
    if config.name:
        return f"the same name= continues after {last.name}"
    instead = " in place of init_from" if config.init_from else ""
    return f"checkpoint.resume={short_path(last)}{instead} continues from the last checkpoint"


def no_checkpoint(composed: Composed, folder: Path, problem: str) -> str:
    """Return the message of a start that finds no whole checkpoint where some were saved, with a command for each way on.

    Args:
        composed: config and overrides of the command.
        folder: the run's folder.
        problem: what is wrong with the checkpoints; may have several lines.
    """
    own = [text for text in composed.overrides if not text.startswith(("checkpoint.resume=", "name="))]
    name = [text for text in composed.overrides if text.startswith("name=")]
    start = f"{command()} launch"
    return "\n".join(
        [
            f"{short_path(folder)}: no checkpoint is whole, so nothing is left to continue from:",
            *(f"  {line}" for line in problem.splitlines()),
            "Nothing was changed. The ways on:",
            "  restore checkpoints/, mount its disk, or rename a step-….bad that is whole; then run the same command again",
            f"  {start} {shlex.join([*own, *name, 'checkpoint.resume=none'])}   # from step 1; the old curve is kept",
            f"  {start} {shlex.join([*own, 'name=NEW', 'checkpoint.resume=FOLDER'])}   # from another run's checkpoint",
        ]
    )


def reads_foreign_tokens(config: Config) -> bool:
    """Whether all data are token ids of an unknown tokenizer, so that prompts and samples are impossible."""
    return only_shards(config.data) and config.tokenizer.kind == "bytes"


def can_sample(config: Config) -> bool:
    """Whether the run prints text samples."""
    return config.evaluate.sample > 0 and not reads_foreign_tokens(config)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"


def command() -> str:
    """Return `ringspan` as the user can type it; `make train` uses .venv, which may not be activated."""
    script = Path(sys.executable).with_name("ringspan")
    if not script.exists():
        python = shutil.which("python")
        activated = python and Path(python).parent == script.parent
        return f"{'python' if activated else short_path(Path(sys.executable))} -m ringspan"
    on_path = shutil.which("ringspan")
    return "ringspan" if on_path and Path(on_path).parent == script.parent else short_path(script)


def short_path(path: Path) -> str:
    """Return the path relative to the current folder, unless it lies outside of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
