"""Tables in the documentation are what the results say."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs" / "tables.py")
assert spec and spec.loader
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

PAGE = "# Title\n\n<!-- table: attention-h200 -->\n<!-- end -->\n\nAfter.\n"


def row(shape: str, kernel: str, forward: float, backward: float, **more) -> dict:
    ours = kernel == "triton"
    return {"shape": shape, "kernel": kernel, "label": kernel.upper(), "ours": ours, "status": "ok", "note": ""} | (
        {"forward_tflops": forward, "backward_tflops": backward} | more
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(PAGE)
    result = {
        "kind": "attention",
        "device": "Made-up GPU",
        "dtype": "bf16",
        "date": "2001-02-03",
        "commit": "abc123",
        "command": "python -m kernels.bench",
        "versions": {"torch": "9.9"},
        "shapes": [{"name": "a"}, {"name": "b"}],
        "rows": [
            row("a", "triton", 411.4, 38.88),
            row("a", "fa4", 410.6, 593),
            row("a", "flex", 0, 0, status="skipped"),
            row("b", "triton", 1, 1, status="wrong"),
            row("b", "fa4", 2, 0.01234),
        ],
    }
    (tmp_path / "docs" / "results" / "attention-h200.json").write_text(json.dumps(result))
    return tmp_path


def test_regenerates_and_then_is_fresh(house: Path, capsys: pytest.CaptureFixture) -> None:
    assert tables.main(["--check"], house) == 1
    assert "README.md: table attention-h200 is stale" in capsys.readouterr().out
    assert (house / "README.md").read_text() == PAGE  # --check changes nothing
    assert tables.main([], house) == 0
    text = (house / "README.md").read_text()
    assert text.splitlines()[3:8] == [
        "",
        "| TFLOP/s forward / backward | FA4 | TRITON | our best ÷ the best rival |",
        "|---|---|---|---|",
        "| a | 411 / **593** | **411** / 38.9 | 1.002 / 0.066 |",
        "| b | **2** / **0.0123** | wrong result | – / – |",
    ]
    assert "Made-up GPU, bf16, torch 9.9, 2001-02-03, commit abc123: `python -m kernels.bench`" in text
    assert text.startswith("# Title\n") and text.endswith("\nAfter.\n")
    assert tables.main(["--check"], house) == 0
    tables.main([], house)
    assert (house / "README.md").read_text() == text


def test_memory_is_shown_beside_standard_attention(house: Path) -> None:
    path = house / "docs" / "results" / "attention-h200.json"
    result = json.loads(path.read_text())
    assert "MiB" not in tables.attention(result)
    result["rows"] = [row("a", "standard", 10, 20, forward_mib=4096.4, backward_mib=6144)]
    result["rows"] += [row("a", "triton", 40, 50, forward_mib=1, backward_mib=64.6)]
    assert tables.attention(result).splitlines()[4:9] == [
        "",
        "| MiB needed, forward / backward | STANDARD | TRITON |",
        "|---|---|---|",
        "| a | 4,096 / 6,144 | **1** / **65** |",
        "| b | – | – |",
    ]


def test_tries_say_what_each_gave() -> None:
    tried = dict(which="forward", what="q in registers", unit="cycles", taken=False, gave={"full": "1.013", "window": "0.967"})
    left_out = dict(which="backward", what="without dq", gave={"16k": "1.09"})
    about = dict(device="Made-up GPU", dtype="bf16", date="2001", versions={"triton": "9.9"}, source="copied by hand")
    text = tables.tries(about | dict(tries=[tried], limits=[left_out]))
    assert "| forward: q in registers | no | cycles | full 1.013, window 0.967 |" in text
    assert "| backward, without dq | 16k 1.09 |" in text
    assert text.endswith("Made-up GPU, bf16, triton 9.9, 2001, copied by hand.")


def test_cycles_and_joules_are_shown_where_they_were_counted() -> None:
    rows = [
        row("a", "triton", 1, 1, forward_mcycles=2.5, backward_mcycles=7.0),
        row("a", "fa4", 1, 1, forward_mcycles=2.4, backward_mcycles=7.5),
        row("b", "triton", 1, 1),
        row("b", "fa4", 1, 1, forward_mcycles=0.1234, backward_mcycles=1),
    ]
    labels = {"fa4": "FA4", "triton": "TRITON"}
    result = {"shapes": [{"name": "a"}, {"name": "b"}], "rows": rows}
    assert tables._counted(result, ["fa4", "triton"], labels)[1:] == [
        "| million cycles forward / backward | FA4 | TRITON |",
        "|---|---|---|",
        "| a | **2.400** / 7.500 | 2.500 / **7.000** |",
        "| b | **0.123** / **1.000** | – |",
    ]
    result["rows"] = [row("a", "fa4", 1, 1, forward_joules=0.51234, backward_joules=1.2), *rows[2:3]]
    assert tables._counted(result, ["fa4", "triton"], labels)[1:] == [
        "| joules forward / backward | FA4 | TRITON |",
        "|---|---|---|",
        "| a | **0.512** / **1.2** | – |",
        "| b | – | – |",
    ]
    result["rows"] = rows[2:3]
    assert tables._counted(result, ["fa4", "triton"], labels) == []


def test_what_ranks_of_a_rehearsal_would_lose(house: Path) -> None:
    result = json.loads((house / "docs" / "results" / "attention-h200.json").read_text()) | {"kind": "rehearsal", "ranks": 2}
    shares = [(None, 1.0, 1.0), (0, 0.9123, 0.9), (1, 0.95, 0.9876)]
    result["rows"] = [
        {"setting": name, "rank": rank, "both_tflops": 601.4, "both_share": share}
        | ({"cycles_share": its} if name == "8k" else {})
        for name in ("8k", "32k")
        for rank, share, its in shares
    ]
    lines = tables.rehearsal(result).splitlines()
    assert lines[:4] == [
        "| 2 ranks, share of alone (in cycles) | alone, TFLOP/s | rank 0 | rank 1 |",
        "|---|---|---|---|",
        "| 8k | 601 | 91.2% (90.0%) | 95.0% (98.8%) |",
        "| 32k | 601 | 91.2% | 95.0% |",
    ]


def test_why_a_clock_was_low_and_what_was_busy() -> None:
    power = dict(forward_watts=695.6, forward_watts_limit=700.0, forward_held_down=1.0)
    power |= dict(backward_watts=646.2, backward_watts_limit=700.0, backward_held_down=0.75)
    busy = dict(forward_busy={"tensor cores": 0.888, "L2": 0.441}, forward_dram_bytes=2**29, forward_longest_share=0.999)
    result = {"shapes": [{"name": "a"}], "rows": [row("a", "fa4", 1, 1, **power), row("a", "triton", 1, 1, **busy)]}
    assert tables._counted(result, ["fa4"], {"fa4": "FA4"})[-1] == (
        "They took 646 to 696 W. The limit of 700 W held the clock down 75% to 100% of the time."
    )
    assert tables._busy(result, {"triton": "TRITON"})[1:] == [
        "| busy, by Nsight Compute | | tensor cores | L2 | GiB of DRAM | the longest kernel's share |",
        "|---|---|--:|--:|--:|--:|",
        "| a forward | TRITON | 89% | 44% | 0.50 | 99.9% |",
    ]
    assert tables._busy(result | {"rows": result["rows"][:1]}, {}) == []


def test_what_a_visible_tile_costs() -> None:
    shape = dict(batch=1, causal=True, window=None, documents=None, head_dim=64, heads=4, kv_heads=4)
    rows = [
        row("short", "triton", 1, 1, tiles=10, forward_ms=9.0, backward_ms=9.0),
        row("plain", "triton", 1, 1, tiles=100, forward_ms=10.0, backward_ms=20.0),
        row("window", "triton", 1, 1, tiles=50, forward_ms=6.0, backward_ms=10.0),
        row("window", "fa4", 1, 1, tiles=50, forward_ms=6.0, backward_ms=10.0),
        row("wide", "triton", 1, 1, tiles=50, forward_ms=6.0, backward_ms=10.0),
        row("groups", "triton", 1, 1, tiles=1000, forward_ms=1.0, backward_ms=1.0),
    ]
    shapes = [
        shape | dict(name="short"),
        shape | dict(name="plain"),
        shape | dict(name="window", window=4096),
        shape | dict(name="wide", window=4096, head_dim=128),
        shape | dict(name="groups", kv_heads=1),
    ]
    lines = tables._each_tile({"rows": rows, "shapes": shapes})
    assert lines[3:] == ["| TRITON | window | 50 | 1.20 / 1.00 × plain's |"]
    assert not tables._each_tile({"rows": rows[:2], "shapes": shapes})


def test_a_number_typed_by_hand_is_stale(house: Path, capsys: pytest.CaptureFixture) -> None:
    (house / "docs" / "page.md").write_text(PAGE)
    tables.main([], house)
    page = house / "docs" / "page.md"
    page.write_text(page.read_text().replace("593", "953"))
    assert tables.main(["--check"], house) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("docs/page.md: table attention-h200 is stale")


@pytest.mark.parametrize(
    "page, message",
    [
        (PAGE.replace("h200", "h9000"), "no docs/results/attention-h9000.json (there are: attention-h200)"),
        (PAGE.replace("<!-- end -->", ""), "correct it"),
        (PAGE.replace("<!-- end -->", "") + PAGE, "has no end"),
        (PAGE.replace("attention-h200", "odd"), "kind 'odd', known are attention"),
    ],
)
def test_errors_name_a_remedy(house: Path, page: str, message: str, capsys: pytest.CaptureFixture) -> None:
    (house / "docs" / "results" / "odd.json").write_text('{"kind": "odd"}')
    if "h9000" in message:
        (house / "docs" / "results" / "odd.json").unlink()
    (house / "README.md").write_text(page)
    assert tables.main([], house) == 1
    assert message in capsys.readouterr().err
    assert (house / "README.md").read_text() == page


def test_marks_within_a_line_are_prose(house: Path) -> None:
    text = "A region starts with `<!-- table: NAME -->` and stops at `<!-- end -->`.\n"
    assert tables.update(text, house / "docs" / "results") == (text, [])


def test_a_table_that_is_not_measured_yet_says_so_until_it_is(house: Path) -> None:
    result = {
        "kind": "train",
        "device": "Made-up GPU",
        "dtype": "bf16",
        "date": "2001-02-03",
        "command": "python -m trainer.results runs/a",
        "versions": {"torch": "9.9"},
        "plot": "docs/loss.png",
        "rows": [
            {
                "model": "big", "batch": 1, "length": 131072, "ranks": 4, "split": {"data": 1, "ring": 4, "ulysses": 1},
                "zero": 1, "tokens_per_s": 45710.2, "tflops_3.5x": 428.3, "tflops_3x": 377.1,
                "mfu_3.5x": 0.43306, "mfu_3x": 0.3813,
                "gib": 18.7014, "planned_gib": 18.72, "shares": {"attention": 0.75, "products": 0.125, "other": 0.125},
            },
            {
                "model": "small", "batch": 8, "length": 512, "ranks": 1, "split": {"data": 1, "ring": 1, "ulysses": 1},
                "zero": 0, "tokens_per_s": 9.0, "tflops_3.5x": 0.01234, "tflops_3x": 0.01,
            },
        ],
        "differences": [
            {
                "differ_in": "split", "splits": ["one", "four"], "steps": 200,
                "mean": 0.00045, "largest": 0.00123, "loss": 2.3456,
            },
        ],
    }  # fmt: skip
    (house / "README.md").write_text("<!-- table: train-h200 if measured -->\n<!-- end -->\n")
    assert tables.main([], house) == 0
    marks = "<!-- table: train-h200 if measured -->\n\n{}\n\n<!-- end -->\n"
    assert (house / "README.md").read_text() == marks.format("*Not measured yet.*")
    assert tables.main(["--check"], house) == 0
    (house / "docs" / "results" / "train-h200.json").write_text(json.dumps(result))
    assert tables.main(["--check"], house) == 1
    assert tables.main([], house) == 0
    lines = (house / "README.md").read_text().splitlines()
    assert lines[0] == "<!-- table: train-h200 if measured -->" and lines[-1] == "<!-- end -->"
    big = "| big, 1 × 131,072 tokens on 4: ring 4, ZeRO 1 | 45,710 | 428 (377) | 43.3% (38.1%) | 18.7, 18.7 | 12.5% |"
    assert big in lines and "| small, 8 × 512 tokens on 1: no split, ZeRO 0 | 9 | 0.0123 (0.01) | – | – | – |" in lines
    assert "| split | one and four | 200 | 0.00045 | 0.0012 | 2.346 |" in lines
    assert "[The losses, drawn](docs/loss.png). Made-up GPU, bf16" in lines[-3]
    assert tables.main(["--check"], house) == 0
    page = house / "docs" / "page.md"  # whose links begin in docs
    page.write_text("<!-- table: train-h200 -->\n<!-- end -->\n")
    assert tables.main([], house) == 0 and "[The losses, drawn](loss.png)." in page.read_text()


def test_our_own_pages_are_up_to_date(capsys: pytest.CaptureFixture) -> None:
    pages = [page for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if page.is_file()]
    if not any(tables.OPENING.search(page.read_text(encoding="utf-8")) for page in pages):
        pytest.skip("no page has a table yet")
    assert tables.main(["--check"]) == 0, capsys.readouterr()
