"""The ring benchmark on two gloo ranks: results, errors, shares, interrupted runs, and the timeline."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringspan import Mesh
from ringspan.kernels.bench import clock_cycles
from ringspan.parallel.bench import __main__ as bench
from ringspan.parallel.bench import baselines, timeline
from ringspan.parallel.bench.baselines import BenchContext, Setting
from ringspan.parallel.bench.timing import Timing, speeds
from ringspan.parallel.layout import Layout
from ringspan.parallel.transport.base import is_transfer
from tests.docs.test_tables import tables
from tests.parallel.helpers import jobs
from tests.parallel.helpers.pool import Failed


def test_benchmark_completes_on_two_ranks(tmp_path: Path, pools) -> None:
    path = tmp_path / "ring.json"
    argv = ["--device", "cpu", "--tokens", "24", "--heads", "4/2", "--head-dim", "16", "--rounds", "2", "--rep", "1"]
    assert pools(2)(functools.partial(jobs.run_bench, [*argv, "--json", str(path)])) == [0, 0]
    result = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert result["kind"] == "ring" and result["ranks"] == 2 and result["versions"]["torch"]
    assert str(tmp_path) not in json.dumps(result)
    rows = {row["name"]: row for row in result["rows"]}
    assert {"alone", "ring-zigzag-p2p", "ring-striped-all_gather", "ulysses", "ulysses-sdpa-flash"} <= set(rows)
    for row in rows.values():
        assert row["status"] == "ok", row
        assert 0 < row["both_tflops_min"] <= row["both_tflops"] <= row["both_tflops_max"]
        assert 0 < row["both_share_min"] <= row["both_share"] <= row["both_share_max"]
        assert row["error"] < 1e-5
    assert rows["alone"]["both_share"] == 1
    table = tables.ring(result)
    assert (
        "| 24-h4-2-d16 |" in table
        and "Ringspan ring, zigzag, p2p" in table
        and f"({rows['ulysses']['both_share']:.1%})" in table
    )


def test_windows_sinks_and_packed_documents(tmp_path: Path, pools) -> None:
    """The kernel alone has the same mask and sinks. A baseline without them says so, and torch's refusals are torch's own."""
    path = tmp_path / "ring.json"
    argv = (
        "--device cpu --tokens 40 --heads 4/2 --head-dim 24 --v-head-dim 16 --window 9 --sinks --documents 7 --rounds 1 --rep 1"
    )
    names = "alone", "ring-contiguous-p2p", "ring-zigzag-p2p", "ulysses", "ulysses-sdpa-flash", "torch-cp-alltoall"
    assert pools(2)(
        functools.partial(jobs.run_bench, [*argv.split(), "--rep", "1", "--only", ",".join(names), "--json", str(path)])
    ) == [0, 0]
    result = json.loads(path.read_text())
    assert "--v-head-dim 16 --window 9 --sinks --documents 7 --only" in result["command"]
    assert result["settings"][0]["name"] == "40-h4-2-d24-v16-window9-sinks-docs7" and result["settings"][0]["documents"] == 7
    rows = {row["name"]: row for row in result["rows"]}
    for name in names[:4]:
        assert rows[name]["status"] == "ok" and rows[name]["error"] < 1e-5 and rows[name]["both_share"] > 0
    assert rows["ulysses-sdpa-flash"]["status"] == "skipped" and "sinks" in rows["ulysses-sdpa-flash"]["note"]
    refused = rows["torch-cp-alltoall"]
    assert refused["status"] == "refused" and "sinks: TypeError, " in refused["note"] and "attn_mask: " in refused["note"]
    table = tables.ring(result)
    assert "| refused |" in table and f"torch context_parallel, cuDNN, alltoall: {refused['note']}" in table


@pytest.mark.parametrize("dropped", ["mask", "sinks"])
def test_a_wrong_ring_is_not_timed(dropped: str, tmp_path: Path, pools) -> None:
    path = tmp_path / "ring.json"
    assert pools(2)(_WrongRing(path, dropped)) == [1, 1]
    row = json.loads(path.read_text())["rows"][1]
    assert row["status"] == "wrong" and "both_tflops" not in row


def test_shares_of_time_and_of_cycles() -> None:
    """A ring with half of the work, as slow at half the clock."""
    alone, ring = Timing(1.0, 4.0, 2e9, 10.0, 40.0), Timing(1.0, 4.0, 1e9, 5.0, 20.0, both_host=3.0)
    row = speeds([ring, ring._replace(both=2.0)], [alone, alone])
    assert row["forward_share"] == 0.5 and row["both_share_min"] == 0.5 and row["both_share_max"] == 1
    assert row["both_cycles_share"] == 1 and row["both_mcycles"] == 20 and row["both_tflops_min"] == 3.5 / 4
    assert row["both_host_ms"] == 3 and row["both_host_share"] == 1  # of the median of 4 and 2 ms
    bare = speeds([Timing(*ring[:3])], [Timing(*alone[:3])])
    assert "both_cycles_share" not in bare and "both_host_share" not in bare


@pytest.mark.parametrize("fails", [False, True])
def test_cycles_are_those_of_the_rank_with_the_most(fails: bool, tmp_path: Path, pools) -> None:
    """A rank that cannot count raises an error on all ranks, so that no rank waits for it."""
    path = tmp_path / "ring.json"
    assert pools(2)(_CyclesByRank(path, fails)) == [0, 0]
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    if fails:
        assert all(row["status"] == "failed" and "could not count" in row["note"] for row in rows.values())
    else:
        assert rows["alone"]["both_mcycles"] == rows["ring-zigzag-p2p"]["both_mcycles"] == 2
        assert rows["ring-zigzag-p2p"]["both_cycles_share"] > 0


class _CyclesByRank:
    """A run in which rank r counts r + 1 million cycles, or in which the last rank cannot count."""

    def __init__(self, path: Path, fails: bool) -> None:
        self.path, self.fails = path, fails

    def __call__(self) -> int:
        original, rank = clock_cycles.cycles_of, dist.get_rank()

        def count(call: Callable[[], object], repeats: int, device: torch.device) -> float:
            if self.fails and rank == 1:
                raise RuntimeError("no multiprocessor was read")
            return 1e6 * (rank + 1)

        clock_cycles.cycles_of = count
        try:
            mesh = Mesh(ring=2)
            context = BenchContext(torch.device("cpu"), torch.float32, 2, mesh, Mesh(ulysses=2), "auto")
            rows = bench.measure(Setting(24, 2, 1, 16), ["alone", "ring-zigzag-p2p"], context, 1, 1, cycles=True)
        finally:
            clock_cycles.cycles_of = original
        if rank == 0:
            self.path.write_text(json.dumps(rows))
        return 0


class _WrongRing:
    """A run with a ring that drops its mask or its sinks."""

    def __init__(self, path: Path, dropped: str) -> None:
        self.path, self.dropped = path, dropped

    def __call__(self) -> int:
        original = baselines.context_attention

        def wrong_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, **options: Any) -> object:
            if self.dropped == "mask":
                return original(q, k, v, None, **options)
            return original(q, k, v, mask, **options | dict(sinks=options["sinks"] - 100))  # still differentiable

        baselines.context_attention = wrong_ring
        try:
            argv = "--device cpu --tokens 24 --heads 2/1 --head-dim 16 --rounds 1 --rep 1 --only alone,ring-zigzag-p2p --sinks"
            return bench.main([*argv.split(), "--json", str(self.path)])
        finally:
            baselines.context_attention = original


def test_an_interrupted_run_keeps_its_results(tmp_path: Path, pools) -> None:
    path = tmp_path / "ring.json"
    with pytest.raises(Failed, match="interrupted"):
        pools(2)(_InterruptedRun(path))
    result = json.loads(path.read_text())
    assert [setting["name"] for setting in result["settings"]] == ["24-h2-1-d16"]
    assert [row["status"] for row in result["rows"]] == ["ok"]


class _InterruptedRun:
    """A run that fails in its second setting."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        original = bench.measure

        def measure(setting: Setting, *rest) -> list:
            if setting.tokens == 32:
                raise RuntimeError("interrupted")
            return original(setting, *rest)

        bench.measure = measure
        try:
            argv = "--device cpu --tokens 24 32 --heads 2/1 --head-dim 16 --rounds 1 --rep 1 --only ring-zigzag-p2p"
            return bench.main([*argv.split(), "--json", str(self.path)])
        finally:
            bench.measure = original


