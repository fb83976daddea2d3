"""Report runs: speed, memory against the plan, and loss differences between runs that should agree.

    ringspan results runs/llama-1b-131072-a7cc5c runs/gpt2-124m-8192-3f21aa --save
    ringspan results runs/one-gpu runs/ring-4 runs/ring-4-again --plot --save curves-h200

All input comes from the runs' folders. Speeds are medians over the steps of a run's last start, without the first --skip
steps (which compile) and without profiled steps. Peak memory is torch.cuda.max_memory_allocated of rank 0, next to the plan
of `ringspan check` for the same config. A profiled step (debug.profile=[6]) is broken down by kind.

Runs that differ only in their split over ranks should have one loss curve. For each such pair the report gives the largest
difference. Pairs with the same split differ by the kernels' noise alone, which is the reference for the other pairs.
"""

import argparse
import contextlib
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from ringspan.kernels.bench.measure import RESULTS, slug
from ringspan.kernels.bench.plots import pyplot
from ringspan.trainer.checkpoint import run_folder
from ringspan.trainer.config import validate
from ringspan.trainer.config.schema import Config
from ringspan.trainer.data import tokenizer
from ringspan.trainer.evaluation import recorded
from ringspan.trainer.memory.plan import parse
from ringspan.trainer.monitoring.profile_breakdown import breakdown
from ringspan.trainer.monitoring.tracking import duration, with_unit
from ringspan.trainer.planning import flops
from ringspan.trainer.planning.machines import MACHINES
from ringspan.trainer.planning.memory import GIB, footprint
from ringspan.trainer.planning.step_time import step_time
from ringspan.trainer.reports.loss_plot import draw
from ringspan.trainer.reports.read_run import LAST, differing, flat, text_table

DOCS = RESULTS.parent
PROGRAM = "ringspan results"
MIN_STEPS = 3  # for a median
MAX_SIZE = 2**16  # ranks, layers
LOCAL_OPTIONS = ("runs", "name", "data.cache", "checkpoint.resume")  # left out of a result's command
PATH_OPTIONS = ("paths", "path", "init_from")  # their values are replaced by …
Row = dict[str, Any]


@dataclass
class RecordedRun:
    """Contents of a run's folder."""

    name: str
    folder: Path
    config: Config
    start: Row  # the last line of starts.jsonl that a step followed
    since: list[Row]  # the steps after that start
    steps: list[Row]  # all steps

    @property
    def on_gpu(self) -> bool:
        return not self.start["device"].startswith("CPU")


class NoSteps(ValueError):
    """The folder is no run, or has no finished step."""


