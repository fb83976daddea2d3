"""Roofline model of attention: FLOPs, bytes, and which of the two limits the speed. `ringspan bench kernels --roofline`.

Three algorithms, with the constants of our own code:

    standard     all pairs, masked ones included; scores and weights are whole matrices in memory:  Θ(N d + N²) bytes
    chunked      `chunked.py`: fp32 tiles of scores; each eager PyTorch operation writes and reads them
    flash        `triton`, `hopper`: a tile of queries stays in shared memory (M bytes) and loads its visible keys, so keys are
                 loaded N d / M times:  Θ(N² d² / M) bytes

FLOPs are those executed: whole tiles, and recomputation in the backward. "loads" are the bytes that enter and leave the SMs;
the laws above hold for them. "memory" is the part that reaches DRAM after the L2 cache. A stream that fits into the cache is
read once. A larger one is read once for all thread blocks that process the same head concurrently, if they keep step. That is
a lower bound, so  speed = FLOPs / max(FLOPs / peak, memory / bandwidth)  is a limit; "share" is the measured part of it.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan.kernels.backends.chunked import GPU_FACTOR, K_CHUNK, Q_CHUNK
from ringspan.kernels.bench.baselines import DIRECTIONS
from ringspan.kernels.bench.shapes import Shape, mask_of

MIB = 2**20
ELEMENT_SIZES = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Chip:
    """Datasheet figures. The planner has its own peaks (trainer/planning/flops.py), because it must start without torch."""

    name: str
    bf16_peak: float  # dense bf16 or fp16 FLOP/s
    fp32_peak: float  # FLOP/s
    bandwidth: float  # bytes per second of device memory
    l2: int  # bytes
    shared: int  # bytes of shared memory per thread block
    multiprocessors: int

    def peak(self, work: "Work") -> float:
        """Return the peak FLOP/s for the dtype of the work's matmuls."""
        return self.fp32_peak if work.is_fp32 else self.bf16_peak


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("NVIDIA H200", 989e12, 67e12, 4.8e12, 50 * MIB, 227 * 1024, 132),
        Chip("NVIDIA H100 80GB HBM3", 989e12, 67e12, 3.35e12, 50 * MIB, 227 * 1024, 132),
    )
}


@dataclass(frozen=True)
class TrafficStream:
    """Traffic of one tensor or group of tensors that a pass moves, possibly many times."""

    loads: float  # bytes into and out of the SMs
    compulsory: float  # bytes of DRAM traffic if the L2 cache holds the working set
    working_set: float = 0  # bytes that the cache must hold for that
    heads: int | None = None  # KV heads processed concurrently, each read by several thread blocks; None: no sharing

    def memory(self, chip: Chip) -> float:
        """Return the bytes of DRAM traffic on a chip."""
        if self.working_set <= chip.l2:
            return self.compulsory
        sharers = max(1.0, chip.multiprocessors / self.heads) if self.heads else 1.0
        return max(self.compulsory, self.loads / sharers)


@dataclass(frozen=True)
class Work:
    """FLOPs and traffic of one pass of one algorithm."""

    flops: float
    streams: tuple[TrafficStream, ...]
    is_fp32: bool = False  # dtype of the matmuls

    @property
    def loads(self) -> float:
        return sum(stream.loads for stream in self.streams)

    def memory(self, chip: Chip) -> float:
        return sum(stream.memory(chip) for stream in self.streams)

    def intensity(self, chip: Chip) -> float:
        """Return the FLOPs per byte of DRAM traffic."""
        return self.flops / self.memory(chip)

    def limit(self, chip: Chip) -> tuple[str, float]:
        """Return the binding resource, "compute" or "memory", and the least time in seconds."""
        times = {"compute": self.flops / chip.peak(self), "memory": self.memory(chip) / chip.bandwidth}
        return max(times.items(), key=lambda item: item[1])


