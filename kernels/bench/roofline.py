"""What attention has to compute and to move, and which of the two holds it up: `ringspan bench kernels --roofline`.

Counted for three algorithms, with the constants of our own code:

    standard     every pair, also those a mask hides; scores and weights are whole matrices in memory:  Θ(N d + N²) bytes
    chunked      `chunked.py`: fp32 tiles of scores that eager PyTorch writes and reads again, a pass an operation
    flash        `triton` and `hopper`: a tile of queries stays in shared memory (M bytes) and loads the keys it sees, so that
                 there are N d / M times as many loads as there are keys:  Θ(N² d² / M) bytes

FLOPs are those carried out: whole tiles, and what a backward recomputes. Bytes are given twice. "loads" is what enters and
leaves the multiprocessors, the law above, which holds for memory if nothing is cached. "memory" is what is left behind the L2
cache: a stream that fits is read once; one that does not is read once for all programs that work on the same head at a time,
if they keep step. That is the least, so speed = FLOPs / max(FLOPs / peak, memory / bandwidth) is a limit, and the share says
how much of it was measured. Nsight Compute's DRAM bytes, where it is there, stand beside the model's.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan.kernels.backends.chunked import GPU_FACTOR, K_CHUNK, Q_CHUNK
from ringspan.kernels.bench.baselines import WAYS
from ringspan.kernels.bench.shapes import Shape, mask_of

MIB = 2**20
SIZES = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Chip:
    """What a datasheet says. The planner has peaks of its own (trainer/check.py), as it must start without torch."""

    name: str
    half: float  # dense bf16 or fp16 FLOP/s
    single: float  # fp32 FLOP/s
    bandwidth: float  # bytes a second of device memory
    l2: int  # bytes
    shared: int  # bytes a program can have
    multiprocessors: int

    def peak(self, work: "Work") -> float:
        return self.single if work.single else self.half


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("NVIDIA H200", 989e12, 67e12, 4.8e12, 50 * MIB, 227 * 1024, 132),
        Chip("NVIDIA H100 80GB HBM3", 989e12, 67e12, 3.35e12, 50 * MIB, 227 * 1024, 132),
    )
}


@dataclass(frozen=True)
class TrafficStream:
    """Bytes of something that is moved again and again."""

    loads: float  # into and out of the multiprocessors
    once: float  # of memory, if the L2 cache holds the rest
    working: float = 0  # what the cache has to hold for that
    heads: int | None = None  # key heads in work at a time, whose programs read the same; None: programs share nothing

    def memory(self, chip: Chip) -> float:
        if self.working <= chip.l2:
            return self.once
        sharers = max(1.0, chip.multiprocessors / self.heads) if self.heads else 1.0
        return max(self.once, self.loads / sharers)


@dataclass(frozen=True)
class Work:
    """One pass of one algorithm."""

    flops: float
    streams: tuple[TrafficStream, ...]
    single: bool = False  # whether the products are fp32

    @property
    def loads(self) -> float:
        return sum(stream.loads for stream in self.streams)

    def memory(self, chip: Chip) -> float:
        return sum(stream.memory(chip) for stream in self.streams)

    def intensity(self, chip: Chip) -> float:
        return self.flops / self.memory(chip)

    def limit(self, chip: Chip) -> tuple[str, float]:
        """What binds, and the seconds that it takes at least."""
        times = {"compute": self.flops / chip.peak(self), "memory": self.memory(chip) / chip.bandwidth}
        return max(times.items(), key=lambda item: item[1])


def tile_pairs(shape: Shape, rows: int, keys: int) -> int:
    """Pairs of a tile of queries and a tile of keys that see each other, of one head of one sequence."""
    lo, hi = mask_of(shape).interval(torch.arange(shape.length), shape.length)
    first = lo[::rows].div(keys, rounding_mode="floor")
    last = hi[torch.arange(rows - 1, shape.length + rows - 1, rows).clamp(max=shape.length - 1)]
    return int((last.div(keys, rounding_mode="floor") - first + 1).clamp(min=0).sum())


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of one shape."""

    q: float  # also out, dout and dq
    k: float  # also v, dk and dv
    stats: float  # lse or delta

    @classmethod
    def of(cls, shape: Shape, size: int) -> "Sizes":
        tokens = shape.batch * shape.length
        return cls(
            tokens * shape.heads * shape.head_dim * size,
            tokens * shape.kv_heads * shape.head_dim * size,
            tokens * shape.heads * 4,
        )


def once(size: float) -> TrafficStream:
    return TrafficStream(size, size)


def standard(shape: Shape, way: str, size: int) -> Work:
    """Forward: write s, read s, write p, read p. Backward: p for dv; write dp; p and dp in, ds out; ds for dq and for dk."""
    at = Sizes.of(shape, size)
    pairs = shape.batch * shape.heads * shape.length**2
    products, passes, inputs = (2, 4, 2 * at.q + 2 * at.k) if way == "forward" else (4, 7, 4 * at.q + 4 * at.k)
    matrix = pairs * size
    return Work(2 * products * pairs * shape.head_dim, (once(inputs), TrafficStream(passes * matrix, 0, matrix)))


