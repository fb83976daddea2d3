"""The roofline model against counts by hand and scaling laws, and the command's tables, plots and errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringspan.kernels.backends.hopper import tile_sizes as hopper_tiles
from ringspan.kernels.backends.triton import tile_sizes as triton_tiles
from ringspan.kernels.bench import __main__ as bench
from ringspan.kernels.bench import roofline
from ringspan.kernels.bench.baselines import DIRECTIONS
from ringspan.kernels.bench.roofline import (
    ALGORITHMS,
    CHIPS,
    Chip,
    TensorBytes,
    TrafficStream,
    Work,
    chunked,
    flash,
    standard,
    tile_pairs,
)
from ringspan.kernels.bench.shapes import SHAPES, Shape, mask_of
from ringspan.trainer.planning import flops

H200 = CHIPS["NVIDIA H200"]
NO_CACHE = replace(H200, l2=0, multiprocessors=1)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed tile sizes, independent of later tuning."""
    hopper = dict(CONSUMERS=3, BLOCK_N=128, Q_STAGES=2, STAGES=4, REGISTERS=160, STAGED=False, maxnreg=128)
    monkeypatch.setattr(hopper_tiles, "FORWARD", {(64, 64): hopper, (256, 256): hopper | dict(CONSUMERS=2)})
    monkeypatch.setattr(hopper_tiles, "BACKWARD", {(64, 64): dict(BLOCK_N=128), (256, 256): dict(BLOCK_N=64)})
    table = {"forward": {256: (128, 64, 8, 3)}, "dq": {256: (64, 64, 4, 3)}, "dkdv": {256: (32, 128, 4, 3)}}
    monkeypatch.setattr(triton_tiles, "HOPPER", table)


MASKS = [
    dict(causal=False),
    dict(causal=True),
    dict(causal=True, window=5),
    dict(causal=False, window=9),
    dict(documents=(1, 20, 16)),
    dict(documents=(30, 7), window=6),
]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (4, 8), (8, 4), (16, 5), (64, 64)])
def test_tile_pairs_have_a_visible_pair(options: dict, rows: int, keys: int) -> None:
    shape = Shape("s", 1, 37, 1, 1, 16, **options)
    visible = mask_of(shape).visible(torch.arange(37), torch.arange(37))[0]
    expected = sum(bool(tile.any()) for strip in visible.split(rows, 0) for tile in strip.split(keys, 1))
    assert tile_pairs(shape, rows, keys) == expected


def test_standard_by_hand() -> None:
    shape = Shape("s", 1, 4, 2, 1, 2, causal=True)  # q has 32 bytes, k 16, a matrix 64; masked pairs count
    forward, backward = standard(shape, "forward", 2), standard(shape, "backward", 2)
    assert forward.flops == 2 * 2 * (2 * 16) * 2 and backward.flops == 2 * forward.flops
    assert forward.loads == (32 + 32 + 16 + 16) + 4 * 64
    assert backward.loads == 4 * (32 + 16) + 7 * 64  # q, dout twice, dq; k, v, dk, dv
    assert forward.memory(NO_CACHE) == forward.loads and forward.memory(H200) == 96


def test_chunked_by_hand() -> None:
    shape = Shape("s", 1, 4, 2, 1, 2, causal=True)  # one tile of 2 × 4 × 4 scores
    forward, backward = chunked(shape, "forward", 2), chunked(shape, "backward", 2)
    assert forward.is_fp32 and forward.flops == 2 * 2 * 32 * 2 and backward.flops == 2.5 * forward.flops
    assert forward.loads == 32 * 48 + 4 * 2 * 2 * (10 + 32) + 4 * 1 * 2 * (10 + 18)
    assert backward.loads == 32 * 88 + 4 * 2 * 2 * (6 + 60) + 4 * 1 * 2 * (6 + 72)
    assert forward.memory(H200) == 2 * 32 + 2 * 16 + 32


def test_flash_forward_by_hand(tiles: None) -> None:
    # 384 queries are two tiles of 192: the first loads two tiles of 128 keys, the second all three
    shape = Shape("s", 1, 384, 2, 1, 64)
    work = flash("hopper", shape, "forward", 2)
    q, k, lse = 384 * 2 * 64 * 2, 384 * 64 * 2, 384 * 2 * 4
    assert work.loads == 2 * q + lse + 2 * 5 * 128 * (64 + 64) * 2
    assert work.flops == 2 * 2 * 2 * (5 * 192 * 128) * 64
    assert work.memory(H200) == 2 * q + 2 * k + lse
    assert flash("triton", shape, "forward", 2).loads == 2 * q + lse + 2 * (2 + 4 + 6) * 64 * (64 + 64) * 2