def tile_pairs(shape: Shape, rows: int, keys: int) -> int:
    """Count the (query tile, key tile) pairs with a visible pair, of one head of one sequence."""
    lo, hi = mask_of(shape).interval(torch.arange(shape.length), shape.length)
    first = lo[::rows].div(keys, rounding_mode="floor")
    last = hi[torch.arange(rows - 1, shape.length + rows - 1, rows).clamp(max=shape.length - 1)]
    return int((last.div(keys, rounding_mode="floor") - first + 1).clamp(min=0).sum())


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of the tensors of one shape."""

    q: float  # also out, dout and dq
    k: float  # also v, dk and dv
    stats: float  # lse or delta

    @classmethod
    def of(cls, shape: Shape, size: int) -> "TensorBytes":
        tokens = shape.batch * shape.length
        return cls(
            tokens * shape.heads * shape.head_dim * size,
            tokens * shape.kv_heads * shape.head_dim * size,
            tokens * shape.heads * 4,
        )


def moved_once(size: float) -> TrafficStream:
    """Return the traffic of bytes that are read or written exactly once."""
    return TrafficStream(size, size)


def standard(shape: Shape, direction: str, size: int) -> Work:
    """Count standard attention.

    Forward: write s, read s, write p, read p.
    Backward: read p for dv; write dp; read p and dp, write ds; read ds for dq and for dk.
    """
    sizes = TensorBytes.of(shape, size)
    pairs = shape.batch * shape.heads * shape.length**2
    if direction == "forward":
        matmuls, passes, io_bytes = 2, 4, 2 * sizes.q + 2 * sizes.k
    else:
        matmuls, passes, io_bytes = 4, 7, 4 * sizes.q + 4 * sizes.k
    matrix = pairs * size
    return Work(2 * matmuls * pairs * shape.head_dim, (moved_once(io_bytes), TrafficStream(passes * matrix, 0, matrix)))


def chunked(shape: Shape, direction: str, size: int) -> Work:
    """Count the chunked backend: every read and write of the operations in `reference.Tile`."""
    rows, keys = (min(n * GPU_FACTOR, shape.length) for n in (Q_CHUNK, K_CHUNK))
    sizes, tiles = TensorBytes.of(shape, size), shape.batch * tile_pairs(shape, rows, keys)
    scores = shape.heads * rows * keys
    if direction == "forward":
        # Accesses per score: matmul 1, scale 2, mask 2, maximum 1, minus 2, exp 2, sum 1, matmul 1.
        # Per row and key element: q and k are widened, v is also cleared, out has 8 accesses.
        score_bytes, row_bytes, key_bytes = 12 * 4, (size + 8) + 32, (size + 8) + (size + 16)
        io_bytes = 2 * sizes.q + 2 * sizes.k + sizes.stats
    else:
        # Accesses per score: s 5, minus 2, exp 2, dv 1, dp 1, minus 2, times 3, mask 2, scale 2, dq 1, dk 1.
        # Per row and key element: q and k twice, dout, v; each sum has 4 accesses.
        score_bytes, row_bytes, key_bytes = 22 * 4, 3 * size + 60, 3 * size + 72
        io_bytes = 5 * sizes.q + 4 * sizes.k + 2 * sizes.stats
    widened = rows * shape.heads * row_bytes + 1.0 * keys * shape.kv_heads * key_bytes
    loads = tiles * (scores * score_bytes + widened * shape.head_dim)
    matmuls = 2 if direction == "forward" else 5
    flops = 2 * matmuls * tiles * scores * shape.head_dim
    return Work(flops, (TrafficStream(max(loads, io_bytes), io_bytes, shape.batch * scores * 4),), is_fp32=True)


def flash(backend: str, shape: Shape, direction: str, size: int) -> Work:
    """Count flash attention with the tile sizes that the backend, triton or hopper, uses on Hopper."""
    from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
    from ringspan.kernels.backends.hopper.arguments import num_concurrent_groups, num_thread_blocks
    from ringspan.kernels.backends.hopper.common import WARPGROUP_ROWS
    from ringspan.kernels.backends.triton import tile_sizes as triton_tiles
    from ringspan.kernels.backends.triton.arguments import mask_argument

    mask = mask_argument(mask_of(shape).bounds())
    q = torch.empty((1, 1, 1, shape.head_dim), dtype=torch.bfloat16, device="meta")
    group, sizes, fp32 = shape.heads // shape.kv_heads, TensorBytes.of(shape, size), 4 / size
    num_groups, hopper = shape.batch * shape.kv_heads, backend == "hopper"
    # Share of a sequence that the thread blocks of one head read at about the same time.
    reused = max(shape.documents or (shape.length,)) / shape.length

    def streamed(rows: int, keys: int, width: int, row_bytes: float, compulsory: float, group_bytes: float) -> TrafficStream:
        """Traffic of `width` rows of `row_bytes` for every pair of tiles; `group_bytes` are those of one KV head."""
        heads = num_groups
        if hopper:
            tiles = -(-shape.length // (rows if direction == "forward" else keys))
            sizes = num_groups, tiles, shape.length, int(group_bytes)
            heads = num_concurrent_groups(direction, mask, keys, *sizes, num_thread_blocks(q.device))
        loads = shape.batch * shape.heads * tile_pairs(shape, rows, keys) * width * row_bytes
        return TrafficStream(loads, compulsory, heads * group_bytes * reused, heads)

    def matmul_flops(number: int, rows: int, keys: int) -> float:
        area = tile_pairs(shape, rows, keys) * rows * keys
        return 2.0 * number * shape.batch * shape.heads * area * shape.head_dim

    kv_bytes = 2 * shape.length * shape.head_dim * size
    kv_row, q_row = 2 * shape.head_dim * size, 2 * shape.head_dim * size + 8  # k and v; q, dout, lse and delta
    delta = moved_once(2 * sizes.q + sizes.stats)
    if direction == "forward":
        if hopper:
            tile = hopper_tiles.tiles_for("forward", q, q)
            rows, keys = WARPGROUP_ROWS * tile["CONSUMERS"], tile["BLOCK_N"]
        else:
            rows, keys = _portable(triton_tiles.HOPPER, "forward", shape)
        kv = streamed(rows, keys, keys, kv_row, 2 * sizes.k, kv_bytes)
        return Work(matmul_flops(2, rows, keys), (moved_once(2 * sizes.q + sizes.stats), kv))
    if hopper:
        rows, keys = WARPGROUP_ROWS, hopper_tiles.tiles_for("backward", q, q)["BLOCK_N"]
        group_bytes = shape.length * group * (2 * size + 4) * shape.head_dim
        queries = streamed(rows, keys, rows, q_row, 2 * sizes.q + 2 * sizes.stats, group_bytes)
        # The reduce-add of dq reads and writes fp32. Before it dq is zeroed; after it dq is read and rounded.
        adds = streamed(rows, keys, rows, 2 * 4 * shape.head_dim, 2 * fp32 * sizes.q, group_bytes)
        dq = moved_once(2 * fp32 * sizes.q + sizes.q)
        return Work(matmul_flops(5, rows, keys), (delta, queries, adds, dq, moved_once(4 * sizes.k)))
    rows, keys = _portable(triton_tiles.HOPPER, "dq", shape)
    kv = streamed(rows, keys, keys, kv_row, 2 * sizes.k, kv_bytes)
    flops = matmul_flops(3, rows, keys)
    rows, keys = _portable(triton_tiles.HOPPER, "dkdv", shape)
    queries = streamed(rows, keys, rows, q_row, 2 * sizes.q + 2 * sizes.stats, shape.length * group * q_row)
    flops += matmul_flops(4, rows, keys)
    return Work(flops, (delta, moved_once(3 * sizes.q + 2 * sizes.stats), kv, queries, moved_once(4 * sizes.k)))


def _portable(table: Mapping[str, Mapping[int, tuple[int, int, int, int]]], kernel: str, shape: Shape) -> tuple[int, int]:
    """Queries and keys of a tile of a portable kernel."""
    rows, keys, *_ = next(tile for limit, tile in table[kernel].items() if shape.head_dim <= limit)
    return rows, keys


def paper_loads(shape: Shape, chip: Chip, size: int) -> float:
    """Return the bytes of keys that a forward loads with the largest query tile of FlashAttention's paper: M / 4 d elements."""
    rows = chip.shared / (4 * shape.head_dim * size)
    return shape.batch * shape.heads * shape.pairs() / rows * 2 * shape.head_dim * size


