"""How fast the ranks of a ring compute, on one GPU: a ring's rehearsal, in which what travels is there already.

    python -m parallel.rehearse --ranks 4 --tokens 8k 32k
    python -m parallel.rehearse --ranks 8 --tokens 128k --heads 16/4 --rank 0 7 --cycles

A ring loses what its kernels, sums and launches take beyond one kernel alone, and what transfers and other ranks make it wait.
This is the first part, of any rank of any number of ranks, where only one GPU is at hand: the loops of `ring.py` with a mover
that moves nothing. Keys are random, and what comes in for gradients is whatever was there, so only time means something.
"Alone" is as in `bench`: one causal call without any ring that costs as much. A ring is as fast as its slowest rank.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import Mask
from kernels.blocks import BACKENDS
from kernels.measure import DTYPES, machine, median_ms

from .bench import count
from .beside import Transfer
from .layout import KINDS, Layout
from .mover import Alone, Mover
from .packed import Rows
from .peers import Setting
from .plan import make_plan
from .ring import ring_backward, ring_forward
from .transport import blocks_per_step, bytes_of_gradients

Row = dict[str, Any]


class There(Mover):
    """All is there before anybody asks, in memory that stays."""

    needs_sms = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: dict[Any, Rows] = {}

    def publish(self, k: Tensor, v: Tensor) -> None:
        pass

    def room(self, rows: int, k: Tensor, v: Tensor) -> Rows:
        if rows not in self.kept:
            self.kept[rows] = tuple(torch.randn_like(x) for x in super().room(rows, k, v))
        return self.kept[rows]

    def fetch(self, index: int, into: Rows) -> Transfer:
        return lambda: None

    def part(self, which: int, rows: int, like: Tensor) -> Tensor:
        key = which, rows, like.shape[1:]
        if key not in self.kept:
            self.kept[key] = (like.new_empty((rows, *like.shape[1:])),)
        return self.kept[key][0]

    def give(self, index: int, which: int, part: Tensor, into: Tensor) -> Transfer:
        return lambda: None


def passes(
    setting: Setting, kind: str, ranks: int, rank: int, backend: str, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A rank's forward and its backward, with tensors of their own."""
    mask, layout = setting.mask(), Layout(kind, setting.tokens * ranks, ranks)
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    sizes = [(1, layout.local_length, n, setting.head_dim) for n in heads]
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    movers = [mover_of(layout, mask, rank, k, v, backward) for backward in (False, True)]
    options: dict[str, Any] = dict(head_start=0, scale=setting.head_dim**-0.5, backend=backend)
    out, lse = ring_forward(q, k, v, mask, movers[0], None, **options)
    return (
        lambda: ring_forward(q, k, v, mask, movers[0], None, **options),
        lambda: ring_backward(dout, None, q, k, v, out, lse, mask, movers[1], **options),
    )


def mover_of(layout: Layout, mask: Mask, rank: int, k: Tensor, v: Tensor, backward: bool) -> Mover:
    """The steps are those of a pull."""
    if layout.ranks == 1:
        return Alone(make_plan(layout, mask, rank))
    nbytes = bytes_of_gradients(k.shape[1], k, v)
    return There(make_plan(layout, mask, rank, blocks_per_step("pull", layout, True, nbytes, k.shape[2], backward)))