def test_flash_backward_by_hand(tiles: None) -> None:
    shape = Shape("s", 1, 256, 1, 1, 64)  # six pairs of tiles of 64 queries and 128 keys
    q, stats = 256 * 64 * 2, 256 * 4
    delta = 2 * q + stats
    work = flash("hopper", shape, "backward", 2)
    rows = 6 * 64
    assert work.loads == delta + rows * (2 * 128 + 8) + rows * 2 * 256 + (2 * 2 * q + q) + 4 * q
    assert work.flops == 2 * 5 * (6 * 64 * 128) * 64
    assert work.memory(H200) == delta + (2 * q + 2 * stats) + 2 * 2 * q + (2 * 2 * q + q) + 4 * q
    # dq: 64 × 64 tiles, 10 pairs, loads k and v; dkdv: 32 × 128, 8 + 4 pairs, loads q, dout, lse and delta
    work = flash("triton", shape, "backward", 2)
    assert work.loads == delta + (3 * q + 2 * stats) + 10 * 64 * 256 + 12 * 32 * (256 + 8) + 4 * q
    assert work.flops == 2 * (3 * 10 * 64 * 64 + 4 * 12 * 32 * 128) * 64


def test_tiles_of_wide_heads_have_fewer_keys(tiles: None) -> None:
    """Five matmuls in both cases; of these tiles of Hopper's backward, the wide ones have 64 keys in place of 128."""
    shape = Shape("s", 1, 512, 2, 2, 64)
    narrow, wide = (flash("hopper", replace(shape, head_dim=width), "backward", 2) for width in (64, 128))
    assert narrow.flops == 2 * 5 * 2 * (2 + 4 + 6 + 8) * 64 * 128 * 64
    assert wide.flops == 2 * 5 * 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) * 64 * 64 * 128


def test_thread_blocks_in_step_share_a_stream_larger_than_the_cache() -> None:
    stream = TrafficStream(loads=1320, compulsory=5, working_set=100, heads=4)
    assert stream.memory(replace(H200, l2=100)) == 5
    assert stream.memory(replace(H200, l2=99)) == 1320 / 33
    assert replace(stream, heads=None).memory(replace(H200, l2=99)) == 1320
    assert replace(stream, compulsory=50).memory(replace(H200, l2=99)) == 50


