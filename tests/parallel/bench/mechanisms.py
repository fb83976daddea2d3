"""Every mechanism of the overlapped ring, on and off, on rehearsed ranks of one GPU.

    python -m tests.parallel.bench.mechanisms --ranks 4 --tokens 8k 32k --heads 16/16 16/4 --json docs/results/NAME.json

A figure is the GPU's clock cycles without the mechanism ÷ those with it, the median over rounds that measure all in turns. The
host launches all calls while the GPU sleeps, so its time does not count. It is reported apart. Of the measured ranks, rows are
those of the slowest one. `rehearse` explains what a rehearsed rank computes, and what "alone" is.
"""

import argparse
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from ringspan.kernels.bench.clock_cycles import read_clocks
from ringspan.kernels.bench.measure import DTYPES, machine
from ringspan.kernels.blocks import output_delta
from ringspan.kernels.mask import Mask
from ringspan.kernels.tensors import num_sms
from ringspan.parallel import gradient_return, ring, ring_overlapped
from ringspan.parallel.bench import rehearse
from ringspan.parallel.bench.__main__ import parse_tokens
from ringspan.parallel.bench.baselines import Setting
from ringspan.parallel.bench.timing import call_times
from ringspan.parallel.layout import Layout
from ringspan.parallel.row_ranges import length
from ringspan.parallel.transport import select
from ringspan.parallel.transport.base import Transport
from ringspan.parallel.transport.streams import CurrentStream, SideStream

Call = Callable[[], Any]
Patch = tuple[Any, str, Any]  # module, name, replacement
Rows = dict[str, dict[str, Any]]
CLOCK = 1.7e9  # Hz, about a GPU's clock under load
MIN_HOST_CALLS = 3  # of which the host's time is the mean
OPTIONS: dict[str, Any] = dict(backend="auto", head_start=0)


class Variant(NamedTuple):
    """A ring without one mechanism."""

    directions: str  # that differ: "forward", "backward" or "both"
    patches: tuple[Patch, ...] = ()
    ring: ModuleType = ring_overlapped


class Problem(NamedTuple):
    """Inputs of both directions of a rank."""

    inputs: list[Tensor]  # q, k, v, dout
    mask: Mask
    transport: Transport
    results: tuple[Tensor, Tensor]  # out, lse


class Times(NamedTuple):
    """Of one call: the GPU's time, its clock cycles, and the host's time for the launch."""

    ms: float
    mcycles: float
    host_us: float