def measure(
    setting: Setting, kind: str, ranks: int, chosen: list[int], rounds: int, rep: float, cycles: bool, **how: Any
) -> list[Row]:
    """A row for the kernel alone, then one for each rank; shares are ratios within a round, as clocks drift."""
    alone = setting.alone(ranks)
    shorter = Setting(alone.length, setting.heads, setting.kv_heads, setting.head_dim, setting.window)
    calls = [passes(shorter, "contiguous", 1, 0, **how), *(passes(setting, kind, ranks, rank, **how) for rank in chosen)]
    costs = [alone.flops(), *[setting.whole(ranks).flops() / ranks] * len(chosen)]
    times: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(rounds):
        for each, ways in zip(times, calls, strict=True):
            each.append([median_ms(way, rep, how["device"]) for way in ways])
    rows: list[Row] = []
    for rank, each, ways, flops in zip((None, *chosen), times, calls, costs, strict=True):
        row: Row = {"setting": setting.name, "rank": rank, "forward_ms": statistics.median(t[0] for t in each)}
        row |= {"backward_ms": statistics.median(t[1] for t in each)}
        of_alone = [(sum(a) / costs[0], a[0] / costs[0]) for a in times[0]]
        row["both_share"] = statistics.median(a * flops / sum(t) for (a, _), t in zip(of_alone, each, strict=True))
        row["forward_share"] = statistics.median(a * flops / t[0] for (_, a), t in zip(of_alone, each, strict=True))
        row["both_tflops"] = 3.5 * flops / statistics.median(map(sum, each)) / 1e9
        if cycles:
            from kernels.cycles import count_cycles

            taken = (count_cycles(way, ms, rep, how["device"])["mcycles"] for way, ms in zip(ways, each[-1], strict=True))
            row["mcycles"] = sum(taken)
            row["cycles_share"] = (rows[0] if rows else row)["mcycles"] / costs[0] * flops / row["mcycles"]
        rows.append(row)
    return rows


def report(setting: Setting, kind: str, ranks: int, rows: list[Row]) -> str:
    lines = [
        f"\n{setting.name}: {setting.tokens} tokens on each of {ranks} ranks, {kind}, without transfers; share of alone",
        f"  {'':<8}{'TFLOP/s':>9}{'both':>8}{'forward':>9}{'in cycles':>11}",
    ]
    for row in rows:
        name = "alone" if row["rank"] is None else f"rank {row['rank']}"
        shares = f"{row['both_share']:>8.1%}{row['forward_share']:>9.1%}"
        shares += f"{row['cycles_share']:>11.1%}" if "cycles_share" in row else ""
        lines.append(f"  {name:<8}{row['both_tflops']:>9.4g}{shares}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel.rehearse", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=4, help="of the ring that is rehearsed (default %(default)s)")
    parser.add_argument("--rank", nargs="+", type=int, metavar="R", help="which of them (default all)")
    parser.add_argument("--tokens", nargs="+", metavar="N", default=["8k", "32k"] if cuda else ["256"], help="per rank")
    parser.add_argument("--heads", default="16/16" if cuda else "4/2", metavar="Q/KV", help="query and KV heads")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 32, metavar="D")
    parser.add_argument("--window", type=int, metavar="W", help="a causal window instead of plain causal")
    parser.add_argument("--layout", choices=KINDS, default="zigzag")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="our kernel")
    parser.add_argument("--rounds", type=int, default=5, help="how often each rank has its turn (default %(default)s)")
    parser.add_argument("--rep", type=float, default=100, help="ms of one turn (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="count clock cycles too: they do not drift as clocks do")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file too")
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.rounds < 1 or args.rep < 1:
        parser.error(f"--ranks {args.ranks} must be at least 2, --rounds {args.rounds} and --rep {args.rep:g} at least 1")
    chosen = list(range(args.ranks)) if args.rank is None else args.rank
    if bad := [rank for rank in chosen if not 0 <= rank < args.ranks]:
        parser.error(f"--rank {bad[0]}: ranks are 0 … {args.ranks - 1}")
    if args.cycles and args.device == "cpu":
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    try:
        heads, kv_heads = (int(n) for n in args.heads.split("/"))
        settings = [Setting(count(n), heads, kv_heads, args.head_dim, args.window) for n in args.tokens]
    except ValueError:
        parser.error(f"--tokens {args.tokens} are counts such as 8192 or 8k, --heads {args.heads} a pair such as 16/4")
    how = dict(backend=args.backend, device=torch.device(args.device), dtype=DTYPES[args.dtype])
    result: Row = {"kind": "rehearsal", **machine(how["device"]), "ranks": args.ranks, "layout": args.layout, "rows": []}
    for setting in settings:
        rows = measure(setting, args.layout, args.ranks, chosen, args.rounds, args.rep, args.cycles, **how)
        print(report(setting, args.layout, args.ranks, rows), flush=True)
        result["rows"] += rows
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
