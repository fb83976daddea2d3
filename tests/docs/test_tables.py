"""docs/tables.py: every table of the documentation equals what its result renders to."""

import importlib.util
import json
import re
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
def repository(tmp_path: Path) -> Path:
    """A checkout with one page and one made-up result."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(PAGE)
    result = {
        "kind": "attention",
        "device": "Made-up GPU",
        "dtype": "bf16",
        "date": "2001-02-03",
        "commit": "abc123",
        "command": "python -m ringspan.kernels.bench",
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


def test_regenerates_and_then_is_fresh(repository: Path, capsys: pytest.CaptureFixture) -> None:
    assert tables.main(["--check"], repository) == 1
    assert "README.md: table attention-h200 is stale" in capsys.readouterr().out
    assert (repository / "README.md").read_text() == PAGE  # --check changes nothing
    assert tables.main([], repository) == 0
    text = (repository / "README.md").read_text()
    assert text.splitlines()[3:8] == [
        "",
        "| TFLOP/s forward / backward | FA4 | TRITON | Ringspan best ÷ best baseline |",
        "|---|---|---|---|",
        "| a | 411 / **593** | **411** / 38.9 | 1.002 / 0.066 |",
        "| b | **2** / **0.0123** | wrong result | – / – |",
    ]
    assert "Made-up GPU, bf16, torch 9.9, 2001-02-03, commit abc123: `python -m ringspan.kernels.bench`" in text
    assert text.startswith("# Title\n") and text.endswith("\nAfter.\n")
    assert tables.main(["--check"], repository) == 0
    tables.main([], repository)
    assert (repository / "README.md").read_text() == text


def test_memory_is_shown_next_to_standard_attention(repository: Path) -> None:
    path = repository / "docs" / "results" / "attention-h200.json"
    result = json.loads(path.read_text())
    assert "MiB" not in tables.attention(result)
    result["rows"] = [row("a", "standard", 10, 20, forward_mib=4096.4, backward_mib=6144)]
    result["rows"] += [row("a", "triton", 40, 50, forward_mib=1, backward_mib=64.6)]
    assert tables.attention(result).splitlines()[4:9] == [
        "",
        "| working memory in MiB, forward / backward | STANDARD | TRITON |",
        "|---|---|---|",
        "| a | 4,096 / 6,144 | **1** / **65** |",
        "| b | – | – |",
    ]


def experiment_log() -> dict:
    """A result of kind "tries" with four rows and two parts that were left out."""
    rows = [
        ("forward", "q in registers", "cycles", False, {"full": "1.013", "4k x 8k": "0.967"}),
        ("a ring's forward", "two kernels a step", "time", True, {"GQA 8k of 4": "1.021, 1.014", "all": "1, 2"}),
        ("forward", "staggered", "time", False, {"full": "1.02 (1.00), 1.04 (1.03)", "16k": "0.98 (1.01)"}),
        ("forward", "two heads (joules: GQA 8k 1.03, 16k 0.9)", "time", True, {"GQA 8k": "1.01", "full": "1.0"}),
    ]
    limits = [
        dict(which="backward", what="without dq's product", gave={"16k": "1.09"}),
        dict(which="backward", what="without the mask", gave={"16k": "1.01", "documents": "1.02"}),
    ]
    names = "which", "what", "unit", "taken", "gave"
    provenance = dict(device="Made-up GPU", dtype="bf16", date="2001", versions={"triton": "9.9"}, source="copied by hand")
    return {"kind": "tries", **provenance, "tries": [dict(zip(names, row, strict=True)) for row in rows], "limits": limits}


def test_an_experiment_log_is_counted_by_area() -> None:
    assert tables.tries(experiment_log()).splitlines()[2:] == [
        "| forward | 3 | 1 | 2 |",
        "| ring, forward | 1 | 1 | 0 |",
        "",
        "Made-up GPU, bf16, triton 9.9, 2001.",
    ]


@pytest.mark.parametrize(
    "mark, lines",
    [
        ("#1", ["| shape | clock cycles, before ÷ after |", "|---|--:|", "| full | 1.013 |", "| 4k × 8k | 0.967 |"]),
        (
            "#2 | first rank | last rank",
            [
                "| shape (time, before ÷ after) | first rank | last rank |",
                "|---|--:|--:|",
                "| GQA 8k, 4 ranks | 1.021 | 1.014 |",
                "| all shapes | 1 | 2 |",
            ],
        ),
        (
            "#3 | staggered | adopted",
            [
                "| shape (time, before ÷ after) | staggered | adopted |",
                "|---|--:|--:|",
                "| full | 1.02, 1.04 | 1.00, 1.03 |",
                "| 16k | 0.98 | 1.01 |",
            ],
        ),
        (
            "#4",
            [
                "| shape | time, before ÷ after | joules, before ÷ after |",
                "|---|--:|--:|",
                "| GQA 8k | 1.01 | 1.03 |",
                "| full | 1.0 | – |",
            ],
        ),
        (
            "#limits-backward",
            [
                "| clock cycles, before ÷ without | 16k | documents |",
                "|---|--:|--:|",
                "| dq matmul | 1.09 | – |",
                "| mask | 1.01 | 1.02 |",
            ],
        ),
    ],
)
def test_an_experiment_is_one_table(repository: Path, mark: str, lines: list[str]) -> None:
    (repository / "docs" / "results" / "log.json").write_text(json.dumps(experiment_log()))
    page = repository / "docs" / "experiments" / "forward.md"
    page.parent.mkdir()
    page.write_text(f"<!-- table: log{mark} -->\n<!-- end -->\n")
    assert tables.main([], repository) == 0
    assert page.read_text().splitlines() == [f"<!-- table: log{mark} -->", "", *lines, "", "<!-- end -->"]
    assert tables.main(["--check"], repository) == 0


def test_cycles_and_joules_are_shown_if_counted() -> None:
    rows = [
        row("a", "triton", 1, 1, forward_mcycles=2.5, backward_mcycles=7.0),
        row("a", "fa4", 1, 1, forward_mcycles=2.4, backward_mcycles=7.5),
        row("b", "triton", 1, 1),
        row("b", "fa4", 1, 1, forward_mcycles=0.1234, backward_mcycles=1),
    ]
    labels = {"fa4": "FA4", "triton": "TRITON"}
    result = {"shapes": [{"name": "a"}, {"name": "b"}], "rows": rows}
    assert tables._cycles_and_joules(result, ["fa4", "triton"], labels)[1:] == [
        "| million clock cycles, forward / backward | FA4 | TRITON |",
        "|---|---|---|",
        "| a | **2.400** / 7.500 | 2.500 / **7.000** |",
        "| b | **0.123** / **1.000** | – |",
    ]
    result["rows"] = [row("a", "fa4", 1, 1, forward_joules=0.51234, backward_joules=1.2), *rows[2:3]]
    assert tables._cycles_and_joules(result, ["fa4", "triton"], labels)[1:] == [
        "| joules, forward / backward | FA4 | TRITON |",
        "|---|---|---|",
        "| a | **0.512** / **1.2** | – |",
        "| b | – | – |",
    ]
    result["rows"] = rows[2:3]
    assert tables._cycles_and_joules(result, ["fa4", "triton"], labels) == []


def test_a_rehearsal_shows_the_share_of_each_rank(repository: Path) -> None:
    result = json.loads((repository / "docs" / "results" / "attention-h200.json").read_text()) | {
        "kind": "rehearsal",
        "ranks": 2,
    }
    shares = [(None, 1.0, 1.0), (0, 0.9123, 0.9), (1, 0.95, 0.9876)]
    result["rows"] = [
        {"setting": name, "rank": rank, "both_tflops": 601.4, "both_share": share}
        | ({"cycles_share": cycles_share} if name == "8k" else {})
        for name in ("8k", "32k")
        for rank, share, cycles_share in shares
    ]
    lines = tables.rehearsal(result).splitlines()
    assert lines[:4] == [
        "| 2 ranks: share of the kernel alone by time (by clock cycles) | alone, TFLOP/s | rank 0 | rank 1 |",
        "|---|---|---|---|",
        "| 8k | 601 | 91.2% (90.0%) | 95.0% (98.8%) |",
        "| 32k | 601 | 91.2% | 95.0% |",
    ]


def test_mechanisms_have_a_row_each(repository: Path) -> None:
    result = json.loads((repository / "docs" / "results" / "attention-h200.json").read_text())
    ring = dict(forward_ms=1.234, both_ms=5.678, forward_share=0.9123, both_share=0.95)
    first = {"": ring, "a": dict(forward_ms=2, both_ms=6, forward_ms_gain=1.0104, both_ms_gain=0.9996), "alone": ring}
    second = {"": ring | dict(host_forward_us=512.0, host_backward_us=1024.0), "a": {"status": "error"}}
    result |= {"commit": "0123456", "ranks": 4, "rehearsed": True, "shapes": {"32k": {"rows": first}, "8k": {"rows": second}}}
    assert tables.mechanisms(result).splitlines()[:6] == [
        "| rehearsed, 4 ranks: forward, forward + backward | 32k | 8k |",
        "|---|--:|--:|",
        "| a | 1.010, 1.000 | – |",
        "| share of the kernel alone | 91.2%, 95.0% | 91.2%, 95.0% |",
        "| ms | 1.23, 5.68 | 1.23, 5.68 |",
        "| ms of the host: forward, backward | – | 0.51, 1.02 |",
    ]
    rows = {"": ring, "a": dict(both_ms=6, forward_mcycles_gain=1.02, both_mcycles_gain=1.01)}
    assert tables.mechanisms(result | {"queued": True, "shapes": {"8k": {"rows": rows}}}).splitlines()[:3] == [
        "| rehearsed, 4 ranks: forward, forward + backward, clock cycles | 8k |",
        "|---|--:|",
        "| a | 1.020, 1.010 |",
    ]


def test_power_and_utilisation_are_shown_if_measured() -> None:
    power = dict(forward_watts=695.6, forward_watts_limit=700.0, forward_held_down=1.0)
    power |= dict(backward_watts=646.2, backward_watts_limit=700.0, backward_held_down=0.75)
    busy = dict(forward_busy={"tensor cores": 0.888, "L2": 0.441}, forward_dram_bytes=2**29, forward_longest_share=0.999)
    result = {"shapes": [{"name": "a"}], "rows": [row("a", "fa4", 1, 1, **power), row("a", "triton", 1, 1, **busy)]}
    assert tables._cycles_and_joules(result, ["fa4"], {"fa4": "FA4"})[-1] == (
        "Power: 646 to 696 W. The 700 W limit throttled the clock 75% to 100% of the time."
    )
    assert tables._utilisation(result, {"triton": "TRITON"})[1:] == [
        "| utilisation (Nsight Compute) | kernel | tensor cores | L2 | DRAM traffic, GiB | longest kernel, share of time |",
        "|---|---|--:|--:|--:|--:|",
        "| a forward | TRITON | 89% | 44% | 0.50 | 99.9% |",
    ]
    assert tables._utilisation(result | {"rows": result["rows"][:1]}, {}) == []


def test_time_per_visible_tile_is_relative_to_plain_causal() -> None:
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
    lines = tables._time_per_tile({"rows": rows, "shapes": shapes})
    assert lines[3:] == ["| TRITON | window | 50 | 1.20 / 1.00 | plain |"]
    assert not tables._time_per_tile({"rows": rows[:2], "shapes": shapes})


def test_a_number_typed_by_hand_is_stale(repository: Path, capsys: pytest.CaptureFixture) -> None:
    (repository / "docs" / "page.md").write_text(PAGE)
    tables.main([], repository)
    page = repository / "docs" / "page.md"
    page.write_text(page.read_text().replace("593", "953"))
    assert tables.main(["--check"], repository) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("docs/page.md: table attention-h200 is stale")


@pytest.mark.parametrize(
    "page, message",
    [
        (
            PAGE.replace("h200", "h9000"),
            "table=attention-h9000: docs/results has no such file, it has attention-h200; measure it",
        ),
        (PAGE.replace("<!-- end -->", ""), "a table mark has no end or no name; write"),
        (PAGE.replace("<!-- end -->", "") + PAGE, "table=attention-h200: the region has no end; close it"),
        (PAGE.replace("attention-h200", "odd"), "table=odd: no function renders kind='odd', known are attention"),
        (PAGE.replace("h200", "h200#1"), "part=1: a result of kind='attention' has one part, #speed, without columns"),
        (PAGE.replace("attention-h200", "log#5"), "part=5: the log has no such row; write 1 to 4, or one of limits-backward"),
        (PAGE.replace("attention-h200", "log#2 | one | two | three"), "columns=one | two | three: the log has 2 figures"),
    ],
)
def test_errors_say_what_works(repository: Path, page: str, message: str, capsys: pytest.CaptureFixture) -> None:
    (repository / "docs" / "results" / "odd.json").write_text('{"kind": "odd"}')
    (repository / "docs" / "results" / "log.json").write_text(json.dumps(experiment_log()))
    if "h9000" in message:
        for name in ("odd", "log"):
            (repository / "docs" / "results" / f"{name}.json").unlink()
    (repository / "README.md").write_text(page)
    assert tables.main([], repository) == 1
    assert message in capsys.readouterr().err
    assert (repository / "README.md").read_text() == page


def test_marks_within_a_line_are_prose(repository: Path) -> None:
    text = "A region starts with `<!-- table: NAME -->` and stops at `<!-- end -->`.\n"
    assert tables.update(text, repository / "docs" / "results") == (text, [])


def test_a_missing_optional_result_is_not_measured_yet(repository: Path) -> None:
    result = {
        "kind": "train",
        "device": "Made-up GPU",
        "dtype": "bf16",
        "date": "2001-02-03",
        "command": "ringspan results runs/a",
        "versions": {"torch": "9.9"},
        "plot": "docs/loss.png",
        "rows": [
            {
                "model": "big", "batch": 1, "length": 131072, "ranks": 4, "split": {"data": 1, "ring": 4, "ulysses": 1},
                "zero": 1, "tokens_per_s": 45710.2, "tflops_3.5x": 428.3, "tflops_3x": 377.1,
                "mfu_3.5x": 0.43306, "mfu_3x": 0.3813,
                "gib": 18.7014, "planned_gib": 18.72, "seconds": 2.8675, "planned_seconds": 2.911,
                "shares": {"attention": 0.75, "products": 0.125, "other": 0.125},
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
    (repository / "README.md").write_text("<!-- table: train-h200 if measured -->\n<!-- end -->\n")
    assert tables.main([], repository) == 0
    marks = "<!-- table: train-h200 if measured -->\n\n{}\n\n<!-- end -->\n"
    assert (repository / "README.md").read_text() == marks.format("*Not measured yet.*")
    assert tables.main(["--check"], repository) == 0
    (repository / "docs" / "results" / "train-h200.json").write_text(json.dumps(result))
    assert tables.main(["--check"], repository) == 1
    assert tables.main([], repository) == 0
    lines = (repository / "README.md").read_text().splitlines()
    assert lines[0] == "<!-- table: train-h200 if measured -->" and lines[-1] == "<!-- end -->"
    big = "| big, 1 × 131,072 tokens, 4 ranks: ring 4, ZeRO 1 | 45,710 | 428 (377) | 43.3% (38.1%) | 18.7, 18.7 "
    big += "| 2.87, 2.91 | 12.5% |"
    assert big in lines and "| small, 8 × 512 tokens, 1 rank: no split, ZeRO 0 | 9 | 0.0123 (0.01) | – | – | – | – |" in lines
    assert "| split | one and four | 200 | 0.00045 | 0.0012 | 2.346 |" in lines
    assert "[Loss curves](docs/loss.png). Made-up GPU, bf16" in lines[-3]
    assert tables.main(["--check"], repository) == 0
    for page, target in ("docs/page.md", "loss.png"), ("docs/experiments/page.md", "../loss.png"):  # relative to the page
        path = repository / page
        path.parent.mkdir(exist_ok=True)
        path.write_text("<!-- table: train-h200 -->\n<!-- end -->\n")
        assert tables.main([], repository) == 0 and f"[Loss curves]({target})." in path.read_text()


def test_our_own_pages_are_up_to_date(capsys: pytest.CaptureFixture) -> None:
    names = {page.relative_to(ROOT).as_posix() for page in tables.pages(ROOT)}
    assert {"README.md", "docs/performance.md", "docs/tiles.md", "docs/experiments/ring.md"} <= names
    assert tables.main(["--check"]) == 0, capsys.readouterr()


def test_every_recorded_experiment_is_in_the_log() -> None:
    log = json.loads((ROOT / "docs" / "results" / "tries-h200.json").read_text())
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "experiments").glob("*.md"))
    parts = [match["part"] for match in tables.REGION.finditer(text) if match["name"] == "tries-h200" and match["part"]]
    areas = {f"limits-{row['which']}" for row in log["limits"]}
    assert sorted(parts) == sorted([*(str(number) for number in range(1, len(log["tries"]) + 1)), *areas])


def test_the_index_of_the_log_lists_every_entry() -> None:
    folder = ROOT / "docs" / "experiments"
    index = (folder / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"^- \[(.+)\]\((\S+\.md)#(\S+)\)$", index, re.MULTILINE)
    entries = []
    for name in dict.fromkeys(page for _, page, _ in links):
        for title in re.findall(r"^## (.+)$", (folder / name).read_text(encoding="utf-8"), re.MULTILINE):
            entries.append((title, name, re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")))  # as GitHub anchors it
    assert links == entries
    assert all(page.name in index for page in folder.glob("*.md") if page.name != "README.md")