def chunked(shape: Shape, way: str, size: int) -> Work:
    """Bytes an element as `reference.Tile` spells its operations: what is read and what is written, each time it is."""
    rows, keys = (min(n * GPU_FACTOR, shape.length) for n in (Q_CHUNK, K_CHUNK))
    at, tiles = Sizes.of(shape, size), shape.batch * tile_pairs(shape, rows, keys)
    scores = shape.heads * rows * keys
    if way == "forward":
        # s: product 1, scale 2, mask 2, maximum 1, minus 2, exp 2, sum 1, product 1; q and k widened; v also cleared; out 8
        each, of_row, of_key, least = 12 * 4, (size + 8) + 32, (size + 8) + (size + 16), 2 * at.q + 2 * at.k + at.stats
    else:
        # s 5, minus 2, exp 2, dv 1, dp 1, minus 2, times 3, mask 2, scale 2, dq 1, dk 1; q and k twice, dout, v; sums 4 each
        each, of_row, of_key, least = 22 * 4, 3 * size + 60, 3 * size + 72, 5 * at.q + 4 * at.k + 2 * at.stats
    wide = rows * shape.heads * of_row + 1.0 * keys * shape.kv_heads * of_key
    moved = tiles * (scores * each + wide * shape.head_dim)
    products = 2 if way == "forward" else 5
    work = 2 * products * tiles * scores * shape.head_dim
    return Work(work, (TrafficStream(max(moved, least), least, shape.batch * scores * 4),), single=True)


def flash(backend: str, shape: Shape, way: str, size: int) -> Work:
    """With the tiles that the backend would take on Hopper."""
    from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
    from ringspan.kernels.backends.hopper.arguments import heads_together
    from ringspan.kernels.backends.hopper.common import WARPGROUP_ROWS
    from ringspan.kernels.backends.triton import tile_sizes as triton_tiles
    from ringspan.kernels.backends.triton.arguments import mask_argument

    mask = mask_argument(mask_of(shape).bounds())
    q = torch.empty((1, 1, 1, shape.head_dim), dtype=torch.bfloat16, device="meta")
    group, at, fp32 = shape.heads // shape.kv_heads, Sizes.of(shape, size), 4 / size
    num_groups, hopper = shape.batch * shape.kv_heads, backend == "hopper"
    alive = max(shape.documents or (shape.length,)) / shape.length  # what programs of one head read at about the same time

    def streamed(rows: int, keys: int, width: int, each: float, least: float, of_group: float) -> TrafficStream:
        """`width` rows of every pair of tiles, `each` bytes a row."""
        heads = min(num_groups, heads_together(way, mask, shape.head_dim, int(of_group), 1)) if hopper else num_groups
        loads = shape.batch * shape.heads * tile_pairs(shape, rows, keys) * width * each
        return TrafficStream(loads, least, heads * of_group * alive, heads)

    def products(number: int, rows: int, keys: int) -> float:
        area = tile_pairs(shape, rows, keys) * rows * keys
        return 2.0 * number * shape.batch * shape.heads * area * shape.head_dim

    of_keys = 2 * shape.length * shape.head_dim * size
    kv_row, q_row = 2 * shape.head_dim * size, 2 * shape.head_dim * size + 8  # k and v; q, dout, lse and delta
    delta = once(2 * at.q + at.stats)
    if way == "forward":
        if hopper:
            tile = hopper_tiles.tiles_for("forward", q, q)
            rows, keys = WARPGROUP_ROWS * tile["CONSUMERS"], tile["BLOCK_N"]
        else:
            rows, keys = _portable(triton_tiles.HOPPER, "forward", shape)
        kv = streamed(rows, keys, keys, kv_row, 2 * at.k, of_keys)
        return Work(products(2, rows, keys), (once(2 * at.q + at.stats), kv))
    if hopper:
        rows, keys = WARPGROUP_ROWS, hopper_tiles.tiles_for("backward", q, q)["BLOCK_N"]
        of_group = shape.length * group * (2 * size + 4) * shape.head_dim
        queries = streamed(rows, keys, rows, q_row, 2 * at.q + 2 * at.stats, of_group)
        # an addition in memory reads and writes; before it dq is filled with zeros, after it read and rounded
        adds = streamed(rows, keys, rows, 2 * 4 * shape.head_dim, 2 * fp32 * at.q, of_group)
        return Work(products(5, rows, keys), (delta, queries, adds, once(2 * fp32 * at.q + at.q), once(4 * at.k)))
    rows, keys = _portable(triton_tiles.HOPPER, "dq", shape)
    kv = streamed(rows, keys, keys, kv_row, 2 * at.k, of_keys)
    flops = products(3, rows, keys)
    rows, keys = _portable(triton_tiles.HOPPER, "dkdv", shape)
    of_group = shape.length * group * q_row
    queries = streamed(rows, keys, rows, q_row, 2 * at.q + 2 * at.stats, of_group)
    flops += products(4, rows, keys)
    return Work(flops, (delta, once(3 * at.q + 2 * at.stats), kv, queries, once(4 * at.k)))