def read(folder: Path) -> RecordedRun:
    """Read a run's folder.

    Raises:
        NoSteps: it is no folder of a run, or no step is finished.
        ValueError: a loss is not finite, or a record is damaged.
    """
    missing = [name for name in ("config.yaml", "starts.jsonl", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise NoSteps(f"{folder}: there is no {', '.join(missing)}: name the folder of a run, such as runs/NAME")
    starts = list(run_folder.read_jsonl(folder / "starts.jsonl"))
    steps = [line for line in run_folder.read_jsonl(folder / "metrics.jsonl") if line["kind"] == "train"]
    if bad := [step["step"] for step in steps if step["loss"] is None or not math.isfinite(step["loss"])]:
        raise ValueError(f"{folder}: the loss of step {bad[0]} is not finite, so there is no curve to report: repeat the run")
    for start in reversed(starts):  # starting a finished run again adds a start without a step
        began = datetime.fromisoformat(start["time"]).timestamp()
        if since := [step for step in steps if step["time"] >= began]:
            _require_plausible(folder, run_folder.config_of(folder), start["ranks"])
            return RecordedRun(folder.resolve().name, folder, run_folder.config_of(folder), start, since, steps)
    raise NoSteps(f"{folder}: this run has not finished a step: let it continue")


def read_all(folders: list[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs, and a line for each folder without steps, which is skipped; raise as `read` if no folder has steps."""
    runs, skipped, error = [], [], None
    for folder in folders:
        try:
            runs.append(read(folder))
        except NoSteps as problem:
            error = error or problem
            skipped.append(f"skipped: {problem}")
    if error and not runs:
        raise error
    return runs, skipped


def _require_plausible(folder: Path, config: Config, ranks: Any) -> None:
    """Raise a ValueError for sizes of damaged records, for which the planner would run for hours."""
    sizes = dict(ranks=ranks, layers=config.model.layers, ring=config.parallel.ring, ulysses=config.parallel.ulysses)
    for name, size in (sizes | dict(data=config.parallel.data, micro_batch=config.data.micro_batch)).items():
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"{folder}: {name}={size} is no size of a run: its config.yaml or starts.jsonl is damaged")


def measure(run: RecordedRun, skip: int) -> Row:
    """Return a row of the result: speed, memory and profile of a run, without the first `skip` steps.

    Raises:
        ValueError: too few steps remain.
    """
    config, ranks, device = tokenizer.resolve_config(run.config), run.start["ranks"], run.start["device"]
    inspected = {*config.debug.profile, *config.debug.memory}
    steps = [step for step in run.since[skip:] if step["step"] not in inspected]
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"{run.folder}: of the {len(run.since)} steps since its last start {len(steps)} remain without the first "
            f"{skip} and the profiled ones, and a median needs {MIN_STEPS}: run more steps, or take a smaller --skip"
        )
    gpu, tokens = run.on_gpu, config.data.batch * config.data.length
    seconds = statistics.median(step["seconds"] for step in steps)
    kernel = statistics.median(step["tflops"] for step in steps)
    # The same step in the other convention: the matmuls are known, and the remaining FLOPs are attention's.
    matmuls = 6 * flops.parameters(config.model).matmuls * tokens / ranks / 1e12
    model = statistics.median(
        matmuls / step["seconds"] + (step["tflops"] - matmuls / step["seconds"]) * 3 / 3.5 for step in steps
    )
    data, ring, ulysses = validate.mesh_of(config, ranks)
    row: Row = outcome(run) | dict(run=run.name, model=config.model.name, parameters=flops.parameters(config.model).total)
    row |= dict(
        length=config.data.length, batch=config.data.batch, tokens=tokens, ranks=ranks, data=sorted(config.data.sources)
    )
    row |= dict(split=dict(data=data, ring=ring, ulysses=ulysses), zero=config.engine.zero)
    row |= dict(memory=run.start.get("memory", "unknown"), dtype=_dtype(run), command=_command(run))
    row |= dict(steps=[steps[0]["step"], steps[-1]["step"]], num_steps=len(steps), seconds=seconds)
    row |= dict(seconds_min=min(s["seconds"] for s in steps), seconds_max=max(s["seconds"] for s in steps))
    row |= {"tokens_per_s": tokens / seconds, "tflops_3.5x": kernel, "tflops_3x": model, "loss": steps[-1]["loss"]}
    known = next((m for m in MACHINES.values() if gpu and m.name.split()[-1] in device), None)
    if known:
        row |= {"mfu_3.5x": kernel * 1e12 / known.peak, "mfu_3x": model * 1e12 / known.peak}
    if "gib" in steps[-1]:
        peak = max(step["gib"] for step in steps)
        row |= dict(gib=peak, gib_reserved=max(step["gib_reserved"] for step in steps))
    if "memory" in run.start:  # absent in runs of versions without memory plans
        plan = parse(run.start["memory"], config.model)
        need = footprint(config, ranks, gpu, plan)
        if "gib" in row:
            row |= dict(planned_gib=need.peak / GIB, planned_of_measured=need.peak / GIB / row["gib"])
        if known:
            planned = sum(step_time(config, ranks, known, plan).values())
            row |= dict(planned_seconds=planned, planned_of_measured_seconds=planned / seconds)
        if phases := [step["phases"] for step in steps if "phases" in step]:
            row |= dict(phases=phases[-1])
    return row | _profiled(run)


def outcome(run: RecordedRun) -> Row:
    """Return what a whole run reached: training loss, held-out losses, tokens and time."""
    row: Row = dict(total_tokens=run.steps[-1].get("tokens"), total_seconds=sum(step["seconds"] for step in run.steps))
    row |= dict(mean_loss=statistics.fmean(step["loss"] for step in run.steps[-LAST:]))
    lines = [line for line in run_folder.read_jsonl(run.folder / "metrics.jsonl") if line["kind"] == "held_out"]
    held_out = [(line["loss"], line["step"]) for line in lines if line.get("loss") is not None]
    return row | (dict(held_out=held_out[-1][0], best_held_out=list(min(held_out))) if held_out else {})


def _profiled(run: RecordedRun) -> Row:
    """Break down the last profiled step of rank 0, if there is one, into shares of its time."""
    traces = {int(path.name.split("-")[1]): path for path in (run.folder / "profile").glob("step-*-rank-0.json")}
    # The folder may also have traces of earlier starts, which may have had another split.
    steps = traces.keys() & set(run.config.debug.profile) & {step["step"] for step in run.since}
    if not steps:
        return {}
    step = max(steps)
    profile = breakdown(traces[step])
    total = sum(profile["seconds"].values())
    shares = {kind: seconds / total for kind, seconds in profile["seconds"].items()}
    shares |= {"communication, hidden too": profile["communication_with_hidden"] / total}
    return dict(profiled_step=step, profiled_seconds=total, shares=shares, most_of_other=profile["most_of_other"])


def loss_differences(runs: list[RecordedRun]) -> list[Row]:
    """Return a row per pair of runs whose losses should be one curve."""
    rows = []
    for a, b in combinations(runs, 2):
        if _trajectory(a) != _trajectory(b):
            continue
        losses = [{step["step"]: step["loss"] for step in run.steps} for run in (a, b)]
        common = sorted(losses[0].keys() & losses[1].keys())
        if not common:
            continue
        difference = {step: abs(losses[0][step] - losses[1][step]) for step in common}
        worst = max(difference, key=lambda step: difference[step])
        row = dict(runs=[a.name, b.name], splits=[_split(run) for run in (a, b)], steps=len(common))
        row |= dict(differ_in="kernel noise" if _execution(a) == _execution(b) else "split", step=worst, loss=losses[0][worst])
        rows.append(row | dict(largest=difference[worst], mean=statistics.fmean(difference.values())))
    return rows


def _trajectory(run: RecordedRun) -> tuple[str, str]:
    """Equal for runs that should have the same losses, except for rounding."""
    return run_folder.identity(run.config), _dtype(run)


def _execution(run: RecordedRun) -> Row:
    """The options that may change how a step is computed, but not its result."""
    parallel = {key: value for key, value in asdict(run.config.parallel).items() if key != "timeout"}
    other = dict(ranks=run.start["ranks"], device=run.start["device"], micro_batch=run.config.data.micro_batch)
    mesh = dict(zip(("data", "ring", "ulysses"), validate.mesh_of(run.config, run.start["ranks"]), strict=True))
    other |= dict(plan=run.start.get("memory"))
    return other | parallel | mesh | asdict(run.config.engine) | dict(deterministic=run.config.debug.deterministic)


def _split(run: RecordedRun) -> str:
    data, ring, ulysses = validate.mesh_of(run.config, run.start["ranks"])
    return f"data {data} × ring {ring} × ulysses {ulysses}, ZeRO {run.config.engine.zero}"


def _dtype(run: RecordedRun) -> str:
    return "bf16" if validate.uses_bf16(run.config, run.on_gpu) else "fp32"


def _command(run: RecordedRun) -> str:
    """The command that starts such a run."""
    pairs = [text.partition("=")[::2] for text in run.start["overrides"]]
    overrides = [f"{key}={'…' if key.endswith(PATH_OPTIONS) else value}" for key, value in pairs if key not in LOCAL_OPTIONS]
    return f"torchrun --nproc-per-node={run.start['ranks']} -m ringspan.trainer.train {shlex.join(overrides)}".rstrip()


def report(row: Row) -> str:
    """Return a run as about four lines of text."""
    unit = "GPU" if "gib" in row else "rank"
    split = " × ".join(f"{name} {size}" for name, size in row["split"].items())
    lines = [
        f"{row['run']}: {row['model']}, {row['parameters']:,} weights, {row['batch']} × {row['length']:,} tokens per step of "
        f"{', '.join(row['data'])}; {split}, ZeRO {row['zero']}, memory plan {row['memory']}, {row['dtype']}",
        f"  steps {row['steps'][0]} to {row['steps'][1]}, median of {row['num_steps']}: {row['seconds']:.4g} s "
        f"({row['seconds_min']:.4g} to {row['seconds_max']:.4g}), {row['tokens_per_s']:,.0f} tokens/s",
        f"  TFLOP/s per {unit}: {row['tflops_3.5x']:.4g} with attention counted 3.5×, {row['tflops_3x']:.4g} with 3×"
        + (f"; MFU {row['mfu_3.5x']:.1%} and {row['mfu_3x']:.1%}" if "mfu_3x" in row else ""),
    ]
    line = f"  loss {row['mean_loss']:.3f}, the mean of the last {LAST} steps"
    if "held_out" in row:
        line += f"; held out {row['held_out']:.3f}, the best {row['best_held_out'][0]:.3f} at step {row['best_held_out'][1]}"
    tokens = f"{with_unit(row['total_tokens'])} tokens in " if row["total_tokens"] else ""
    lines.append(f"{line}; {tokens}{duration(row['total_seconds'])} of training")
    if "gib" in row:
        line = f"  memory: {row['gib']:.2f} GiB allocated at the peak, {row['gib_reserved']:.2f} reserved"
        if "planned_gib" in row:
            line += f"; ringspan check plans {row['planned_gib']:.2f}, {row['planned_of_measured'] - 1:+.1%}"
        lines.append(line)
    if "planned_seconds" in row:
        off = row["planned_of_measured_seconds"] - 1
        lines.append(f"  time: ringspan check plans {row['planned_seconds']:.4g} s per step, {off:+.1%}")
    if "shares" in row:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
        lines.append(f"  step {row['profiled_step']}, profiled, {row['profiled_seconds']:.4g} s: {shares}")
        lines += [f"    other: {seconds * 1000:8.1f} ms  {name}" for name, seconds in row["most_of_other"].items()]
    else:
        lines.append("  no step was profiled, so there is no breakdown: run with debug.profile=[6]")
    return "\n".join(lines)


def options_table(runs: list[RecordedRun]) -> str:
    """Return a table of the options that differ, with a column per run."""
    different = differing({run.name: flat(asdict(run.config)) for run in runs})
    rows = [["option", *(run.name for run in runs)], *([key, *map(str, values)] for key, values in different.items())]
    return text_table(rows) if different else "no option of the training differs"


def report_differences(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{' and '.join(row['runs'])} differ by {row['differ_in']} ({'; '.join(dict.fromkeys(row['splits']))}):")
        lines.append(
            f"  over {row['steps']} steps the losses differ by at most {row['largest']:.3g}, at step {row['step']} "
            f"(loss {row['loss']:.4g}), and by {row['mean']:.3g} on average"
        )
    if rows and all(row["differ_in"] == "split" for row in rows):
        lines.append("to measure the kernels' noise, repeat one of these runs under another name=")
    return "\n".join(lines)


def curves(runs: list[RecordedRun]) -> dict[str, dict[int, float]]:
    """Return the loss by step of each run, labelled by what differs: up to three options, and the split over ranks."""
    different = differing({run.name: flat(asdict(run.config)) | dict(split=_split(run)) for run in runs})
    chosen = [key for key in different if key == "split" or key.partition(".")[0] not in ("parallel", "engine")]
    chosen = sorted(chosen, key=lambda key: key == "split")[:3]
    labels = [", ".join([run.name, *(f"{key} {different[key][i]}" for key in chosen)]) for i, run in enumerate(runs)]
    return {label: {step["step"]: step["loss"] for step in run.steps} for label, run in zip(labels, runs, strict=True)}


def result(runs: list[RecordedRun], rows: list[Row], differences: list[Row], command: str) -> Row:
    """Return the content of a file in docs/results."""
    start = runs[-1].start
    about: Row = dict(kind="train", device=start["device"], date=start["time"].partition(" ")[0])
    git = start["git"]
    about["commit"] = git["commit"][:10] + "-dirty" * bool(git["changed"]) if git else None
    about |= dict(versions=start["versions"], dtype=", ".join(sorted({row["dtype"] for row in rows})), command=command)
    return about | dict(rows=rows, differences=differences)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs on one kind of device")
    parser.add_argument("--skip", type=int, default=2, help="steps after a start that are not measured (default %(default)s)")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default train-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--plot", nargs="?", const="", metavar="PNG", help="plot losses (default loss-DEVICE.png next to the runs) and suites"
    )
    return parser


@contextlib.contextmanager
def _one_message(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the program with a message if a run cannot be reported, also if its records hold values of other types."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        parser.error(f"a run's metrics.jsonl or starts.jsonl is damaged ({type(error).__name__}: {error}): name other runs")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    with _one_message(parser):
        runs, skipped = read_all(args.runs)
        if len({run.name for run in runs}) < len(runs):
            raise ValueError(f"{' '.join(map(str, args.runs))}: two runs have one name, and a result identifies runs by name")
        devices = sorted({run.start["device"] for run in runs})
        if len(devices) > 1:
            raise ValueError(
                f"these runs were on {' and on '.join(devices)}, and a result is about one device: report each separately"
            )
        if args.skip < 0:
            raise ValueError(f"--skip {args.skip}: it must be at least 0")
        if args.plot is not None:
            pyplot()  # reports a missing matplotlib before any work
        short = [run for run in runs if len(run.since) - args.skip < MIN_STEPS]
        if len(short) < len(runs):  # else measure() says what is missing
            skipped += [f"skipped: {run.folder}: too few steps for a median without the first {args.skip}" for run in short]
            runs = [run for run in runs if run not in short]
        rows = [measure(run, args.skip) for run in runs]
        differences, device = loss_differences(runs), slug(devices[0])
        text = [devices[0], *map(report, rows), *[options_table(runs)] * (len(runs) > 1)]
        suites = [suite for run in runs for suite in recorded.read(run.folder)]
        text += [*[report_differences(differences)] * bool(differences), *map(recorded.text, suites)]
        text += ["\n".join(skipped)] * bool(skipped)
    print(*text, sep="\n\n")
    path = args.json
    if path is None and args.save is not None:
        path = RESULTS / f"{(args.save or 'train-' + device).removesuffix('.json')}.json"
    picture = None if args.plot is None else Path(args.plot) if args.plot else args.runs[0].parent / f"loss-{device}.png"
    for target in (path, picture):
        if target is not None:
            with contextlib.suppress(OSError):
                RESULTS.mkdir(exist_ok=True)
            if not target.parent.is_dir():
                parser.error(f"{target.parent} is no folder: make it first")
    if picture is not None:
        about = runs[0].config
        title = f"{about.model.name}, {about.data.length:,} tokens, {devices[0]}"
        draw(pyplot(), curves(runs), differences, title, picture)
        print(f"\nplotted: {picture}", *recorded.draw_all(pyplot(), suites, picture.parent), sep="\n")
    if path is not None:
        flags = ["--save", *([args.save] if args.save else [])] * (args.save is not None) + ["--plot"] * (picture is not None)
        command = shlex.join([*PROGRAM.split(), *(f"runs/{run.name}" for run in runs), "--skip", str(args.skip), *flags])
        with _one_message(parser):
            content = result(runs, rows, differences, command)
            json.dumps(content, allow_nan=False)
        if picture is not None and picture.resolve().is_relative_to(DOCS.parent):
            content["plot"] = picture.resolve().relative_to(DOCS.parent).as_posix()
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
