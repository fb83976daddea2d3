"""Rehearsal of a ring: the compute time of some ranks of a ring of P, on one GPU, with simulated transfers.

    ringspan bench rehearse --ranks 4 --tokens 8k 32k
    ringspan bench rehearse --ranks 8 --tokens 128k --heads 16/4 --rank 0 7 --cycles

A ring is slower than one kernel alone for two reasons: more kernels, reductions and launches, and waits for transfers and peer
ranks. A rehearsal measures the first. It runs the loops of a real call with the steps of the `copy` transport. A copy between
GPU and host stands for each transfer, as long as a link of --link GB/s would take. K/V are random and received gradients are
uninitialised, so only the times are meaningful. "alone" is a ring of one rank whose causal call costs the same. A ring is as
fast as its slowest rank.
"""

import argparse
import functools
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.kernels.backends.choose import BACKENDS, adds_dq_atomically
from ringspan.kernels.bench.measure import DTYPES, machine
from ringspan.kernels.blocks import output_delta
from ringspan.kernels.mask import Mask
from ringspan.parallel.bench.__main__ import parse_tokens
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.bench.timing import call_times, num_calls
from ringspan.parallel.layout import KINDS, Layout
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.ring_overlapped import choose_ring
from ringspan.parallel.transport.base import SingleRankTransport, Transport
from ringspan.parallel.transport.buffers import Rows
from ringspan.parallel.transport.select import blocks_per_step, gradient_bytes
from ringspan.parallel.transport.streams import SideStream, Wait

Row = dict[str, Any]
Passes = tuple[Callable[[], Any], Callable[[], Any]]  # a forward and a backward

CHUNK = 2**24  # bytes of one copy


