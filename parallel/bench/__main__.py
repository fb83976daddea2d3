"""How fast the ring is, as a share of its own kernel alone, beside every other way to span these ranks.

    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --save
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 8k 32k --heads 16/4 --only alone,ring-zigzag-copy,ulysses
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 128k --cycles                 # and clock cycles, as shares too
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 8k --trace ring.png

"Alone" is one causal call of the same kernel, without any communication, on a sequence as long as costs a rank the same:
S / √P. In each round every contestant has its turn, alone first, and shares are ratios within a round: clocks drift, but
less within seconds. Reported are medians over rounds with their spread, of the slowest rank. A ring is timed only where
sampled rows of its result agree with fp32. The peak of memory counts everything, inputs too. Settings are measured in the
order that --tokens and --heads have, and each is printed and written when it is done. A share of cycles that is higher than
that of time says that the clock was lower: more power was needed.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringspan.kernels.backends.choose import BACKENDS
from ringspan.kernels.bench.measure import DTYPES, RESULTS, WRONG, attempt, machine, slug
from ringspan.kernels.bench.plots import pyplot
from ringspan.parallel.bench.baselines import (
    BenchContext,
    Contestant,
    Setting,
    contestants,
    forward_and_backward,
    sampled_error,
)
from ringspan.parallel.bench.timing import Timing, speeds, time_baseline
from ringspan.parallel.layout import KINDS
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.transport.select import COPIED

Row = dict[str, Any]
DEFAULTS = {
    "cuda": dict(tokens=["2k", "8k", "32k", "128k"], heads=["16/16", "16/4"], head_dim=128, dtype="bf16", rep=400),
    "cpu": dict(tokens=["256"], heads=["4/2"], head_dim=32, dtype="fp32", rep=20),
}


def measure(
    setting: Setting, names: list[str], place: BenchContext, rounds: int, rep: float, cycles: bool = False
) -> list[Row]:
    """A row for each contestant, the same on every rank."""
    table = contestants()
    rows: list[Row] = [
        {
            "setting": setting.name,
            "name": name,
            "label": table[name].label,
            "ours": table[name].ours,
            "status": "ok",
            "note": "",
        }
        for name in names
    ]
    for row in rows:
        row |= _together(attempt(_check, table[row["name"]], row["name"], setting, place), place)
        _say(f"{setting.name} {row['name']}: {row['status']} {row['note']}".rstrip())
    turns: dict[str, list[Timing]] = {name: [] for name in names}
    for _ in range(rounds):
        for row in rows:
            if row["status"] == "ok":
                turn = attempt(time_baseline, table[row["name"]], setting, place, rep, cycles)
                failed = _together({} if isinstance(turn, Timing) else turn, place)
                row |= failed
                if not failed:
                    turns[row["name"]].append(turn)
    for row in rows:
        if row["status"] == "ok":
            row |= speeds(turns[row["name"]], turns.get("alone", []))
    return rows


def _check(contestant: Contestant, name: str, setting: Setting, place: BenchContext) -> Row:
    """Runs once, which compiles; the error where it is ours, and the peak of memory."""
    cuda = place.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    row: Row = {}
    with contestant.make(setting, place) as problem:
        forward_and_backward(problem)
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            if name.endswith(COPIED):
                from ringspan.parallel.transport.copy_engine import bytes_shown

                peak += bytes_shown()
            row["peak_gib"] = peak / 2**30
        kind = next((kind for kind in KINDS if name.startswith(f"ring-{kind}")), None)
        if kind:
            row["error"] = sampled_error(problem, setting, place, kind)
            if not row["error"] <= WRONG:
                row |= {"status": "wrong", "note": f"error above {WRONG}", "error": None}
    return row


def _together(mine: Row, place: BenchContext) -> Row:
    """What the ranks found: a failure of one is a failure; else the worst figures."""
    found: list[Any] = [None] * place.ranks
    dist.all_gather_object(found, mine, group=place.ring.context_group)
    bad = next((row for row in found if row.get("status", "ok") != "ok"), None)
    if bad is not None:
        return bad
    return found[0] | {key: max(row[key] for row in found) for key in ("peak_gib", "error") if key in found[0]}


def report(setting: Setting, rows: list[Row], ranks: int) -> str:
    lines = [
        f"\n{setting.name}: {setting.tokens} tokens on each of {ranks} ranks; TFLOP/s per rank",
        f"  {'':<28}{'forward':>11}{'both':>11}{'share of alone (spread)':>26}{'peak GiB':>10}{'error':>10}",
    ]
    for row in rows:
        if row["status"] != "ok":
            lines.append(f"  {row['name']:<28}{row['status']}: {row['note']}")
            continue
        share = (
            f"{row['both_share']:.1%} ({row['both_share_min']:.1%}-{row['both_share_max']:.1%})" if "both_share" in row else ""
        )
        line = f"  {row['name']:<28}{row['forward_tflops']:>11.4g}{row['both_tflops']:>11.4g}{share:>26}"
        line += f"{row['peak_gib']:>10.2f}" if "peak_gib" in row else f"{'-':>10}"
        line += f"{row['error']:>10.1e}" if row.get("error") is not None else ""
        lines.append(line + (f"  {row['both_cycles_share']:.1%} in cycles" if "both_cycles_share" in row else ""))
    return "\n".join(lines)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def count(text: str) -> int:
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=4 -m ringspan.parallel.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tokens", nargs="+", metavar="N", help="per rank, 8k or 8192 (default on GPUs: 2k 8k 32k 128k)")
    parser.add_argument("--heads", nargs="+", metavar="Q/KV", help="query and KV heads (default on GPUs: 16/16 16/4)")
    parser.add_argument("--head-dim", type=int, metavar="D")
    parser.add_argument("--window", type=int, metavar="W", help="a causal window instead of plain causal")
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(contestants())}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="our kernel")
    parser.add_argument("--rounds", type=int, default=7, help="how often each has its turn (default %(default)s)")
    parser.add_argument("--rep", type=float, help="ms of one turn")
    parser.add_argument("--cycles", action="store_true", help="count clock cycles too: they do not drift as clocks do")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a rank waits for another")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default ring-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument("--trace", type=Path, metavar="PNG", help="a picture of one forward and backward of the first ring")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a ring of ours is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    defaults = DEFAULTS[args.device]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.cycles and (args.device == "cpu" or torch.version.hip):
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    if args.rounds < 1 or args.rep < 1:
        parser.error(f"--rounds {args.rounds} and --rep {args.rep:g} must be at least 1")
    try:
        pairs = [tuple(int(n) for n in text.split("/")) for text in args.heads]
        settings = [Setting(count(n), q, kv, args.head_dim, args.window) for n in args.tokens for q, kv in pairs]
    except ValueError:
        parser.error(f"--tokens {args.tokens} are counts such as 8192 or 8k, --heads {args.heads} pairs such as 16/4")
    table = contestants()
    names = args.only.split(",") if args.only else [name for name, c in table.items() if args.device in c.devices]
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(table)}")
    if args.trace is not None and (args.json is not None or args.save is not None or args.cycles):
        parser.error(
            "--trace draws a picture and measures nothing: call it again without --trace for --json, --save or --cycles"
        )
    if args.trace is not None:
        try:
            pyplot()  # better told now than after the ranks have met
        except ImportError as error:
            parser.error(str(error))
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"{args.json.parent} is no folder: make it first")
    mine = not dist.is_initialized()
    if mine:
        if "RANK" not in os.environ:
            parser.error("start it with torchrun, which says how many ranks there are")
        _start(args)
    try:
        return _run(args, settings, names)
    finally:
        if mine:
            dist.destroy_process_group()


def _start(args: argparse.Namespace) -> None:
    limit = timedelta(seconds=args.timeout)
    if args.device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit)
        return
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", timeout=limit, device_id=torch.device("cuda", local))


def _run(args: argparse.Namespace, settings: list[Setting], names: list[str]) -> int:
    ranks = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    ring, ulysses = Mesh(ring=ranks, timeout=args.timeout), Mesh(ulysses=ranks, timeout=args.timeout)
    place = BenchContext(device, DTYPES[args.dtype], ranks, ring, ulysses, args.backend)
    warnings.filterwarnings("ignore")  # rivals explain at length why they do not run; the table says it in a line
    if args.trace is not None:
        from ringspan.parallel.bench.timeline import trace

        rings = sorted((name for name in names if name.startswith("ring-")), key=lambda name: "zigzag" not in name)
        first = next(iter(rings), None)
        if first is None:
            raise ValueError(f"--trace draws a ring, and --only {args.only} has none: add ring-zigzag-p2p")
        trace(contestants()[first].make, settings[0], place, args.trace, f"{first}, {settings[0].name}")
        _say(f"written: {args.trace}")
        return 0
    speaks, about, path = dist.get_rank() == 0, machine(device), args.json
    if path is None and args.save is not None:
        path = RESULTS / f"{(args.save or 'ring-' + slug(about['device'])).removesuffix('.json')}.json"
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(exist_ok=True)
    if speaks:
        print(about["device"], args.dtype, *(f"{name} {version}" for name, version in about["versions"].items()), sep=", ")
    result: Row = {"kind": "ring", **about, "dtype": args.dtype, "ranks": ranks, "command": _command(args, ranks)}
    result |= {"settings": [], "rows": []}
    for setting in settings:
        its = measure(setting, names, place, args.rounds, args.rep, args.cycles)
        result["settings"].append(asdict(setting) | {"name": setting.name, "kv_bytes": _kv_bytes(setting, args.dtype)})
        result["rows"] += its
        if speaks:
            print(report(setting, its, ranks), flush=True)
            if path is not None:  # after each setting: who is cut short keeps what was measured
                path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if speaks and path is not None:
        print(f"\nwritten: {path}")
    return int(any(row["ours"] and row["status"] == "wrong" for row in result["rows"]))


def _kv_bytes(setting: Setting, dtype: str) -> int:
    """Of one rank's K and V, by which `transport.AUTO` chooses."""
    return 2 * setting.tokens * setting.kv_heads * setting.head_dim * DTYPES[dtype].itemsize


def _command(args: argparse.Namespace, ranks: int) -> str:
    chosen = ["--tokens", *args.tokens, "--heads", *args.heads, "--head-dim", str(args.head_dim)]
    chosen += ["--window", str(args.window)] if args.window else []
    chosen += ["--only", args.only] if args.only else []
    chosen += ["--device", args.device, "--dtype", args.dtype, "--backend", args.backend]
    chosen += ["--rounds", str(args.rounds), "--rep", f"{args.rep:g}"] + ["--cycles"] * args.cycles
    return f"torchrun --nproc-per-node={ranks} -m ringspan.parallel.bench {shlex.join(chosen)}"


if __name__ == "__main__":
    sys.exit(main())