class CastsOnCaller(SideStream):
    """The stream of casts, except that the casts themselves run on the caller's stream, after the last kernel."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "casts")
        self.waits_for_kernels = True

    def run(self) -> AbstractContextManager[object]:
        is_first, self.waits_for_kernels = self.waits_for_kernels, False
        return super().run() if is_first else nullcontext()

    def join(self) -> None:
        pass


def without(name: str, replacement: Callable[[torch.device], SideStream]) -> Callable[..., SideStream]:
    """Return a constructor of side streams that replaces the one with this name."""

    def construct(device: torch.device, stream_name: str, priority: int = -3) -> SideStream:
        return replacement(device) if stream_name == name else SideStream(device, stream_name, priority)

    return construct


def whole_and_last(heads: int, keys: int) -> list[gradient_return.Half]:
    """Return a first half without rows, and the whole block."""
    return [(slice(0, heads), slice(0, 0)), (slice(0, heads), slice(0, keys))]


def variants(problem: Problem) -> dict[str, Variant]:
    """Return the ring without each of the mechanisms that it uses here."""
    (q, k, v, _), mask, transport, _ = problem
    plan = transport.plan
    casts = without("casts", CastsOnCaller)
    sums = without("sums", lambda device: CurrentStream())
    filler = without("filler", lambda device: ring_overlapped.kernel_streams(device)[0])

    def one_stream(device: torch.device) -> list[SideStream]:
        return [SideStream(device, "kernels 0", priority=-2)]

    table = {
        "sums of more than two terms": Variant("backward", ((gradient_return, "MAX_SUMMANDS", 2),)),
        "backward: two kernel streams": Variant("backward", ((ring_overlapped, "kernel_streams", one_stream),)),
        "overlapped backward, instead of the plain ring's": Variant("backward", ring=ring),
        "stream of sums": Variant("backward", ((gradient_return, "SideStream", sums),)),
        "filler stream": Variant("backward", ((ring_overlapped, "SideStream", filler),)),
    }
    if sum(map(length, plan.shared)) == k.shape[1]:  # else local keys that no other rank reads are computed apart
        if gradient_return.halves_fill_sms(q, k, k.shape[1]):
            for name, halves in (("first", gradient_return.whole_block), ("last", whole_and_last)):
                patches = ((gradient_return, "half_blocks", halves),)
                table[f"local block in halves, instead of whole and {name}"] = Variant("backward", patches)
        else:
            patches = ((gradient_return, "TILES_PER_SM", 0),)
            table["local block whole and first, instead of in halves"] = Variant("backward", patches)
    if ring_overlapped.equivalent_rows(q.shape[1], mask) * len(plan.steps) > ring_overlapped.SPLIT_HEADS_ABOVE:
        patches = ((ring_overlapped, "SPLIT_HEADS_ABOVE", math.inf),)
        table["forward in two halves of heads"] = Variant("forward", patches)
        table["overlapped forward, instead of the plain ring's"] = Variant("forward", ring=ring)
        if plan.unfinished:
            table["stream of casts"] = Variant("forward", ((ring_overlapped, "SideStream", casts),))
    block_bytes = select.gradient_bytes(k.shape[1], k, v)
    if len(plan.steps) > 2 and gradient_return.SMALL_BYTES < block_bytes < gradient_return.LARGE_BYTES:
        table["sums of several arrivals"] = Variant("backward", ((gradient_return, "KEPT_BYTES", 0),))
    if select.num_parts(plan, k, v) > 1:
        table["gradients in parts of some heads"] = Variant("backward", ((select, "PART_BYTES", 2**40),))
    return table


@contextmanager
def replaced(patches: tuple[Patch, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def make_problem(inputs: list[Tensor], layout: Layout, setting: Setting, rank: int, link: float) -> Problem:
    q, k, v, _ = inputs
    mask = setting.mask(layout.length)
    transport = rehearse.make_simulated_transport(layout, mask, rank, k, v, link)
    results = ring.ring_forward(q, k, v, mask, transport, None, scale=q.shape[-1] ** -0.5, **OPTIONS)
    return Problem(inputs, mask, transport, results)


def make_calls(variant: Variant, problem: Problem) -> dict[str, Call]:
    """Return a call for each direction in which a variant differs."""
    (q, k, v, dout), mask, transport, (out, lse) = problem
    scale, q_at = q.shape[-1] ** -0.5, transport.plan.steps[0].q_at

    def forward() -> None:
        with replaced(variant.patches):
            variant.ring.ring_forward(q, k, v, mask, transport, None, scale=scale, **OPTIONS)

    def backward() -> None:
        delta = output_delta(dout, out, backend="auto", mask=mask, q_at=q_at)
        with replaced(variant.patches):
            variant.ring.ring_backward(dout, delta, q, k, v, lse, mask, transport, scale=scale, **OPTIONS)

    calls = {"forward": forward, "backward": backward}
    return calls if variant.directions == "both" else {variant.directions: calls[variant.directions]}


def queued_times(call: Call, calls: int, device: torch.device) -> Times:
    """Measure calls that are launched while the GPU sleeps."""
    if device.type == "cpu":
        ms = statistics.mean(call_times(call, device, calls))
        return Times(ms, ms, 0.0)
    sm_count = num_sms(device)
    for sleep_ms in (4 * calls * 4**attempt for attempt in range(5)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before, after = (torch.zeros(sm_count, dtype=torch.int64, device=device) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_ms / 1e3 * CLOCK))
        start.record()
        read_clocks[(sm_count,)](before, sm_count, num_warps=1)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        host_us = (time.perf_counter() - begun) / calls * 1e6
        read_clocks[(sm_count,)](after, sm_count, num_warps=1)
        end.record()
        was_ahead = not start.query()
        torch.cuda.synchronize()
        is_read = (before > 0) & (after > 0)
        if was_ahead and is_read.any():
            cycles = (after - before)[is_read].double().median().item()
            return Times(start.elapsed_time(end) / calls, cycles / calls / 1e6, host_us)
    raise RuntimeError("the host launched later than the GPU slept, or no SM was read twice: let nothing else run here")


def measure(setting: Setting, layout: Layout, rank: int, rounds: int, rep: float, link: float, dtype: str) -> Rows:
    """Return a row for each mechanism of one rank; "" is the ring with all of them, "alone" the kernel alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone = setting.single_rank_shape(layout.ranks).length
    single = Layout("contiguous", alone, 1)
    shard, sequence = (rehearse.tensors(setting, n, device, DTYPES[dtype]) for n in (layout.local_length, alone))
    problem = make_problem(shard, layout, setting, rank, link)
    calls = {name: make_calls(variant, problem) for name, variant in {"": Variant("both"), **variants(problem)}.items()}
    with replaced(((rehearse, "blocks_per_step", lambda *_: (1,) * (layout.ranks - 1)),)):
        one_block_each = make_problem(shard, layout, setting, rank, link)
    if len(one_block_each.transport.plan.steps) != len(problem.transport.plan.steps):
        calls["steps of several blocks"] = make_calls(Variant("both"), one_block_each)
    calls["alone"] = make_calls(Variant("both", ring=ring), make_problem(sequence, single, setting, 0, link))
    queued_times(calls[""]["forward"], 1, device)  # compiles
    counts = {way: max(1, min(10, int(rep / queued_times(call, 1, device).ms))) for way, call in calls[""].items()}
    times: dict[str, dict[str, list[Times]]] = {name: {way: [] for way in ways} for name, ways in calls.items()}
    for index in range(rounds + 1):
        for name, ways in calls.items():
            for way, call in ways.items():
                sample = queued_times(call, counts[way], device)
                if index:  # the first round also compiles and allocates
                    times[name][way].append(sample)
    flops = layout.work(setting.mask(layout.length))[rank] / single.work(setting.mask(alone))[0]  # ÷ those alone
    rows = make_rows(times, flops)
    for way, samples in times[""].items():
        if counts[way] >= MIN_HOST_CALLS:
            rows[""][f"host_{way}_us"] = statistics.median(sample.host_us for sample in samples)
    return rows


