"""Calls of a ring on the stream simulator, and the properties that must hold in every order of its streams.

results     equal attention on one device
races       no memory is written while another operation may access it
waits       no kernel waits for a transfer that it does not use
K/V         each row that a rank reads is moved to it once
gradients   each row's dK/dV return to its owner once
"""

from collections import Counter, defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from ringspan import Layout, Mask, attention
from ringspan.parallel.coordination.process_groups import RingGroups
from ringspan.parallel.plan import Plan, make_plan
from ringspan.parallel.transport import select
from ringspan.parallel.transport.copy_engine import CopyEngineTransport
from ringspan.parallel.transport.streams import Wait
from tests.parallel.transport.accesses import UNIT
from tests.parallel.transport.stream_simulator import Label, SimulatedMachine, simulated_streams

OPTIONS = dict(scale=0.25, softcap=0.0, dropout=0.0, seed=None, deterministic=False, backend="reference")


class SequenceShape(NamedTuple):
    kind: str  # of its layout
    rows: int  # per rank
    padding: int  # rows of padding
    batch: int
    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: torch.dtype = torch.float64
    window: int | None = None

    def make_inputs(self, ranks: int, seed: int) -> list[list[torch.Tensor]]:
        """q, k, v and dout of three calls."""
        (heads, kv_heads), (width, v_width) = self.heads, self.widths
        sizes = (heads, width), (kv_heads, width), (kv_heads, v_width), (heads, v_width)
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.batch, self.rows * ranks - self.padding, *size) for size in sizes]
        calls = ([torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes] for _ in range(3))
        return [[x.to(self.dtype) for x in inputs] for inputs in calls]


class ExpectedCall(NamedTuple):
    """Inputs of one call, and its right results."""

    mask: Mask
    plans: list[Plan]  # per rank
    shards: list[list[torch.Tensor]]  # per rank: q, k, v, dout
    expected: list[list[torch.Tensor]]  # per rank: out, dq, dk, dv
    visible: dict[tuple[int, int], int]  # owner rank, reader rank: number of the owner's rows that the reader's queries see


def make_call(shape: SequenceShape, inputs: list[torch.Tensor], ranks: int, steps_of: str) -> ExpectedCall:
    q, k, v, dout = inputs
    layout, mask = Layout(shape.kind, q.shape[1], ranks), Mask(causal=True, window=shape.window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask, scale=0.25, backend="reference")
    results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    shards, expected = (
        [[layout.shard(x, 1, rank).contiguous() for x in tensors] for rank in range(ranks)] for tensors in (inputs, results)
    )
    _, k, v, _ = shards[0]
    nbytes = select.gradient_bytes(k.shape[1], k, v)
    blocks = select.blocks_per_step(steps_of, layout, True, nbytes, k.shape[2])
    plans = [make_plan(layout, mask, rank, blocks) for rank in range(ranks)]
    position = torch.arange(q.shape[1])
    distance = position[:, None] - position
    sees = (distance >= 0) & (distance < (shape.window or q.shape[1]))
    rows = [[int(n) for n in layout.positions(rank) if n < q.shape[1]] for rank in range(ranks)]
    visible = {
        (owner, reader): int(sees[rows[reader]][:, rows[owner]].any(0).sum())
        for owner in range(ranks)
        for reader in range(ranks)
        if owner != reader
    }
    return ExpectedCall(mask, plans, shards, expected, visible)


def make_groups(seed: int, rank: int) -> RingGroups:
    group: Any = SimpleNamespace(group_name=f"{seed} {rank}", rank=lambda: rank)
    return RingGroups(group, group, True, list(range(8)), 1.0)


class ObservedTransport(CopyEngineTransport):
    """Copy engine transport that labels its transfers, and the kernels between them, for the machine."""

    def __init__(self, machine: SimulatedMachine, groups: RingGroups, plan: Plan, call: int) -> None:
        super().__init__(groups, plan, torch.device("cpu"))
        self.machine = machine
        machine.call, machine.plan, machine.part, self.num_returns = call, plan, 0, 0

    def fetch(self, index: int, slot: int, recv_buffers: tuple[torch.Tensor, ...]) -> Wait:
        self.machine.label = Label("kv", self.machine.call, self.rank, index)
        return super().fetch(index, slot, recv_buffers)

    def send_buffer(self, slot: int, rows: int, like: torch.Tensor) -> torch.Tensor:
        self.machine.part += 1
        return super().send_buffer(slot, rows, like)

    def return_gradients(self, index: int, slot: int, send_buffer: torch.Tensor, recv_buffer: torch.Tensor) -> Wait:
        self.num_returns += 1
        self.machine.label = Label("gradients", self.machine.call, self.rank, index, self.num_returns)
        return super().return_gradients(index, slot, send_buffer, recv_buffer)


