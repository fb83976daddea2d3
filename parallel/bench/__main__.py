"""Benchmark of the ring: its speed as a share of the same kernel alone, next to other ways to shard a sequence.

    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --save
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 128k --cycles          # and clock cycles, as shares too
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 8k --trace ring.png    # a timeline of one call
    torchrun --nproc-per-node=4 -m ringspan.parallel.bench --tokens 8k --cuda-graph        # without the host's launches
    torchrun --nproc-per-node=2 -m ringspan.parallel.bench --tokens 32k --heads 32/4 --window 4k --documents 16 --sinks

"alone" is one call of the same kernel with the same kind of mask, without communication, as long as costs the same per rank
(with documents: the whole sequence). Each round times every candidate once. Shares are ratios of FLOPs per time within a round,
because clocks drift less within seconds. The table has medians over rounds with their spread, of the slowest rank. A candidate
is timed only if sampled rows of its result agree with fp32. Peak memory includes the inputs. "host" is the time in which the
host launches a forward and backward, as a share of their time. Near 100 %, the GPU waits for the host. A share of cycles above
the share of time means that the clock was lower. Each setting is printed and written when it completes.
"""

import argparse
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
from ringspan.kernels.bench.measure import DTYPES, SAVE_HELP, WRONG, attempt, machine, result_path, slug
from ringspan.kernels.bench.plots import pyplot
from ringspan.parallel.bench.baselines import (
    BenchContext,
    Candidate,
    Setting,
    candidates,
    forward_and_backward,
    sampled_error,
)
from ringspan.parallel.bench.timing import Timing, speeds, time_candidate
from ringspan.parallel.coordination.json_collectives import all_gather_json
from ringspan.parallel.mesh import Mesh
from ringspan.parallel.transport.select import COPY_TRANSPORTS

Row = dict[str, Any]
DEFAULTS = {
    "cuda": dict(tokens=["2k", "8k", "32k", "128k"], heads=["16/16", "16/4"], head_dim=128, dtype="bf16", rep=400),
    "cpu": dict(tokens=["256"], heads=["4/2"], head_dim=32, dtype="fp32", rep=20),
}


def measure(
    setting: Setting,
    names: list[str],
    context: BenchContext,
    rounds: int,
    rep: float,
    cycles: bool = False,
    table: dict[str, Candidate] | None = None,
    cuda_graph: bool = False,
) -> list[Row]:
    """Check and time candidates of a table on one setting; return a row per candidate, equal on every rank."""
    table = candidates() if table is None else table
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
        row |= _combine_ranks(attempt(_check, table[row["name"]], row["name"], setting, context), context)
        _log(f"{setting.name} {row['name']}: {row['status']} {row['note']}".rstrip())
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for _ in range(rounds):
        for row in rows:
            if row["status"] == "ok":
                timing = attempt(time_candidate, table[row["name"]], setting, context, rep, cycles, cuda_graph)
                failure = _combine_ranks({} if isinstance(timing, Timing) else timing, context)
                row |= failure
                if not failure:
                    timings[row["name"]].append(timing)
    for row in rows:
        if row["status"] == "ok":
            row |= speeds(timings[row["name"]], timings.get("alone", []))
    return rows


def _check(candidate: Candidate, name: str, setting: Setting, context: BenchContext) -> Row:
    """Run a candidate once, which compiles it; return its peak memory and its error."""
    cuda = context.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated() if cuda else 0
    row: Row = {}
    with candidate.make(setting, context) as problem:
        forward_and_backward(problem)
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - base
            if name.endswith(COPY_TRANSPORTS):
                from ringspan.parallel.transport.copy_engine import symmetric_bytes

                peak += symmetric_bytes()
            row["peak_gib"] = peak / 2**30
        row["error"] = sampled_error(problem, setting, context)
        if not row["error"] <= WRONG:
            row |= {"status": "wrong", "note": f"error above {WRONG}", "error": None}
    return row