def _portable(table: dict[str, dict[int, tuple[int, ...]]], kernel: str, shape: Shape) -> tuple[int, int]:
    """Queries and keys of a tile."""
    return next(tile[:2] for limit, tile in table[kernel].items() if shape.head_dim <= limit)  # type: ignore[return-value]


def law(shape: Shape, chip: Chip, size: int) -> float:
    """Bytes a forward loads with the largest tile of queries that FlashAttention's paper allows: M / 4 d elements."""
    rows = chip.shared / (4 * shape.head_dim * size)
    return shape.batch * shape.heads * shape.pairs() / rows * 2 * shape.head_dim * size


ALGORITHMS: dict[str, Callable[[Shape, str, int], Work]] = {
    "standard": standard,
    "chunked": chunked,
    "triton": lambda shape, way, size: flash("triton", shape, way, size),
    "hopper": lambda shape, way, size: flash("hopper", shape, way, size),
}
MEASURED_BY = {
    "standard": ("standard", "sdpa-math", "reference"),
    "chunked": ("chunked",),
    "triton": ("triton",),
    "hopper": ("hopper",),
}
KERNELS = [kernel for kernels in MEASURED_BY.values() for kernel in kernels]


@dataclass(frozen=True)
class Point:
    """One pass of one algorithm on one shape, and what was measured of it."""

    shape: Shape
    algorithm: str
    way: str
    work: Work
    ms: float | None = None
    counted: float | None = None  # DRAM bytes, by Nsight Compute

    def share(self, chip: Chip) -> float | None:
        return None if self.ms is None else self.work.limit(chip)[1] * 1000 / self.ms


def points(result: dict[str, Any]) -> list[Point]:
    """Everything that a result of `kernels.bench` is about, in the order of its shapes; of standard attention the fastest."""
    found = []
    for given in result["shapes"]:
        shape = Shape(**given | {"documents": tuple(given["documents"]) if given["documents"] else None})
        rows = {row["kernel"]: row for row in result["rows"] if row["shape"] == shape.name and row["status"] == "ok"}
        for algorithm, count in ALGORITHMS.items():
            for way in WAYS:
                its = [rows[kernel] for kernel in MEASURED_BY[algorithm] if kernel in rows]
                row = min(its, key=lambda row: row[f"{way}_ms"], default={})
                work = count(shape, way, SIZES[result["dtype"]])
                found.append(Point(shape, algorithm, way, work, row.get(f"{way}_ms"), row.get(f"{way}_dram_bytes")))
    return found


def chip_of(result: dict[str, Any]) -> Chip:
    if result["device"] not in CHIPS:
        raise ValueError(
            f"no peaks of {result['device']!r}: known are {', '.join(CHIPS)}; add it to CHIPS in kernels/roofline.py"
        )
    if result["dtype"] not in SIZES:
        raise ValueError(f"a result in {result['dtype']}: the roofline counts {' and '.join(SIZES)}; measure with --dtype bf16")
    return CHIPS[result["device"]]


def report(result: dict[str, Any]) -> str:
    """A table a shape."""
    chip, lines = chip_of(result), []
    lines.append(
        f"{chip.name}: {chip.half / 1e12:.0f} TFLOP/s in bf16, {chip.single / 1e12:.0f} in fp32 (chunked), "
        f"{chip.bandwidth / 1e12:.3g} TB/s: bf16 is bound by memory below {chip.half / chip.bandwidth:.0f} FLOP/B"
    )
    shape = None
    for point in points(result):
        if point.shape != shape:
            shape = point.shape
            lines.append(
                f"\n{shape.name}\n  {'':<18}{'GFLOP':>10}{'MiB loads':>11}{'memory':>10}{'ncu':>10}{'FLOP/B':>9}  "
                f"{'bound by':<9}{'ms at best':>11}{'measured':>10}{'share':>8}"
            )
        work, (binds, seconds), share = point.work, point.work.limit(chip), point.share(chip)
        counted = "-" if point.counted is None else f"{point.counted / MIB:.0f}"
        lines.append(
            f"  {point.algorithm + ' ' + point.way:<18}{work.flops / 1e9:>10.4g}{work.loads / MIB:>11.0f}"
            f"{work.memory(chip) / MIB:>10.0f}{counted:>10}{work.intensity(chip):>9.1f}  {binds:<9}{seconds * 1000:>11.3g}"
            + ("         -       -" if point.ms is None or share is None else f"{point.ms:>10.3g}{share:>8.0%}")
        )
    return "\n".join(lines)


def load(paths: Iterable[Path], shapes: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Saved results of `kernels.bench`, some or all of their shapes."""
    results = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no {path}: measure it with ringspan bench kernels --save, or correct the name")
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("kind") != "attention":
            raise ValueError(f"{path} is of kind {result.get('kind')!r}: give a result of ringspan bench kernels")
        if shapes is not None:
            result["shapes"] = [shape for shape in result["shapes"] if shape["name"] in set(shapes)]
        results.append(result)
    return results