def test_one_rank_alone_costs_as_much_as_a_share() -> None:
    for tokens in (2048, 8192, 131072):
        for ranks in (2, 4, 8):
            setting = Setting(tokens, 16, 4, 128)
            share = setting.single_rank_shape(ranks).flops() / (setting.global_shape(ranks).flops() / ranks)
            assert 0.85 < share <= 1
    window = Setting(8192, 16, 4, 128, window=1024)
    assert window.single_rank_shape(4).flops() == pytest.approx(window.global_shape(4).flops() / 4, rel=0.07)
    assert window.name == "8k-h16-4-d128-window1024"
    mla = Setting(8192, 16, 16, 192, v_head_dim=128)
    assert (
        mla.name == "8k-h16-16-d192-v128" and mla.global_shape(2).flops() == Setting(8192, 16, 16, 160).global_shape(2).flops()
    )


def test_packed_documents_are_uneven_and_their_visible_pairs_are_counted() -> None:
    setting = Setting(96, 4, 2, 16, window=20, documents=5)
    shape = setting.global_shape(2)
    assert shape.documents is not None and len({*shape.documents}) > 2 and min(shape.documents) >= 1
    assert sum(shape.documents) == 192 and shape == setting.global_shape(2) == setting.single_rank_shape(2)
    assert shape.pairs() == shape.visible(torch.arange(192)).sum() == sum(Layout("zigzag", 192, 2).work(setting.mask(192)))
    assert baselines.document_lengths(4, 4) == (1, 1, 1, 1) and baselines.document_lengths(1, 9) == (9,)