def _combine_ranks(local_row: Row, context: BenchContext) -> Row:
    """The row of the first rank that failed, else the worst figures of all ranks."""
    rows: list[Any] = all_gather_json(local_row, context.ring.context_group, context.device)
    failed = next((row for row in rows if row.get("status", "ok") != "ok"), None)
    if failed is not None:
        return failed
    return rows[0] | {key: max(row[key] for row in rows) for key in ("peak_gib", "error") if key in rows[0]}


def report(setting: Setting, rows: list[Row], ranks: int) -> str:
    """Return the table of one setting."""
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
        line += f"  {row['both_cycles_share']:.1%} in cycles" if "both_cycles_share" in row else ""
        lines.append(line + (f"  host {row['both_host_share']:.0%}" if "both_host_share" in row else ""))
    return "\n".join(lines)


def _log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def parse_tokens(text: str) -> int:
    """Return the number that 8k or 8192 stands for."""
    return int(text[:-1]) * 1024 if text.lower().endswith("k") else int(text)


def _parser(table: dict[str, Candidate]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node=4 -m ringspan.parallel.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--tokens", nargs="+", metavar="N", help="tokens per rank, as 8k or 8192 (default on GPUs: 2k 8k 32k 128k)"
    )
    parser.add_argument("--heads", nargs="+", metavar="Q/KV", help="query and KV heads (default on GPUs: 16/16 16/4)")
    parser.add_argument("--head-dim", type=int, metavar="D", help="default: 128 on GPUs, 32 on CPUs")
    parser.add_argument("--v-head-dim", type=int, metavar="D", help="head dim of v, if it differs")
    parser.add_argument("--window", type=parse_tokens, metavar="W", help="a causal window instead of plain causal")
    parser.add_argument("--sinks", action="store_true", help="a sink for each query head, as in gpt-oss")
    parser.add_argument(
        "--documents", type=int, metavar="N", help="pack N documents of uneven lengths into the sequence of all ranks"
    )
    parser.add_argument("--only", metavar="A,B", help=f"candidates to measure, of {', '.join(table)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="auto", help="backend of our kernels (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="times that each candidate is measured (default %(default)s)")
    parser.add_argument("--rep", type=float, help="ms per candidate, round and direction (default: 400 on GPUs, 20 on CPUs)")
    parser.add_argument("--cycles", action="store_true", help="also count clock cycles, which do not drift as clocks do")
    parser.add_argument("--cuda-graph", action="store_true", help="time replays of CUDA graphs, which take no time of the host")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a rank waits for a peer (default %(default)s)")
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=f"{SAVE_HELP} (default ring-DEVICE)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--trace", type=Path, metavar="PNG", help="draw a timeline of one forward and backward of the first ring"
    )
    return parser


def main(argv: list[str] | None = None, table: dict[str, Candidate] | None = None) -> int:
    """Run the benchmark of a table of candidates on every rank; return 0, or 1 if a ring of ours is wrong."""
    module = "ringspan.parallel.bench" if table is None else "ringspan.compat.bench"
    table = candidates() if table is None else table
    parser = _parser(table)
    args = parser.parse_args(argv)
    defaults = DEFAULTS[args.device]
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.cycles and (args.device == "cpu" or torch.version.hip):
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    if args.cuda_graph and args.device == "cpu":
        parser.error("--cuda-graph needs GPUs: leave it out here")
    if args.rounds < 1 or args.rep < 1:
        parser.error(f"--rounds {args.rounds} and --rep {args.rep:g} must be at least 1")
    try:
        pairs = [tuple(int(n) for n in text.split("/")) for text in args.heads]
        options = args.head_dim, args.window, args.sinks, args.documents or 0, args.v_head_dim
        settings = [Setting(parse_tokens(n), q, kv, *options) for n in args.tokens for q, kv in pairs]
    except ValueError:
        parser.error(f"--tokens {args.tokens} must be counts such as 8192 or 8k, and --heads {args.heads} pairs such as 16/4")
    shortest = min(setting.tokens for setting in settings)
    if args.documents is not None and not 1 <= args.documents <= shortest:
        parser.error(
            f"--documents {args.documents}: each holds at least one token; 1 to {shortest}, the tokens of a rank, work"
        )
    names = args.only.split(",") if args.only else [name for name, c in table.items() if args.device in c.devices]
    if unknown := [name for name in names if name not in table]:
        parser.error(f"--only {','.join(unknown)}: the candidates are {', '.join(table)}")
    if args.trace is not None and (args.json is not None or args.save is not None or args.cycles):
        parser.error(
            "--trace draws a picture and measures nothing: call it again without --trace for --json, --save or --cycles"
        )
    if args.trace is not None:
        try:
            pyplot()  # fails early, before the process group is made
        except ImportError as error:
            parser.error(str(error))
    try:
        result_path(args.json, args.save, "ring")  # fails early if the folder is missing
    except ValueError as error:
        parser.error(str(error))
    owns_group = not dist.is_initialized()
    if owns_group:
        if "RANK" not in os.environ:
            parser.error("RANK is not set: start the benchmark with torchrun --nproc-per-node=N")
        _start(args)
    try:
        return _run(args, settings, names, table, module)
    finally:
        if owns_group:
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


