"""Console text of a run: what it is, what it read, how it ended, and which commands come next."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ringspan.parallel.mesh import Mesh
from ringspan.trainer.config.mixture import BLOCK, only_shards
from ringspan.trainer.config.schema import Config, Model
from ringspan.trainer.data.dataset import Corpus, Dataset
from ringspan.trainer.evaluate import Report
from ringspan.trainer.monitoring import tracking
from ringspan.trainer.planning import flops


def description(config: Config, model: Model, mesh: Mesh, world: int, device: torch.device) -> str:
    """Model, batch, devices and parallelism in one line."""
    total = flops.parameters(model).total
    how = f"data {mesh.data} × ring {mesh.ring} × ulysses {mesh.ulysses}, ZeRO {config.engine.zero}"
    batch = f"{config.data.batch} sequences of {config.data.length:,} tokens a step"
    return f"{config.model.name}: {total:,} weights; {batch}; {world} × {device_name(device)}, {how}"


def corpus_lines(config: Config, data: Dataset, held_out: Dataset) -> Iterator[str]:
    """One line per corpus: its tokens, and how many of them this run reads."""
    pairs = zip(data.sources, held_out.sources, strict=True)
    for name, share, (source, test) in zip(data.names, data.shares, pairs, strict=True):
        if isinstance(source, Corpus) and isinstance(test, Corpus):
            read = config.steps * config.data.batch * config.data.length * share / BLOCK
            sizes = f"{tracking.short(len(source.stream))} tokens and {tracking.short(len(test.stream))} held out"
            yield f"{name}: {sizes}; {config.steps} steps read {tracking.short(read)}"


def resume_note(config: Config, step: int) -> str:
    """Text after the folder's name when the run starts from a checkpoint of `step`."""
    if not step:
        return ""
    more = " (more steps= trains on)" if config.name else ""
    last = f", its last: only its report follows{more}" if step >= config.steps else ""
    return f": going on after step {step}{last}"


def held_out_report(report: Report) -> list[str]:
    sources = "".join(f"  {name} {loss:.3f}" for name, loss in report.sources.items())
    mean = "" if report.loss in report.sources.values() else f" {report.loss:.3f}"  # of several texts
    return [f"held-out loss{mean}{sources}", "", report.text(), ""]


def final_report(config: Config, folder: Path, step: int, last: Path | None, unsaved: str) -> list[str]:
    """Where the run's files are, and the next commands; or why the last step is not saved."""
    path = short_path(folder)
    weights = f", {path}/checkpoints the weights of step {int(last.name.removeprefix('step-'))}" if last else ""
    lines = [f"{path}/metrics.jsonl has every step, {path}/config.yaml the whole config{weights}."]
    if unsaved:
        return [*lines, f"Step {step} is not saved: {unsaved}. Make room; the same command goes on from what is saved."]
    return [*lines, "What to try next:", *next_steps(config, path, last is not None)]


def next_steps(config: Config, path: str, saved: bool) -> Iterator[str]:
    own_files = any(source.kind in ("text", "tokens") for source in config.data.sources.values())
    ringspan = command()
    if saved and not reads_foreign_tokens(config):
        yield f'  {ringspan} generate checkpoint={path} prompt="{"The" if own_files else "def main("}"'
    if not own_files:
        yield f"  {ringspan} launch experiment=laptop data=text 'data.sources.text.paths=[~/my-texts]'   # your own files"
    yield f"  {ringspan} check experiment=llama_8b_1m hardware=h200 hardware.gpus=4   # will it fit?"


def how_to_continue(config: Config, last: Path | None) -> str:
    """The option that starts a run with other options from the last checkpoint."""
    if last is None:
        return "no checkpoint was saved, so it starts anew"
    if config.name:
        return f"the same name= goes on after {last.name}"
    instead = " in place of init_from" if config.init_from else ""
    return f"checkpoint.resume={short_path(last)}{instead} goes on from the last checkpoint"


def reads_foreign_tokens(config: Config) -> bool:
    """Whether all data are token ids of an unknown tokenizer, so that the model cannot be prompted or read."""
    return only_shards(config.data) and config.tokenizer.kind == "bytes"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"


def command() -> str:
    """The command as the user can type it: `make train` uses .venv, which need not be activated."""
    script = Path(sys.executable).with_name("ringspan")
    if not script.exists():
        python = shutil.which("python")
        same = python and Path(python).parent == script.parent
        return f"{'python' if same else short_path(Path(sys.executable))} -m ringspan"
    activated = shutil.which("ringspan")
    return "ringspan" if activated and Path(activated).parent == script.parent else short_path(script)


def short_path(path: Path) -> str:
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown
