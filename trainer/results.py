"""Runs turned into results: how fast, how lean, how well planned, and how far runs that should agree are apart.

    ringspan results runs/llama-1b-131072-a7cc5c runs/gpt2-124m-8192-3f21aa --save
    ringspan results runs/one-gpu runs/ring-4 runs/ring-4-again --plot --save curves-h200

Everything is read from the runs' folders. Speeds are medians over the steps of a run's last start, without the first --skip
of them (which compile) and without those that were profiled. Peak memory is torch.cuda.max_memory_allocated of rank 0, and
stands beside what `trainer.check` plans for the same config. A profiled step (debug.profile=[6]) is split by what ran.

Runs that differ in nothing but how they were split over ranks should have one loss curve. Of each such pair the largest
difference is told; pairs that were split alike too differ by the kernels' noise alone, which is the measure for the others.
"""

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from ringspan import ROOT
from ringspan.kernels.bench.measure import slug
from ringspan.kernels.bench.plots import pyplot
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.monitoring.profile_breakdown import breakdown
from ringspan.trainer.planning import flops
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import GIB, footprint

RESULTS = ROOT / "docs/results"  # of a checkout
DOCS = RESULTS.parent
PROGRAM = "ringspan results"
LEAST = 3  # steps that a median is taken of
PRIVATE = ("runs", "name", "data.cache", "checkpoint.resume")  # where a run lay is no part of what it was
PLACES = ("paths", "path", "init_from")  # nor where its files were, but that it had some
Row = dict[str, Any]


@dataclass
class Recorded:
    """What a run's folder says."""

    name: str
    folder: Path
    config: Config
    start: Row  # of starts.jsonl: the last that any step followed
    since: list[Row]  # the steps of that start
    steps: list[Row]  # all

    @property
    def on_gpu(self) -> bool:
        return not self.start["device"].startswith("CPU")


def read(folder: Path) -> Recorded:
    missing = [name for name in ("config.yaml", "starts.jsonl", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder}: there is no {', '.join(missing)}: give the folder of a run, such as runs/NAME")
    starts = list(run_folder.lines(folder / "starts.jsonl"))
    steps = [line for line in run_folder.lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    if wild := [step["step"] for step in steps if step["loss"] is None or not math.isfinite(step["loss"])]:
        raise ValueError(f"{folder}: the loss of step {wild[0]} is not finite, and there is no curve to tell of: run it anew")
    for start in reversed(starts):  # a run that was over and is started again adds a start, and no step
        began = datetime.fromisoformat(start["time"]).timestamp()
        if since := [step for step in steps if step["time"] >= began]:
            return Recorded(folder.resolve().name, folder, run_folder.config_of(folder), start, since, steps)
    raise ValueError(f"{folder}: this run has not finished a step: let it run on")


def measure(run: Recorded, skip: int) -> Row:
    """A row of the result."""
    config, ranks, device = tokenizer.resolve_config(run.config), run.start["ranks"], run.start["device"]
    looked_at = {*config.debug.profile, *config.debug.memory}
    steps = [step for step in run.since[skip:] if step["step"] not in looked_at]
    if len(steps) < LEAST:
        raise ValueError(
            f"{run.folder}: of the {len(run.since)} steps since its last start {len(steps)} are left without the first "
            f"{skip} and those that were profiled, and a median takes {LEAST}: run more steps, or give a smaller --skip"
        )
    gpu, tokens = run.on_gpu, config.data.batch * config.data.length
    seconds = statistics.median(step["seconds"] for step in steps)
    kernel = statistics.median(step["tflops"] for step in steps)
    # The same step counted the other way: its products are known, the rest of what was counted is attention.
    products = 6 * flops.parameters(config.model).products * tokens / ranks / 1e12
    model = statistics.median(
        products / step["seconds"] + (step["tflops"] - products / step["seconds"]) * 3 / 3.5 for step in steps
    )
    data, ring, ulysses = validate.mesh_of(config, ranks)
    row: Row = dict(run=run.name, model=config.model.name, parameters=flops.parameters(config.model).total)
    row |= dict(
        length=config.data.length, batch=config.data.batch, tokens=tokens, ranks=ranks, data=sorted(config.data.sources)
    )
    row |= dict(split=dict(data=data, ring=ring, ulysses=ulysses), zero=config.engine.zero)
    row |= dict(activations=config.engine.activations, dtype=_dtype(run), command=_started(run))
    row |= dict(steps=[steps[0]["step"], steps[-1]["step"]], num_steps=len(steps), seconds=seconds)
    row |= dict(seconds_min=min(s["seconds"] for s in steps), seconds_max=max(s["seconds"] for s in steps))
    row |= {"tokens_per_s": tokens / seconds, "tflops_3.5x": kernel, "tflops_3x": model, "loss": steps[-1]["loss"]}
    known = next((m for m in MACHINES.values() if gpu and m.name.split()[-1] in device), None)
    if known:
        row |= {"mfu_3.5x": kernel * 1e12 / known.peak, "mfu_3x": model * 1e12 / known.peak}
    planned = footprint(config, ranks, gpu).peak / GIB
    if "gib" in steps[-1]:
        peak = max(step["gib"] for step in steps)
        row |= dict(gib=peak, gib_reserved=max(step["gib_reserved"] for step in steps), planned_gib=planned)
        row |= dict(planned_of_measured=planned / peak)
    return row | _profiled(run)


def _profiled(run: Recorded) -> Row:
    """The last profiled step of rank 0, if there is one, as shares of its time."""
    traces = {int(path.name.split("-")[1]): path for path in (run.folder / "profile").glob("step-*-rank-0.json")}
    # Others lie there from starts before, which may have been split in another way.
    traced = traces.keys() & set(run.config.debug.profile) & {step["step"] for step in run.since}
    if not traced:
        return {}
    step = max(traced)
    found = breakdown(traces[step])
    whole = sum(found["seconds"].values())
    shares = {kind: seconds / whole for kind, seconds in found["seconds"].items()}
    shares |= {"communication, hidden too": found["communication_with_hidden"] / whole}
    return dict(profiled_step=step, profiled_seconds=whole, shares=shares, most_of_other=found["most_of_other"])


def differences(runs: list[Recorded]) -> list[Row]:
    """Of each pair of runs whose losses should be one curve."""
    found = []
    for a, b in combinations(runs, 2):
        if _curve(a) != _curve(b):
            continue
        losses = [{step["step"]: step["loss"] for step in run.steps} for run in (a, b)]
        both = sorted(losses[0].keys() & losses[1].keys())
        if not both:
            continue
        apart = {step: abs(losses[0][step] - losses[1][step]) for step in both}
        worst = max(apart, key=lambda step: apart[step])
        row = dict(runs=[a.name, b.name], splits=[_split(run) for run in (a, b)], steps=len(both))
        row |= dict(differ_in="kernel noise" if _alike(a) == _alike(b) else "split", step=worst, loss=losses[0][worst])
        found.append(row | dict(largest=apart[worst], mean=statistics.fmean(apart.values())))
    return found


def _curve(run: Recorded) -> tuple[str, str]:
    """Equal for runs that should have the same losses, but for rounding in a fixed precision."""
    return run_folder.identity(run.config), _dtype(run)


def _alike(run: Recorded) -> Row:
    """What may change how a step is computed, and not what it computes."""
    parallel = {key: value for key, value in asdict(run.config.parallel).items() if key != "timeout"}
    how = dict(ranks=run.start["ranks"], device=run.start["device"], micro_batch=run.config.data.micro_batch)
    mesh = dict(zip(("data", "ring", "ulysses"), validate.mesh_of(run.config, run.start["ranks"]), strict=True))
    return how | parallel | mesh | asdict(run.config.engine) | dict(deterministic=run.config.debug.deterministic)


def _split(run: Recorded) -> str:
    data, ring, ulysses = validate.mesh_of(run.config, run.start["ranks"])
    return f"data {data} × ring {ring} × ulysses {ulysses}, ZeRO {run.config.engine.zero}"


def _dtype(run: Recorded) -> str:
    return "bf16" if validate.multiplies_bf16(run.config, run.on_gpu) else "fp32"


def _started(run: Recorded) -> str:
    """What starts such a run."""
    pairs = [text.partition("=")[::2] for text in run.start["overrides"]]
    given = [f"{key}={'…' if key.endswith(PLACES) else value}" for key, value in pairs if key not in PRIVATE]
    return f"torchrun --nproc-per-node={run.start['ranks']} -m ringspan.trainer.train {shlex.join(given)}".rstrip()


def report(row: Row) -> str:
    """A run in four lines."""
    unit = "GPU" if "gib" in row else "rank"
    split = " × ".join(f"{name} {size}" for name, size in row["split"].items())
    lines = [
        f"{row['run']}: {row['model']}, {row['parameters']:,} weights, {row['batch']} × {row['length']:,} tokens a step of "
        f"{', '.join(row['data'])}; {split}, ZeRO {row['zero']}, activations {row['activations']}, {row['dtype']}",
        f"  steps {row['steps'][0]} to {row['steps'][1]}, median of {row['num_steps']}: {row['seconds']:.4g} s "
        f"({row['seconds_min']:.4g} to {row['seconds_max']:.4g}), {row['tokens_per_s']:,.0f} tokens/s",
        f"  TFLOP/s a {unit}: {row['tflops_3.5x']:.4g} counting attention 3.5×, {row['tflops_3x']:.4g} counting it 3×"
        + (f"; MFU {row['mfu_3.5x']:.1%} and {row['mfu_3x']:.1%}" if "mfu_3x" in row else ""),
    ]
    if "gib" in row:
        lines.append(
            f"  memory: {row['gib']:.2f} GiB allocated at the peak, {row['gib_reserved']:.2f} reserved; "
            f"trainer.check plans {row['planned_gib']:.2f}, {row['planned_of_measured'] - 1:+.1%}"
        )
    if "shares" in row:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
        lines.append(f"  step {row['profiled_step']}, profiled, {row['profiled_seconds']:.4g} s: {shares}")
        lines += [f"    other: {seconds * 1000:8.1f} ms  {name}" for name, seconds in row["most_of_other"].items()]
    else:
        lines.append("  no step was profiled, so nobody knows what it was spent on: run it with debug.profile=[6]")
    return "\n".join(lines)


def report_differences(found: list[Row]) -> str:
    lines = []
    for row in found:
        lines.append(f"{' and '.join(row['runs'])} differ by {row['differ_in']} ({'; '.join(dict.fromkeys(row['splits']))}):")
        lines.append(
            f"  over {row['steps']} steps the losses are at most {row['largest']:.3g} apart, at step {row['step']} "
            f"(loss {row['loss']:.4g}); {row['mean']:.3g} on average"
        )
    if found and all(row["differ_in"] == "split" for row in found):
        lines.append("one of these runs a second time (another name=) would say how much of it is the kernels' noise")
    return "\n".join(lines)


def draw(runs: list[Recorded], found: list[Row], path: Path) -> None:
    """Loss curves on one picture, and below them how far the pairs are apart."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1 + bool(found), 1, figsize=(9, 5 + 3 * bool(found)), layout="constrained", squeeze=False, sharex=True
    )
    losses = {run.name: {step["step"]: step["loss"] for step in run.steps} for run in runs}
    for index, run in enumerate(runs):  # narrow above broad, or curves that agree would hide each other
        style = dict(lw=1 + 2 * (len(runs) - 1 - index), alpha=0.7)
        axes[0, 0].plot(*zip(*losses[run.name].items(), strict=True), label=f"{run.name}: {_split(run)}", **style)
    axes[0, 0].set(ylabel="training loss")
    for row in found:
        first, second = (losses[name] for name in row["runs"])
        both = sorted(first.keys() & second.keys())
        label = f"{row['differ_in']}: {' and '.join(row['runs'])}"
        axes[1, 0].plot(both, [max(abs(first[step] - second[step]), 1e-9) for step in both], label=label)
    if found:
        axes[1, 0].set(yscale="log", ylabel="difference of the losses (none stands at 1e-9)")
    for axis in axes[:, 0]:
        axis.legend(fontsize=8)
    axes[-1, 0].set(xlabel="step")
    figure.suptitle(f"{runs[0].config.model.name}, {runs[0].config.data.length:,} tokens, {runs[0].start['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def result(runs: list[Recorded], rows: list[Row], found: list[Row], command: str) -> Row:
    """What docs/results keeps."""
    start = runs[-1].start
    about: Row = dict(kind="train", device=start["device"], date=start["time"].partition(" ")[0])
    git = start["git"]
    about["commit"] = git["commit"][:10] + "-dirty" * bool(git["changed"]) if git else None
    about |= dict(versions=start["versions"], dtype=", ".join(sorted({row["dtype"] for row in rows})), command=command)
    return about | dict(rows=rows, differences=found)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs on one kind of device")
    parser.add_argument("--skip", type=int, default=2, help="steps at a start that are not counted (default %(default)s)")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default train-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--plot", nargs="?", const="", metavar="PNG", help="draw the loss curves (default docs/loss-DEVICE.png)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        runs = [read(folder) for folder in args.runs]
        if len({run.name for run in runs}) < len(runs):
            raise ValueError(
                f"{' '.join(map(str, args.runs))}: two of these have one name, and a result tells runs by their names"
            )
        devices = sorted({run.start["device"] for run in runs})
        if len(devices) > 1:
            raise ValueError(
                f"these runs were on {' and on '.join(devices)}, and a result is about one device: call it for each"
            )
        if args.skip < 0:
            raise ValueError(f"--skip {args.skip}: it must be at least 0")
        if args.plot is not None:
            pyplot()  # better told now
        rows = [measure(run, args.skip) for run in runs]
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    found, device = differences(runs), slug(devices[0])
    print(devices[0], *map(report, rows), *[report_differences(found)] * bool(found), sep="\n\n")
    path = args.json
    if path is None and args.save is not None:
        path = RESULTS / f"{(args.save or 'train-' + device).removesuffix('.json')}.json"
    plot = None if args.plot is None else Path(args.plot) if args.plot else DOCS / f"loss-{device}.png"
    for target in (path, plot):
        if target is not None:
            with contextlib.suppress(OSError):
                RESULTS.mkdir(parents=True, exist_ok=True)
            if not target.parent.is_dir():
                parser.error(f"{target.parent} is no folder: make it first")
    if plot is not None:
        draw(runs, found, plot)
        print(f"\ndrawn: {plot}")
    if path is not None:
        named = ["--save", *([args.save] if args.save else [])] * (args.save is not None) + ["--plot"] * (plot is not None)
        command = shlex.join([*PROGRAM.split(), *(f"runs/{run.name}" for run in runs), "--skip", str(args.skip), *named])
        whole = result(runs, rows, found, command)
        if plot is not None and plot.resolve().is_relative_to(DOCS.parent):
            whole["plot"] = plot.resolve().relative_to(DOCS.parent).as_posix()
        path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n")
        print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