def violations(
    ring: ModuleType,
    shapes: list[SequenceShape],
    ranks: int,
    seed: int,
    steps_of: str,
    is_graph: bool = False,
) -> list[str]:
    """Violated properties of three forwards with different inputs, of these shapes in turn, and of three more with backwards.

    K and V are overwritten after each call. With odd seeds two streams of a rank call alternately. `ring` is a module with
    ring_forward and ring_backward; kernels of `ring_overlapped` add to dq atomically. With `is_graph` calls are captured, and
    each rank runs one branch at a time; a kernel may then wait for more transfers than it needs.
    """
    machine = SimulatedMachine(ranks, seed, is_graph=is_graph)
    call_shapes = [shapes[i % len(shapes)] for i in range(3)]
    calls = [make_call(shape, shape.make_inputs(ranks, seed)[i], ranks, steps_of) for i, shape in enumerate(call_shapes)]
    results: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    with simulated_streams(machine, ring.__name__.endswith("overlapped")):
        for rank in range(ranks):
            groups = make_groups(seed, rank)
            for i, backward in enumerate([False] * 3 + [True] * 3):
                machine.current = rank, f"caller {i % 2 if seed % 2 else 0}"
                call = calls[i % 3]
                q, k, v, dout = call.shards[rank]
                k, v = k.clone(), v.clone()
                with machine.capture():
                    transport = ObservedTransport(machine, groups, call.plans[rank], 2 * i)
                    out, lse = ring.ring_forward(q, k, v, call.mask, transport, None, 0, **OPTIONS)
                outputs = [out]
                if backward:
                    delta = machine.output_delta(dout, out)
                    with machine.capture():
                        transport = ObservedTransport(machine, groups, call.plans[rank], 2 * i + 1)
                        outputs += ring.ring_backward(dout, delta, q, k, v, lse, call.mask, transport, 0, **OPTIONS)
                assert all(x.allocated_on == machine.current for x in (outputs[0], *outputs[2:]))  # type: ignore[attr-defined]
                results[rank] += [x.clone() for x in outputs]  # on the caller's stream
                for x in (k, v):
                    x.fill_(torch.nan)
    try:
        machine.run()
    except AssertionError as error:
        return [str(error)]
    found = machine.accesses.races + ([] if is_graph else unneeded_waits(machine))
    for i in range(6):
        found += wrong_moves(machine, calls[i % 3], 2 * i, backward=False)
        found += wrong_moves(machine, calls[i % 3], 2 * i + 1, backward=True) if i >= 3 else []
    for rank, outputs in enumerate(results):
        wanted = [call.expected[rank][0] for call in calls] + [x for call in calls for x in call.expected[rank]]
        gaps = [float((x - y).abs().nan_to_num(torch.inf).max()) for x, y in zip(outputs, wanted, strict=True)]
        limits = [1e-12 if x.dtype == torch.float64 else 0.1 for x in wanted]
        if any(gap > limit for gap, limit in zip(gaps, limits, strict=True)):
            found.append(f"results of rank {rank} differ from one device by up to {max(gaps):.3g}")
    return found


def unneeded_waits(machine: SimulatedMachine) -> list[str]:
    """Waits of kernels for transfers of their call and rank that they do not use.

    A kernel uses the K/V of its step, which arrive after those of earlier steps, and the send buffer that part n − 2 has left.
    A local block uses none. The one that is launched together with the last part may wait for the transfers of earlier parts.
    """
    transfers = defaultdict(list)
    for label, stream, clock in machine.labelled:
        if label.kind != "kernel":
            transfers[label.call, label.rank].append((label, stream, clock[stream]))
    found = []
    for kernel, _, clock in machine.labelled:
        if kernel.kind != "kernel":
            continue
        is_local = kernel.step == 0
        last_step = (machine.ranks if kernel.part else 0) if is_local else kernel.step
        last_part = kernel.part - (1 if is_local else 2)
        for label, stream, count in transfers[kernel.call, kernel.rank]:
            is_unused = label.step > last_step if label.kind == "kv" else label.part > last_part
            if is_unused and clock[stream] >= count:
                found.append(f"{kernel} waits for {label}")
    return found


def wrong_moves(machine: SimulatedMachine, call: ExpectedCall, number: int, backward: bool) -> list[str]:
    """Rows of K/V and gradients that a call moves not exactly once."""
    _, k, v, _ = call.shards[0]
    accumulated = k.dtype if k.dtype == torch.float64 else torch.float32
    elements = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])  # per row
    kv: dict[tuple[int, int], Counter[Any]] = defaultdict(Counter)  # by owner rank and reader rank
    gradients: dict[tuple[int, int], Counter[Any]] = defaultdict(Counter)
    for label, sender, receiver, storage, addresses in machine.moved:
        if label.call == number and label.kind == "kv":
            kv[sender, receiver].update((storage, address) for address in addresses)
        elif label.call == number:
            gradients[receiver, sender].update((label.part, address) for address in addresses)
    found = []
    for (owner, reader), visible in call.visible.items():
        moved, returned = kv[owner, reader], gradients[owner, reader]
        rows = moved.total() * UNIT / k.itemsize / elements
        returned_rows = returned.total() * UNIT / accumulated.itemsize / elements
        ranks = f"rank {owner} to rank {reader}"
        if rows < visible or set(moved.values()) - {1}:
            found.append(
                f"call {number} moves {rows} rows from {ranks}, some of them {max(moved.values(), default=0)} times; "
                f"{visible} are visible"
            )
        if returned_rows != (rows if backward else 0) or set(returned.values()) - {1}:
            found.append(f"call {number} moves {rows} rows from {ranks}, which returns gradients of {returned_rows}")
    return found