def _run(args: argparse.Namespace, settings: list[Setting], names: list[str], table: dict[str, Candidate], module: str) -> int:
    ranks = dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if args.device == "cuda" else torch.device("cpu")
    ring, ulysses = Mesh(ring=ranks, timeout=args.timeout), Mesh(ulysses=ranks, timeout=args.timeout)
    context = BenchContext(device, DTYPES[args.dtype], ranks, ring, ulysses, args.backend)
    warnings.filterwarnings("ignore")  # baselines explain at length why they do not run; the table has one line for it
    if args.trace is not None:
        from ringspan.parallel.bench.timeline import trace

        rings = sorted((name for name in names if name.startswith("ring-")), key=lambda name: "zigzag" not in name)
        first = next(iter(rings), None)
        if first is None:
            raise ValueError(f"--only {args.only}: --trace draws a ring, and none is named; add ring-zigzag-p2p")
        trace(table[first].make, settings[0], context, args.trace, f"{first}, {settings[0].name}")
        _log(f"written: {args.trace}")
        return 0
    is_first, about = dist.get_rank() == 0, machine(device)
    path = result_path(args.json, args.save, f"ring-{slug(about['device'])}")
    if is_first:
        print(about["device"], args.dtype, *(f"{name} {version}" for name, version in about["versions"].items()), sep=", ")
    result: Row = {"kind": "ring", **about, "dtype": args.dtype, "ranks": ranks, "command": _command(args, ranks, module)}
    result |= {"settings": [], "rows": []}
    for setting in settings:
        rows = measure(setting, names, context, args.rounds, args.rep, args.cycles, table, args.cuda_graph)
        result["settings"].append(asdict(setting) | {"name": setting.name, "kv_bytes": _kv_bytes(setting, args.dtype)})
        result["rows"] += rows
        if is_first:
            print(report(setting, rows, ranks), flush=True)
            if path is not None:  # after each setting, so that an interrupted run keeps its results
                path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if is_first and path is not None:
        print(f"\nwritten: {path}")
    return int(any(row["ours"] and row["status"] == "wrong" for row in result["rows"]))


def _kv_bytes(setting: Setting, dtype: str) -> int:
    """Bytes of one rank's K and V, by which transport="auto" chooses."""
    return setting.tokens * setting.kv_heads * (setting.head_dim + setting.v_width) * DTYPES[dtype].itemsize


def _command(args: argparse.Namespace, ranks: int, module: str) -> str:
    options = ["--tokens", *args.tokens, "--heads", *args.heads, "--head-dim", str(args.head_dim)]
    options += ["--v-head-dim", str(args.v_head_dim)] if args.v_head_dim else []
    options += ["--window", str(args.window)] if args.window else []
    options += ["--sinks"] * args.sinks + (["--documents", str(args.documents)] if args.documents else [])
    options += ["--only", args.only] if args.only else []
    options += ["--device", args.device, "--dtype", args.dtype, "--backend", args.backend]
    options += ["--rounds", str(args.rounds), "--rep", f"{args.rep:g}"] + ["--cycles"] * args.cycles
    options += ["--cuda-graph"] * args.cuda_graph
    return f"torchrun --nproc-per-node={ranks} -m {module} {shlex.join(options)}"


if __name__ == "__main__":
    sys.exit(main())