ALGORITHMS: dict[str, Callable[[Shape, str, int], Work]] = {
    "standard": standard,
    "chunked": chunked,
    "triton": lambda shape, direction, size: flash("triton", shape, direction, size),
    "hopper": lambda shape, direction, size: flash("hopper", shape, direction, size),
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
    """The model of one pass of one algorithm on one shape, with its measured time and DRAM bytes."""

    shape: Shape
    algorithm: str
    direction: str
    work: Work
    ms: float | None = None
    counted: float | None = None  # DRAM bytes, by Nsight Compute

    def share(self, chip: Chip) -> float | None:
        """Return the measured share of the limit."""
        return None if self.ms is None else self.work.limit(chip)[1] * 1000 / self.ms


def points(result: dict[str, Any]) -> list[Point]:
    """Return the points of a result of `ringspan bench kernels`, by shape; standard attention counts by its fastest kernel."""
    all_points = []
    for fields in result["shapes"]:
        shape = Shape(**fields | {"documents": tuple(fields["documents"]) if fields["documents"] else None})
        rows = {row["kernel"]: row for row in result["rows"] if row["shape"] == shape.name and row["status"] == "ok"}
        for algorithm, count in ALGORITHMS.items():
            for direction in DIRECTIONS:
                measured = [rows[kernel] for kernel in MEASURED_BY[algorithm] if kernel in rows]
                row: dict[str, Any] = min(measured, key=lambda row: row[f"{direction}_ms"], default={})
                work = count(shape, direction, ELEMENT_SIZES[result["dtype"]])
                ms, dram_bytes = row.get(f"{direction}_ms"), row.get(f"{direction}_dram_bytes")
                all_points.append(Point(shape, algorithm, direction, work, ms, dram_bytes))
    return all_points


def chip_of(result: dict[str, Any]) -> Chip:
    """Return the chip of a result.

    Raises:
        ValueError: the peaks of its device are not in CHIPS, or the roofline does not cover its dtype.
    """
    if result["device"] not in CHIPS:
        raise ValueError(
            f"device={result['device']!r}: its peaks are not known; known are {', '.join(CHIPS)}; "
            "add it to CHIPS in kernels/bench/roofline.py"
        )
    if result["dtype"] not in ELEMENT_SIZES:
        dtypes = " and ".join(ELEMENT_SIZES)
        raise ValueError(f"dtype={result['dtype']}: the roofline covers {dtypes}; measure with --dtype bf16")
    return CHIPS[result["device"]]


def report(result: dict[str, Any]) -> str:
    """Return a table for each shape of a result."""
    chip, lines = chip_of(result), []
    lines.append(
        f"{chip.name}: {chip.bf16_peak / 1e12:.0f} TFLOP/s in bf16, {chip.fp32_peak / 1e12:.0f} in fp32 (chunked), "
        f"{chip.bandwidth / 1e12:.3g} TB/s: bf16 is memory-bound below {chip.bf16_peak / chip.bandwidth:.0f} FLOP/B"
    )
    shape = None
    for point in points(result):
        if point.shape != shape:
            shape = point.shape
            lines.append(
                f"\n{shape.name}\n  {'':<18}{'GFLOP':>10}{'MiB loads':>11}{'memory':>10}{'ncu':>10}{'FLOP/B':>9}  "
                f"{'bound by':<9}{'ms at best':>11}{'measured':>10}{'share':>8}"
            )
        work, (bound, seconds), share = point.work, point.work.limit(chip), point.share(chip)
        counted = "-" if point.counted is None else f"{point.counted / MIB:.0f}"
        lines.append(
            f"  {point.algorithm + ' ' + point.direction:<18}{work.flops / 1e9:>10.4g}{work.loads / MIB:>11.0f}"
            f"{work.memory(chip) / MIB:>10.0f}{counted:>10}{work.intensity(chip):>9.1f}  {bound:<9}{seconds * 1000:>11.3g}"
            + ("         -       -" if point.ms is None or share is None else f"{point.ms:>10.3g}{share:>8.0%}")
        )
    return "\n".join(lines)


def load(paths: Iterable[Path], shapes: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Load saved results of `ringspan bench kernels`, with all their shapes or only those named.

    Raises:
        ValueError: a file is missing or holds another kind of result.
    """
    results = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no {path}: measure it with ringspan bench kernels --save, or correct the name")
        result = json.loads(path.read_text(encoding="utf-8"))
        if result.get("kind") != "attention":
            raise ValueError(f"{path} is of kind {result.get('kind')!r}: pass a result of ringspan bench kernels")
        if shapes is not None:
            result["shapes"] = [shape for shape in result["shapes"] if shape["name"] in set(shapes)]
        results.append(result)
    return results