@pytest.mark.parametrize(
    "name, in_ring, elsewhere",
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", True, True),
        ("Memcpy PtoP (Device -> Device)", True, True),
        ("Memcpy DtoD (Device -> Device)", True, False),
        ("void c10d::symmetric_memory::all_reduce_kernel(float*)", True, True),
        ("Memcpy HtoD (Pinned -> Device)", False, False),
        ("_backward_kernel", False, False),
    ],
)
def test_names_of_transfers(name: str, in_ring: bool, elsewhere: bool) -> None:
    assert (is_transfer(name, in_ring=True), is_transfer(name, in_ring=False)) == (in_ring, elsewhere)


def test_the_timeline_has_compute_and_transfers(tmp_path: Path, pools) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ring.png"
    (all_counts, _), _ = pools(2)(jobs.trace_ring, str(path), Setting(256, 2, 1, 32), "ring-zigzag-p2p")
    for counts in all_counts:
        assert counts["compute"] > 10 and counts["transfer"] >= 3  # K/V of the forward, K/V of the backward, gradients
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_legend_of_the_timeline_covers_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    spans = [("compute", 0.0, 900.0), ("transfer", 100.0, 1000.0)]
    timeline.draw([spans] * 4, tmp_path / "ring.png", "a ring of four")
    (figure,) = figures
    axis, legend = figure.axes[0].get_window_extent(), figure.legends[0].get_window_extent()
    assert legend.width > 0 and not legend.overlaps(axis) and figure.bbox.y0 <= legend.y0
    monkeypatch.undo()
    plt.close(figure)


@pytest.mark.parametrize(
    "argv, remedy",
    [
        (["--only", "telepathy"], "the candidates are alone, ring-contiguous-auto"),
        (["--tokens", "many"], "8192 or 8k"),
        (["--heads", "16"], "16/4"),
        (["--rounds", "0"], "at least 1"),
        (["--documents", "0"], "1 to 256"),
        (["--tokens", "8", "4", "--documents", "5"], "1 to 4"),
        (["--json", "no/such/folder/x.json"], "make it first, or pass another path with --json"),
        (["--trace", "ring.png", "--save"], "without --trace"),
        (["--cycles"], "leave it out here"),
        ([], "torchrun"),
    ],
)
def test_bad_options_name_a_remedy(
    argv: list[str], remedy: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", *argv])
    assert remedy in capsys.readouterr().err