def make_rows(times: dict[str, dict[str, list[Times]]], flops: float) -> Rows:
    """Return medians over the rounds, and gains and shares within a round, because clocks drift."""
    every = {name: with_both_directions(ways, times[""]) for name, ways in times.items()}
    rows: Rows = {}
    for name, ways in every.items():
        rows[name] = {}
        for way, samples in ways.items():
            rows[name] |= {f"{way}_{unit}": statistics.median(getattr(x, unit) for x in samples) for unit in ("ms", "mcycles")}
            gains = [a.mcycles / b.mcycles for a, b in zip(samples, every[""][way], strict=True)]
            shares = [flops * a.mcycles / b.mcycles for a, b in zip(every["alone"][way], samples, strict=True)]
            rows[name] |= {f"{way}_mcycles_gain": statistics.median(gains), f"{way}_mcycles_range": [min(gains), max(gains)]}
            rows[name][f"{way}_share"] = statistics.median(shares)
    rows[""]["rounds"] = len(times[""]["forward"])
    return rows


def with_both_directions(times: dict[str, list[Times]], base: dict[str, list[Times]]) -> dict[str, list[Times]]:
    """Return the samples of each direction and their sums; a direction that was not measured is that of `base`."""
    ways = {way: times.get(way, base[way]) for way in ("forward", "backward")}
    sums = [Times(*map(sum, zip(*pair, strict=True))) for pair in zip(*ways.values(), strict=True)]
    return ways | {"both": sums}


def main(argv: list[str] | None = None) -> int:
    """Measure the shapes that the options describe; return 0."""
    output = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # the recorded command leaves it out
    output.add_argument("--json", type=Path, help="also write this file; shapes are added to those that it has")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, parents=[output], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, nargs="+", help="ranks to measure (default: the first and the last)")
    parser.add_argument("--tokens", nargs="+", required=True, help="tokens per rank, as 8k or 8192")
    parser.add_argument("--heads", nargs="+", default=["16/16"], metavar="Q/KV")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--link", type=float, default=300, metavar="GB/S")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rep", type=float, default=80, help="ms per round, mechanism and direction (default %(default)s)")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {"kind": "mechanisms", **machine(device), "dtype": args.dtype, "ranks": args.ranks}
    result |= {"rehearsed": True, "queued": True, "link": args.link, "shapes": {}}
    if args.json is not None:
        if not args.json.parent.is_dir():
            parser.error(f"{args.json.parent} is no folder: make it first")
        earlier = json.loads(args.json.read_text()) if args.json.exists() else result
        if differing := [
            key for key in ("device", "commit", "versions", "dtype", "ranks", "link") if earlier[key] != result[key]
        ]:
            parser.error(f"{args.json} differs in {', '.join(differing)}: name another file")
        result["shapes"] = earlier["shapes"]
    options = output.parse_known_args(argv)[1]
    command = shlex.join(["python", "-m", "tests.parallel.bench.mechanisms", *options])
    for tokens, heads in itertools.product(args.tokens, args.heads):
        setting = Setting(parse_tokens(tokens), *map(int, heads.split("/")), args.head_dim, args.window)
        layout, start = Layout("zigzag", setting.tokens * args.ranks, args.ranks), time.monotonic()
        ranks = {
            rank: measure(setting, layout, rank, args.rounds, args.rep, args.link * 1e9, args.dtype)
            for rank in args.rank or (0, args.ranks - 1)
        }
        slowest = max(ranks, key=lambda rank: ranks[rank][""]["both_mcycles"])
        shape = {"name": setting.name, "seconds": round(time.monotonic() - start), "rank": slowest, "command": command}
        result["shapes"][setting.name] = shape | {"rows": ranks[slowest]}
        print(f"{setting.name}: {shape['seconds']} s, rank {slowest}", flush=True)
        for name, row in ranks[slowest].items():
            gains = "".join(f"{row[f'{way}_mcycles_gain']:8.3f}" for way in ("forward", "backward", "both"))
            print(f"  {name or 'the ring':<55}{row['both_ms']:9.3f} ms{row['both_share']:8.1%}{gains}", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