class TransferTimer:
    """Copies between GPU and host as timers of simulated transfers: as real ones, they occupy a copy engine and no SM."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.empty(2, CHUNK, dtype=torch.uint8, pin_memory=True)
        self.gpu = torch.empty(2, CHUNK, dtype=torch.uint8, device=device)
        nbytes = 4 * CHUNK
        times = [call_times(functools.partial(self.copy, way, nbytes), device, 5) for way in range(2)]  # ms
        self.speeds = [nbytes / statistics.median(ms) * 1e3 for ms in times]  # bytes per second

    def copy(self, way: int, nbytes: int) -> None:
        """Copy to the GPU (way 0) or to the host (1)."""
        for size in [CHUNK] * (nbytes // CHUNK) + [nbytes % CHUNK]:
            target, source = (x[way, :size] for x in ((self.gpu, self.host) if way == 0 else (self.host, self.gpu)))
            target.copy_(source, non_blocking=True)

    def occupy(self, way: int, seconds: float) -> None:
        """Enqueue copies on the current stream that take about this long."""
        self.copy(way, int(seconds * self.speeds[way]))


@functools.cache
def transfer_timer(device: torch.device) -> TransferTimer:
    return TransferTimer(device)


class SimulatedTransport(Transport):
    """Transport whose buffers are always filled and whose transfers complete after the modelled time."""

    needs_sms = False

    def __init__(self, plan: Plan, link: float) -> None:
        super().__init__(plan)
        self.link = link  # bytes per second; 0: transfers complete at once
        self.recv_buffers: list[Rows] = []
        self.next_buffer = 0
        self.send_buffers: dict[Any, Tensor] = {}

    def publish_kv(self, k: Tensor, v: Tensor) -> None:
        self.next_buffer = 0  # each call reuses the same buffers

    def recv_buffer(self, slot: int, rows: int, k: Tensor, v: Tensor) -> Rows:
        if self.next_buffer == len(self.recv_buffers):
            self.recv_buffers.append(tuple(torch.randn_like(x) for x in super().recv_buffer(slot, rows, k, v)))
        self.next_buffer += 1
        return self.recv_buffers[self.next_buffer - 1]

    def fetch(self, index: int, slot: int, into: Rows) -> Wait:
        return self._transfer(0, into)

    def send_buffer(self, slot: int, rows: int, like: Tensor) -> Tensor:
        key = slot, rows, like.shape[1:]
        if key not in self.send_buffers:
            self.send_buffers[key] = like.new_empty((rows, *like.shape[1:]))
        return self.send_buffers[key]

    def return_gradients(self, index: int, slot: int, part: Tensor, into: Tensor) -> Wait:
        return self._transfer(1, (into,))

    def _transfer(self, way: int, buffers: Rows) -> Wait:
        """Occupy a side stream as long as the link needs for these buffers."""
        side = SideStream(buffers[0].device, ("receive", "gradients")[way])
        side.wait_for_caller()
        if self.link and buffers[0].is_cuda:
            with side.run():
                transfer_timer(buffers[0].device).occupy(way, sum(x.nbytes for x in buffers) / self.link)
        return side.completion()


def tensors(setting: Setting, rows: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return random q, k, v and dout of a shard."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    return [torch.randn(1, rows, n, setting.head_dim, device=device, dtype=dtype) for n in heads]


def make_passes(inputs: list[Tensor], layout: Layout, mask: Mask, rank: int, backend: str, link: float = 0) -> Passes:
    """Return the forward and the backward of a rank, both compiled."""
    q, k, v, dout = inputs
    transport = make_simulated_transport(layout, mask, rank, k, v, link)
    options: dict[str, Any] = dict(scale=q.shape[-1] ** -0.5, backend=backend)
    ring = choose_ring(q.shape[1], mask, transport, adds_dq_atomically(q, v, **options))
    options["head_start"] = 0
    out, lse = ring.ring_forward(q, k, v, mask, transport, None, **options)
    own = transport.plan.steps[0].q_at
    passes = (
        lambda: ring.ring_forward(q, k, v, mask, transport, None, **options),
        lambda: ring.ring_backward(
            dout,
            output_delta(dout, out, backend=backend, mask=mask, q_at=own),
            q,
            k,
            v,
            lse,
            mask,
            transport,
            **options,
        ),
    )
    passes[1]()
    return passes


def make_simulated_transport(layout: Layout, mask: Mask, rank: int, k: Tensor, v: Tensor, link: float) -> Transport:
    """Return a simulated transport with the steps of `copy`; that of one rank needs no simulation."""
    if layout.ranks == 1:
        return SingleRankTransport(make_plan(layout, mask, rank))
    nbytes = gradient_bytes(k.shape[1], k, v)
    blocks = blocks_per_step("copy", layout, True, nbytes, k.shape[2])
    return SimulatedTransport(make_plan(layout, mask, rank, blocks), link)


def measure(
    setting: Setting,
    layout: Layout,
    ranks: list[int],
    rounds: int,
    rep: float,
    cycles: bool,
    backend: str,
    link: float,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Row]:
    """Return a row for the kernel alone and one for each of `ranks`; shares are ratios within a round, because clocks drift."""
    mask, length = setting.mask(layout.length), setting.single_rank_shape(layout.ranks).length
    single = Layout("contiguous", length, 1)
    all_passes = [make_passes(tensors(setting, length, device, dtype), single, mask, 0, backend)]
    inputs = tensors(setting, layout.local_length, device, dtype)
    all_passes += [make_passes(inputs, layout, mask, rank, backend, link) for rank in ranks]
    pairs = layout.work(mask)
    flops = [4.0 * n * setting.heads * setting.head_dim for n in (single.work(mask)[0], *(pairs[rank] for rank in ranks))]

    def median_ms(call: Callable[[], Any]) -> float:
        first = call_times(call, device, 1)[0]
        return statistics.median(call_times(call, device, num_calls(first, rep)))

    times: list[list[list[float]]] = [[] for _ in all_passes]  # by candidate, round and direction
    for _ in range(rounds):
        for rank_times, passes in zip(times, all_passes, strict=True):
            rank_times.append([median_ms(call) for call in passes])
    rows: list[Row] = []
    for rank, rank_times, passes, work in zip((None, *ranks), times, all_passes, flops, strict=True):
        rounds_of_both = list(zip(times[0], rank_times, strict=True))
        row: Row = {"setting": setting.name, "rank": rank}
        row |= {f"{name}_ms": statistics.median(t[n] for t in rank_times) for n, name in enumerate(("forward", "backward"))}
        row["both_tflops"] = 3.5 * work / statistics.median(map(sum, rank_times)) / 1e9
        row["both_share"] = statistics.median(sum(alone) / flops[0] / (sum(ms) / work) for alone, ms in rounds_of_both)
        row["forward_share"] = statistics.median(alone[0] / flops[0] / (ms[0] / work) for alone, ms in rounds_of_both)
        if cycles:
            from ringspan.kernels.bench.clock_cycles import count_cycles

            row["mcycles"] = sum(
                count_cycles(call, ms, rep, device)["mcycles"] for call, ms in zip(passes, rank_times[-1], strict=True)
            )
            row["cycles_share"] = (rows[0] if rows else row)["mcycles"] / flops[0] / (row["mcycles"] / work)
        rows.append(row)
    return rows


def report(setting: Setting, layout: Layout, rows: list[Row]) -> str:
    """Return the table of one setting."""
    has_cycles = "cycles_share" in rows[0]
    lines = [
        f"\n{setting.name}: {setting.tokens} tokens on each of {layout.ranks} ranks, {layout.kind}, on one GPU",
        f"  {'':<8}{'TFLOP/s':>9}{'share of alone':>16}{'forward':>9}" + (f"{'in cycles':>11}" if has_cycles else ""),
    ]
    for row in rows:
        name = "alone" if row["rank"] is None else f"rank {row['rank']}"
        line = f"  {name:<8}{row['both_tflops']:>9.4g}{row['both_share']:>16.1%}{row['forward_share']:>9.1%}"
        lines.append(line + (f"{row['cycles_share']:>11.1%}" if has_cycles else ""))
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringspan bench rehearse", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the simulated ring (default %(default)s)")
    parser.add_argument("--rank", nargs="+", type=int, metavar="R", help="ranks to measure (default: all)")
    parser.add_argument(
        "--tokens", nargs="+", metavar="N", default=["8k", "32k"] if cuda else ["256"], help="tokens per rank, as 8k or 8192"
    )
    heads = ["16/16"] if cuda else ["4/2"]
    parser.add_argument("--heads", nargs="+", default=heads, metavar="Q/KV", help="query and KV heads")
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 32, metavar="D")
    parser.add_argument("--window", type=int, metavar="W", help="a causal window instead of plain causal")
    parser.add_argument("--layout", choices=KINDS, default="zigzag")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument(
        "--link",
        type=float,
        default=300,
        metavar="GB/S",
        help="modelled bandwidth (default %(default)s); 0: transfers complete at once",
    )
    parser.add_argument(
        "--backend", choices=("auto", *BACKENDS), default="auto", help="backend of our kernels (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="times that each rank is measured (default %(default)s)")
    parser.add_argument("--rep", type=float, default=100, help="ms per rank, round and direction (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="also count clock cycles, which do not drift as clocks do")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure the settings that the options describe; return 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.ranks < 2 or args.rounds < 1 or args.rep < 1:
        parser.error(f"--ranks {args.ranks} must be at least 2, --rounds {args.rounds} and --rep {args.rep:g} at least 1")
    if args.link < 0:
        parser.error(f"--link {args.link:g} must be positive, or 0 for transfers that complete at once")
    ranks = list(range(args.ranks)) if args.rank is None else args.rank
    if bad := [rank for rank in ranks if not 0 <= rank < args.ranks]:
        parser.error(f"--rank {bad[0]}: ranks are 0 … {args.ranks - 1}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    if args.cycles and (args.device == "cpu" or torch.version.hip):
        parser.error("--cycles reads the clocks of NVIDIA's multiprocessors: leave it out here")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"{args.json.parent} is no folder: make it first")
    try:
        pairs = [(int(q), int(kv)) for q, kv in (pair.split("/") for pair in args.heads)]
        settings = [Setting(parse_tokens(n), *pair, args.head_dim, args.window) for n in args.tokens for pair in pairs]
    except ValueError:
        parser.error(f"--tokens {args.tokens} must be counts such as 8192 or 8k, and --heads {args.heads} pairs such as 16/4")
    if any(min(each.tokens, each.heads, each.kv_heads, each.head_dim) < 1 for each in settings):
        parser.error("--tokens, --heads and --head-dim must be at least 1")
    device, dtype = torch.device(args.device), args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    result: Row = {"kind": "rehearsal", **machine(device), "dtype": dtype, "ranks": args.ranks, "link": args.link, "rows": []}
    options = sys.argv[1:] if argv is None else argv
    if args.json is not None:  # the recorded command leaves out the output path, which argparse also accepts abbreviated
        index = next(index for index, word in enumerate(options) if word.startswith("--j"))
        options = [*options[:index], *options[index + (1 if "=" in options[index] else 2) :]]
    result["command"] = shlex.join(["ringspan", "bench", "rehearse", *options])
    for setting in settings:
        layout = Layout(args.layout, setting.tokens * args.ranks, args.ranks)
        conditions = args.rounds, args.rep, args.cycles, args.backend, args.link * 1e9, device, DTYPES[dtype]
        try:
            rows = measure(setting, layout, ranks, *conditions)
        except ValueError as error:
            parser.error(str(error))
        print(report(setting, layout, rows), flush=True)
        result["rows"] += rows
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
