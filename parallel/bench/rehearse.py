"""How fast the ranks of a ring compute, on one GPU: a ring's rehearsal, in which nothing travels.

    ringspan bench rehearse --ranks 4 --tokens 8k 32k
    ringspan bench rehearse --ranks 8 --tokens 128k --heads 16/4 --rank 0 7 --cycles

A ring loses what its kernels, sums and launches take beyond one kernel alone, and what transfers and other ranks make it wait.
This is the first part, of any rank of any number of ranks, where only one GPU is at hand: the loops of `ring.py` in the steps
of `copy`, with a transport that moves nothing, and says that something has come in about when a link of --link GB/s would have
brought it. Keys are random, and what comes in for gradients is whatever was there, so only time means something. "Alone" is a
ring of one rank whose causal call costs as much. A ring is as fast as its slowest rank.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.choose import BACKENDS
from ringspan.kernels.bench.measure import DTYPES, machine
from ringspan.kernels.mask import Mask
from ringspan.parallel.bench.__main__ import count
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.bench.timing import how_often, spans
from ringspan.parallel.layout import KINDS, Layout
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.ring import ring_backward, ring_forward
from ringspan.parallel.streams import SideStream, Transfer
from ringspan.parallel.transport.base import SingleRankTransport, Transport
from ringspan.parallel.transport.buffers import Rows
from ringspan.parallel.transport.select import blocks_per_step, bytes_of_gradients

Row = dict[str, Any]
Ways = tuple[Callable[[], Any], Callable[[], Any]]  # a forward and a backward


CLOCK = 1.7e9  # about what a GPU's is while it computes


class SimulatedTransport(Transport):
    """All is there before anybody asks, in memory that stays; but only after a while it says so. (What waits meanwhile is a
    thread of a multiprocessor, where copy engines need none: if anything, ranks are faster than this.)"""

    needs_sms = False

    def __init__(self, plan: Plan, link: float) -> None:
        super().__init__(plan)
        self.link = link  # bytes a second; 0 if there is nothing to wait for
        self.rooms: list[Rows] = []
        self.turn = 0
        self.parts: dict[Any, Tensor] = {}

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        self.turn = 0  # each call asks for the same rooms again

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        if self.turn == len(self.rooms):
            self.rooms.append(tuple(torch.randn_like(x) for x in super().recv_buffer(slot, rows, k, v)))
        self.turn += 1
        return self.rooms[self.turn - 1]

    def fetch(self, index: int, slot: int, into: Rows) -> Transfer:
        return self._after("coming", into)

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        key = slot, rows, like.shape[1:]
        if key not in self.parts:
            self.parts[key] = like.new_empty((rows, *like.shape[1:]))
        return self.parts[key]

    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Transfer:
        return self._after("home", (into,))

    def _after(self, use: str, comes: Rows) -> Transfer:
        beside = SideStream(comes[0].device, use)
        beside.follow()
        if self.link and comes[0].is_cuda:
            with beside.run():
                torch.cuda._sleep(int(sum(x.nbytes for x in comes) / self.link * CLOCK))
        return beside.done()


def tensors(setting: Setting, rows: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout of a shard."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    return [torch.randn(1, rows, n, setting.head_dim, device=device, dtype=dtype) for n in heads]


def passes(given: list[Tensor], layout: Layout, mask: Mask, rank: int, backend: str, link: float = 0) -> Ways:
    """A rank's forward and its backward, compiled."""
    q, k, v, dout = given
    there, back = (mover_of(layout, mask, rank, k, v, backward, link) for backward in (False, True))
    options: dict[str, Any] = dict(head_start=0, scale=q.shape[-1] ** -0.5, backend=backend)
    out, lse = ring_forward(q, k, v, mask, there, None, **options)
    ways = (
        lambda: ring_forward(q, k, v, mask, there, None, **options),
        lambda: ring_backward(dout, None, q, k, v, out, lse, mask, back, **options),
    )
    ways[1]()
    return ways


def mover_of(layout: Layout, mask: Mask, rank: int, k: Tensor, v: Tensor, backward: bool, link: float) -> Transport:
    if layout.ranks == 1:
        return SingleRankTransport(make_plan(layout, mask, rank))
    nbytes = bytes_of_gradients(k.shape[1], k, v)
    blocks = blocks_per_step("copy", layout, True, nbytes, k.shape[2], backward)
    return SimulatedTransport(make_plan(layout, mask, rank, blocks), link)