@pytest.mark.parametrize("name", ["d128-causal-16k", "d64-gqa4-causal-32k", "d128-window4k-32k", "d256-causal-16k", "tiny"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bytes_and_flops_are_ordered(name: str, direction: str) -> None:
    """Inputs and outputs ≤ memory with a large cache ≤ memory ≤ memory without a cache ≤ loads; all grow with the length."""
    shape = SHAPES[name]
    for algorithm, count in ALGORITHMS.items():
        work = count(shape, direction, 2)
        sizes = TensorBytes.of(shape, 2)
        tiny, large = (work.memory(replace(H200, l2=l2)) for l2 in (0, 2**50))
        assert 2 * sizes.q + 2 * sizes.k <= large <= work.memory(H200) <= tiny <= work.loads * 1.000001, algorithm
        assert work.flops >= (1 if direction == "forward" else 2) * shape.flops() * 0.999, algorithm
        longer = count(replace(shape, length=2 * shape.length), direction, 2)
        assert longer.loads > work.loads and longer.flops > work.flops and longer.memory(H200) > work.memory(H200)
        assert longer.limit(H200)[1] > work.limit(H200)[1]


def test_bytes_scale_as_in_the_paper(tiles: None) -> None:
    def ratio(count, change: dict, shape: Shape = SHAPES["d64-causal-16k"], chip: Chip | None = None) -> float:
        works = [count(x, "forward", 2) for x in (replace(shape, **change), shape)]
        sizes = [work.loads if chip is None else work.memory(chip) for work in works]
        return sizes[0] / sizes[1]

    double = dict(length=32 * 1024)
    assert ratio(standard, double) == pytest.approx(4, rel=0.02)
    assert ratio(ALGORITHMS["hopper"], double) == pytest.approx(4, rel=0.1)
    assert ratio(ALGORITHMS["hopper"], double, chip=H200) == 2  # the cache removes the repeated loads
    kv = [flash("triton", SHAPES["d64-causal-16k"], "forward", 2).streams[1].loads]
    triton_tiles.HOPPER["forward"] = {256: (256, 64, 8, 3)}  # the fixture's table
    kv.append(flash("triton", SHAPES["d64-causal-16k"], "forward", 2).streams[1].loads)
    assert kv[0] / kv[1] == pytest.approx(2, rel=0.02)  # twice the queries in shared memory, half the loads
    shape, wide = SHAPES["d128-full-16k"], replace(SHAPES["d128-full-16k"], head_dim=256)
    assert roofline.paper_loads(wide, H200, 2) == 4 * roofline.paper_loads(shape, H200, 2)
    assert roofline.paper_loads(shape, replace(H200, shared=2 * H200.shared), 2) == roofline.paper_loads(shape, H200, 2) / 2


def test_the_slower_resource_is_the_limit() -> None:
    chip = replace(H200, bf16_peak=1000.0, fp32_peak=100.0, bandwidth=10.0)
    assert Work(5000, (roofline.moved_once(40),)).limit(chip) == ("compute", 5)
    assert Work(5000, (roofline.moved_once(60),)).limit(chip) == ("memory", 6)
    assert Work(5000, (roofline.moved_once(60),), is_fp32=True).limit(chip) == ("compute", 50)
    assert Work(5000, (roofline.moved_once(50),)).intensity(chip) == 100


def test_the_planner_has_the_same_peaks() -> None:
    for name, key in (("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100")):
        assert CHIPS[name].bf16_peak == flops.PEAKS[key]


def result(**changes) -> dict:
    rows = [
        dict(shape="d128-causal-2k", kernel=kernel, status=status, forward_ms=ms, backward_ms=2 * ms)
        for kernel, status, ms in (
            ("triton", "ok", 0.5),
            ("reference", "ok", 40.0),
            ("sdpa-math", "ok", 4.0),
            ("hopper", "wrong", 0.1),
        )
    ]
    rows[0]["forward_dram_bytes"] = 300 * 2**20
    shape = SHAPES["d128-causal-2k"].__dict__
    fields = {
        "kind": "attention",
        "device": "NVIDIA H200",
        "date": "2026-01-01",
        "dtype": "bf16",
        "shapes": [shape],
        "rows": rows,
    }
    return fields | changes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "attention-x.json"
    path.write_text(json.dumps(result()))
    return path


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_table_of_a_saved_result(saved: Path, no_gpu: None, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["--roofline", "--from", str(saved)]) == 0
    lines = {
        " ".join(line.split()[:2]): line.split()[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")
    }
    assert set(lines) >= {f"{algorithm} {direction}" for algorithm in ALGORITHMS for direction in DIRECTIONS}
    work = ALGORITHMS["triton"](SHAPES["d128-causal-2k"], "forward", 2)
    gflop, loads, memory, counted, intensity, bound, best, measured, share = lines["triton forward"]
    assert float(gflop) == pytest.approx(work.flops / 1e9, rel=1e-3)
    assert (int(loads), int(memory), int(counted)) == (round(work.loads / 2**20), round(work.memory(H200) / 2**20), 300)
    assert float(intensity) == pytest.approx(work.intensity(H200), abs=0.05) and bound == work.limit(H200)[0]
    assert float(best) == pytest.approx(work.limit(H200)[1] * 1000, rel=5e-3) and float(measured) == 0.5
    assert share == f"{work.limit(H200)[1] * 1000 / 0.5:.0%}"
    assert lines["standard forward"][-2] == "4"  # the faster of the two measured kernels
    assert lines["hopper forward"][-2:] == ["-", "-"] and lines["chunked backward"][-2:] == ["-", "-"]


def test_the_saved_results_of_docs_are_shown(no_gpu: None, capsys: pytest.CaptureFixture) -> None:
    assert bench.main(["--roofline", "--shapes", "d128-causal-16k"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200" in out and "d128-causal-16k" in out and "d64" not in out and "ncu: DRAM bytes" in out


def test_the_plot_is_drawn(saved: Path, no_gpu: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    assert bench.main(["--roofline", "--from", str(saved), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_an_error_with_a_remedy(
    saved: Path, no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench.main(["--roofline", "--from", str(saved), "--plot", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err and not Path("x.png").exists()


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--from", "x.json"], "add it"),
        (["--plot"], "add it"),
        (["--roofline", "--from", "no-such.json"], "--save"),
        (["--roofline", "--shapes", "tiny"], "measure them"),
        (["--roofline", "--save"], "belongs to a measurement"),
        (["--roofline", "--only", "triton"], "belongs to a measurement"),
        (["--roofline", "--dtype", "fp32"], "belongs to a measurement"),
        (["--roofline", "--from", *2 * ["docs/results/attention-h200.json"], "--plot", "c.png"], "one picture"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_rejected(argv: list[str], remedy: str, no_gpu: None, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    assert stop.value.code == 2 and remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (dict(device="CPU, x86_64"), "known are NVIDIA H200"),
        (dict(dtype="fp32"), "--dtype bf16"),
        (dict(kind="ring"), "of kind 'ring': pass a result of ringspan bench kernels"),
    ],
    ids=str,
)
def test_unsupported_results_are_rejected(changes: dict, remedy: str, saved: Path, no_gpu: None, capsys) -> None:
    saved.write_text(json.dumps(result(**changes)))
    with pytest.raises(SystemExit):
        bench.main(["--roofline", "--from", str(saved)])
    assert remedy in capsys.readouterr().err