def measure(
    setting: Setting,
    layout: Layout,
    chosen: list[int],
    rounds: int,
    rep: float,
    cycles: bool,
    backend: str,
    link: float,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    """A row for the kernel alone, then one for each rank; shares are ratios within a round, as clocks drift."""
    mask, length = setting.mask(), setting.alone(layout.ranks).length
    single = Layout("contiguous", length, 1)
    calls = [passes(tensors(setting, length, device, dtype), single, mask, 0, backend)]
    given = tensors(setting, layout.local_length, device, dtype)
    calls += [passes(given, layout, mask, rank, backend, link) for rank in chosen]
    pairs = layout.work(mask)
    flops = [4.0 * n * setting.heads * setting.head_dim for n in (single.work(mask)[0], *(pairs[rank] for rank in chosen))]

    def turn(way: Callable[[], Any]) -> float:
        first = spans(way, device, 1)[0]
        return statistics.median(spans(way, device, how_often(first, rep)))

    times: list[list[list[float]]] = [[] for _ in calls]
    for _ in range(rounds):
        for its, ways in zip(times, calls, strict=True):
            its.append([turn(way) for way in ways])
    rows: list[Row] = []
    for rank, its, ways, work in zip((None, *chosen), times, calls, flops, strict=True):
        beside = list(zip(times[0], its, strict=True))
        row: Row = {"setting": setting.name, "rank": rank}
        row |= {f"{way}_ms": statistics.median(t[n] for t in its) for n, way in enumerate(("forward", "backward"))}
        row["both_tflops"] = 3.5 * work / statistics.median(map(sum, its)) / 1e9
        row["both_share"] = statistics.median(sum(alone) / flops[0] / (sum(mine) / work) for alone, mine in beside)
        row["forward_share"] = statistics.median(alone[0] / flops[0] / (mine[0] / work) for alone, mine in beside)
        if cycles:
            from ringspan.kernels.bench.clock_cycles import count_cycles

            taken = [count_cycles(way, ms, rep, device)["mcycles"] for way, ms in zip(ways, its[-1], strict=True)]
            row["mcycles"] = sum(taken)
            row["cycles_share"] = (rows[0] if rows else row)["mcycles"] / flops[0] / (row["mcycles"] / work)
        rows.append(row)
    return rows


def report(setting: Setting, layout: Layout, rows: list[Row]) -> str:
    counted = "cycles_share" in rows[0]
    lines = [
        f"\n{setting.name}: {setting.tokens} tokens on each of {layout.ranks} ranks, {layout.kind}, on one GPU",
        f"  {'':<8}{'TFLOP/s':>9}{'share of alone':>16}{'forward':>9}" + (f"{'in cycles':>11}" if counted else ""),
    ]
    for row in rows:
        name = "alone" if row["rank"] is None else f"rank {row['rank']}"
        line = f"  {name:<8}{row['both_tflops']:>9.4g}{row['both_share']:>16.1%}{row['forward_share']:>9.1%}"
        lines.append(line + (f"{row['cycles_share']:>11.1%}" if counted else ""))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringspan bench rehearse", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=4, help="of the ring that is rehearsed (default %(default)s)")
    parser.add_argument("--rank", nargs="+", type=int, metavar="R", help="which of them (default all)")
    parser.add_argument("--tokens", nargs="+", metavar="N", default=["8k", "32k"] if cuda else ["256"], help="per rank")
    heads = ["16/16"] if cuda else ["4/2"]
    parser.add_argument("--heads", nargs="+", default=heads, metavar="Q/KV", help="query and KV heads")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 32, metavar="D")
    parser.add_argument("--window", type=int, metavar="W", help="a causal window instead of plain causal")
    parser.add_argument("--layout", choices=KINDS, default="zigzag")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument(
        "--link", type=float, default=300, metavar="GB/S", help="what travels comes so fast (default %(default)s); 0: at once"
    )
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="our kernel")
    parser.add_argument("--rounds", type=int, default=5, help="how often each rank has its turn (default %(default)s)")
    parser.add_argument("--rep", type=float, default=100, help="ms of one turn (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="count clock cycles too: they do not drift as clocks do")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file too")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.rounds < 1 or args.rep < 1:
        parser.error(f"--ranks {args.ranks} must be at least 2, --rounds {args.rounds} and --rep {args.rep:g} at least 1")
    if args.link < 0:
        parser.error(f"--link {args.link:g} must be positive, or 0 where nothing is waited for")
    chosen = list(range(args.ranks)) if args.rank is None else args.rank
    if bad := [rank for rank in chosen if not 0 <= rank < args.ranks]:
        parser.error(f"--rank {bad[0]}: ranks are 0 … {args.ranks - 1}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU here: use --device cpu")
    if args.cycles and (args.device == "cpu" or torch.version.hip):
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"{args.json.parent} is no folder: make it first")
    try:
        pairs = [(int(q), int(kv)) for q, kv in (pair.split("/") for pair in args.heads)]
        settings = [Setting(count(n), *pair, args.head_dim, args.window) for n in args.tokens for pair in pairs]
    except ValueError:
        parser.error(f"--tokens {args.tokens} are counts such as 8192 or 8k, --heads {args.heads} pairs such as 16/4")
    if any(min(each.tokens, each.heads, each.kv_heads, each.head_dim) < 1 for each in settings):
        parser.error("--tokens, --heads and --head-dim must be at least 1")
    device, dtype = torch.device(args.device), args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    result: Row = {"kind": "rehearsal", **machine(device), "dtype": dtype, "ranks": args.ranks, "link": args.link, "rows": []}
    given = sys.argv[1:] if argv is None else argv
    if args.json is not None:  # where it went says nothing of what was measured
        at = next(at for at, word in enumerate(given) if word.startswith("--j"))  # however short
        given = [*given[:at], *given[at + (1 if "=" in given[at] else 2) :]]
    result["command"] = shlex.join(["python", "-m", "ringspan.parallel.bench.rehearse", *given])
    for setting in settings:
        layout = Layout(args.layout, setting.tokens * args.ranks, args.ranks)
        how = args.rounds, args.rep, args.cycles, args.backend, args.link * 1e9, device, DTYPES[dtype]
        try:
            rows = measure(setting, layout, chosen, *how)
        except ValueError as error:
            parser.error(str(error))
        print(report(setting, layout, rows), flush=True)
        result["rows"] += rows
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
