"""Numbers in the documentation come from docs/results, never from a keyboard.

    python docs/tables.py              # rewrites README.md and docs/*.md
    python docs/tables.py --check      # exits 1 and names each region that is not what the results say

A region stands between two lines of its own. NAME is the file docs/results/NAME.json, which a benchmark wrote with --save:

    <!-- table: NAME -->
    <!-- end -->

`<!-- table: NAME if measured -->` says that nothing was measured yet until there is such a file.

How a result becomes markdown depends on its field "kind": one function each in KINDS.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REGION = re.compile(
    r"^<!-- table: (?P<name>\S+)(?P<maybe> if measured)? -->\n(?P<body>.*?)^<!-- end -->$", re.DOTALL | re.MULTILINE
)
OPENING = re.compile(r"^<!-- table: .*-->$", re.MULTILINE)
Result = dict[str, Any]


def attention(result: Result) -> str:
    """Forward / backward TFLOP/s, a row a shape, a column a kernel, then our best by the best rival; the best is bold."""
    rows = {(row["shape"], row["kernel"]): row for row in result["rows"]}
    measured = {row["kernel"]: row["label"] for row in result["rows"] if row["status"] in ("ok", "wrong")}
    ours = {row["kernel"] for row in result["rows"] if row["ours"]}
    columns = sorted(measured, key=lambda kernel: kernel in ours)  # rivals first, ours at the end, else as measured
    beside = ["our best ÷ the best rival"] if 0 < len(ours & measured.keys()) < len(columns) else []
    lines = ["| TFLOP/s forward / backward | " + " | ".join([*(measured[kernel] for kernel in columns), *beside]) + " |"]
    lines.append("|---" * (len(columns) + len(beside) + 1) + "|")
    for shape in result["shapes"]:
        its = [rows.get((shape["name"], kernel), {"status": "skipped"}) for kernel in columns]
        good = [row if row["status"] == "ok" else {} for row in its]
        cells = _bold(good, ("forward_tflops", "backward_tflops"), max, _number)
        for nth, row in enumerate(its):
            cells[nth] = {"wrong": "wrong result", "failed": "fails"}.get(row["status"], cells[nth])
        if beside:
            mine, rivals = ([row for row in good if row and (row["kernel"] in ours) is is_ours] for is_ours in (True, False))
            cells.append(" / ".join(_ratio(f"{way}_tflops", mine, rivals) for way in ("forward", "backward")))
        lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    lines += [*_memory(result, rows, columns, measured), *_counted(result, columns, measured)]
    lines += [*_busy(result, measured), *_each_tile(result)]
    return "\n".join(lines) + "\n\n" + _origin(result)


def _ratio(field: str, mine: list[Result], others: list[Result]) -> str:
    if not mine or not others:
        return "–"
    return f"{max(row[field] for row in mine) / max(row[field] for row in others):.3f}"


def _memory(result: Result, rows: dict[tuple[str, str], Result], columns: list[str], labels: dict[str, str]) -> list[str]:
    """What a call needs beyond inputs, output and gradients, where standard attention, which needs it, was measured too."""
    fields = "forward_mib", "backward_mib"
    if not any(row["kernel"] == "standard" and fields[0] in row for row in result["rows"]):
        return []
    lines = ["", "| MiB needed, forward / backward | " + " | ".join(labels[kernel] for kernel in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for shape in result["shapes"]:
        its = [rows.get((shape["name"], kernel), {}) for kernel in columns]
        cells = _bold([row if fields[0] in row else {} for row in its], fields, min, "{:,.0f}".format)
        lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    return lines


COUNTED = (("million cycles", "mcycles", "{:.3f}"), ("joules", "joules", "{:.3g}"))


def _counted(result: Result, columns: list[str], labels: dict[str, str]) -> list[str]:
    """What calls without a pause take, where it was counted; the fewest of each row are bold."""
    lines = []
    for title, field, text in COUNTED:
        rows = {(row["shape"], row["kernel"]): row for row in result["rows"] if f"forward_{field}" in row}
        if not rows:
            continue
        lines += ["", f"| {title} forward / backward | " + " | ".join(labels[kernel] for kernel in columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for shape in result["shapes"]:
            its = [rows.get((shape["name"], kernel), {}) for kernel in columns]
            cells = _bold(its, (f"forward_{field}", f"backward_{field}"), min, text.format)
            lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    asked = [(row, way) for row in result["rows"] for way in ("forward", "backward") if f"{way}_held_down" in row]
    if asked:
        watts, limits, held = (
            _range({row[f"{way}_{what}"] for row, way in asked}, text)
            for what, text in (("watts", "{:.0f}"), ("watts_limit", "{:.0f}"), ("held_down", "{:.0%}"))
        )
        lines += ["", f"They took {watts} W. The limit of {limits} W held the clock down {held} of the time."]
    return lines


def _range(values: set[float], text: str) -> str:
    return " to ".join(dict.fromkeys(text.format(value) for value in (min(values), max(values))))


def _busy(result: Result, labels: dict[str, str]) -> list[str]:
    """How busy the units of the chip were, where Nsight Compute counted it."""
    found = [(row, way) for row in result["rows"] for way in ("forward", "backward") if f"{way}_busy" in row]
    if not found:
        return []
    units = list(found[0][0][f"{found[0][1]}_busy"])
    lines = ["", "| busy, by Nsight Compute | | " + " | ".join(units) + " | GiB of DRAM | the longest kernel's share |"]
    lines.append("|---|---" + "|--:" * (len(units) + 2) + "|")
    for row, way in sorted(found, key=lambda pair: pair[1] == "backward"):
        cells = [f"{row[f'{way}_busy'][unit]:.0%}" for unit in units]
        cells += [f"{row[f'{way}_dram_bytes'] / 2**30:.2f}", f"{row[f'{way}_longest_share']:.1%}"]
        lines.append(f"| {row['shape']} {way} | {labels[row['kernel']]} | " + " | ".join(cells) + " |")
    return lines


def _bold(rows: list[Result], ways: tuple[str, str], best: Callable[..., float], text: Callable[[float], str]) -> list[str]:
    """A cell for each row of results: what it has of both ways, the best bold; a dash for an empty one."""
    tops = [best((row[way] for row in rows if row), default=0.0) for way in ways]
    return [
        " / ".join(f"**{text(row[way])}**" if row[way] == top else text(row[way]) for way, top in zip(ways, tops, strict=True))
        if row
        else "–"
        for row in rows
    ]


def _each_tile(result: Result) -> list[str]:
    """What a visible tile costs under windows and documents, beside plain causal: whether time goes by what is seen."""
    shapes = {shape["name"]: shape for shape in result["shapes"]}
    lines = []
    for row in result["rows"]:
        if not (row["ours"] and row["status"] == "ok" and "tiles" in row):
            continue
        shape = shapes[row["shape"]]
        alike = {name: shape[name] for name in ("causal", "head_dim", "heads", "kv_heads")}
        plain = alike | dict(batch=1, window=None, documents=None)
        others = [
            other
            for other in result["rows"]
            if other["kernel"] == row["kernel"] and plain.items() <= shapes[other["shape"]].items() and other["status"] == "ok"
        ]
        if not (shape["window"] or shape["documents"]) or not others:
            continue
        beside = max(others, key=lambda other: other["tiles"])
        ratio = [row[way] / row["tiles"] / (beside[way] / beside["tiles"]) for way in ("forward_ms", "backward_ms")]
        cells = [row["label"], row["shape"], f"{row['tiles']:,}", f"{ratio[0]:.2f} / {ratio[1]:.2f} × {beside['shape']}'s"]
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = "| | | visible tiles of 128 × 128 | time of each, forward / backward |"
    return ["", head, "|---|---|--:|--:|", *lines]


def tiles(result: Result) -> str:
    """The fastest tile of each kernel and head dim."""
    lines = [
        "| kernel | head dim | tile, warps, stages | TFLOP/s | bytes spilled | measured, wrong, not runnable |",
        "|---|--:|---|--:|--:|---|",
    ]
    portable = any(isinstance(row["tile"], list) for row in result["rows"])
    if portable:
        lines = [lines[0] + " the best by rows kept |", lines[1] + "---|"]
    ok = [row for row in result["rows"] if row["status"] == "ok"]
    for kernel, width in dict.fromkeys((row["kernel"], row["width"]) for row in ok):
        its = [row for row in result["rows"] if (row["kernel"], row["width"]) == (kernel, width)]
        best = min((row for row in its if row["status"] == "ok"), key=lambda row: row["ms"])
        wrong = sum(row["status"] == "wrong" for row in its)
        runs = sum(row["status"] == "ok" for row in its)
        counts = f"{runs}, {wrong}, {len(its) - runs - wrong}"
        tile = _tile(best["tile"])
        lines.append(f"| {kernel} | {width} | {tile} | {_number(best['tflops'])} | {best['spills']} | {counts} |")
        if portable:
            rates: dict[int, float] = {}
            for row in its:
                if row["status"] == "ok":
                    rates[row["tile"][0]] = max(row["tflops"], rates.get(row["tile"][0], 0.0))
            lines[-1] += " " + ", ".join(f"{kept}: {_number(rates[kept])}" for kept in sorted(rates)) + " |"
    return "\n".join(lines) + "\n\n" + _origin(result)


def _tile(tile: list[int] | Result) -> str:
    """(kept, streamed, warps, stages) of a portable kernel; the options of a Hopper kernel by name."""
    if isinstance(tile, dict):
        return ", ".join(f"{name} {int(value)}" for name, value in tile.items())
    return " × ".join(str(n) for n in tile[:2]) + f", {tile[2]}, {tile[3]}"


def ring(result: Result) -> str:
    """TFLOP/s per rank forward and backward together, the share of the kernel alone, the peak of memory; a row a setting."""
    rows = {(row["setting"], row["name"]): row for row in result["rows"]}
    measured = {row["name"]: row["label"] for row in result["rows"] if row["status"] in ("ok", "wrong")}
    lines = [f"| TFLOP/s per GPU on {result['ranks']}, share of alone, peak GiB | " + " | ".join(measured.values()) + " |"]
    lines.append("|---" * (len(measured) + 1) + "|")
    for setting in result["settings"]:
        cells = []
        for name in measured:
            row = rows.get((setting["name"], name), {"status": "skipped"})
            if row["status"] == "ok":
                share = f" ({row['both_share']:.1%})" if "both_share" in row and name != "alone" else ""
                peak = f", {row['peak_gib']:.2f}" if "peak_gib" in row else ""
                cells.append(_number(row["both_tflops"]) + share + peak)
            else:
                cells.append({"wrong": "wrong result", "failed": "fails"}.get(row["status"], "–"))
        lines.append(f"| {setting['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _origin(result)


def rehearsal(result: Result) -> str:
    """What each rank of a ring would compute of a kernel alone, a row a setting; in cycles, too, where these were counted."""
    named = {row["rank"]: "alone, TFLOP/s" if row["rank"] is None else f"rank {row['rank']}" for row in result["rows"]}
    lines = [f"| {result['ranks']} ranks, share of alone (in cycles) | " + " | ".join(named.values()) + " |"]
    lines.append("|---" * (len(named) + 1) + "|")
    for setting in dict.fromkeys(row["setting"] for row in result["rows"]):
        cells = [setting]
        for row in (row for row in result["rows"] if row["setting"] == setting):
            cycles = f" ({row['cycles_share']:.1%})" if "cycles_share" in row else ""
            cells.append(_number(row["both_tflops"]) if row["rank"] is None else f"{row['both_share']:.1%}{cycles}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _origin(result)


def train(result: Result) -> str:
    """Whole training steps, a row a run; then how far the losses of runs are apart that should have the same."""
    lines = [
        "| run | tokens/s | TFLOP/s per GPU, attention counted 3.5× (3×) | MFU 3.5× (3×) | peak GiB, planned "
        "| of a profiled step outside products and attention |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        ways = " × ".join(f"{name} {size}" for name, size in row["split"].items() if size > 1) or "no split"
        name = f"{row['model']}, {row['batch']} × {row['length']:,} tokens on {row['ranks']}: {ways}, ZeRO {row['zero']}"
        cells = [f"{row['tokens_per_s']:,.0f}", f"{_number(row['tflops_3.5x'])} ({_number(row['tflops_3x'])})"]
        cells.append(f"{row['mfu_3.5x']:.1%} ({row['mfu_3x']:.1%})" if "mfu_3x" in row else "–")
        cells.append(f"{row['gib']:.1f}, {row['planned_gib']:.1f}" if "gib" in row else "–")
        cells.append(f"{1 - row['shares']['attention'] - row['shares']['products']:.1%}" if "shares" in row else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if result["differences"]:
        lines += [
            "",
            "| runs that differ by | | steps | difference of the loss on average | largest | at a loss of |",
            "|---|---|--:|--:|--:|--:|",
        ]
        for row in result["differences"]:
            splits = " and ".join(dict.fromkeys(row["splits"]))
            gaps = f"{row['mean']:.2g} | {row['largest']:.2g} | {row['loss']:.3f}"
            lines.append(f"| {row['differ_in']} | {splits} | {row['steps']} | {gaps} |")
    picture = f"[The losses, drawn]({result['plot']}). " if result.get("plot") else ""
    return "\n".join(lines) + f"\n\n{picture}{_origin(result)}"


def tries(result: Result) -> str:
    """What was tried on a kernel and what each try gave, and what leaving a part out would give."""

    def gave(row: Result) -> str:
        return ", ".join(f"{shape} {figure}" for shape, figure in row["gave"].items())

    lines = ["| tried | taken | of | before ÷ with it |", "|---|---|---|---|"]
    for row in result["tries"]:
        lines.append(f"| {row['which']}: {row['what']} | {'yes' if row['taken'] else 'no'} | {row['unit']} | {gave(row)} |")
    lines += ["", "| cycles, before ÷ without a part (values are wrong then) | |", "|---|---|"]
    lines += [f"| {row['which']}, {row['what']} | {gave(row)} |" for row in result["limits"]]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(lines) + f"\n\n{result['device']}, {result['dtype']}, {versions}, {result['date']}, {result['source']}."


def _number(value: float) -> str:
    """Three digits: 626, 53.7, 0.0342."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _origin(result: Result) -> str:
    """Where and when it was measured, and what measures it again."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    return f"{result['device']}, {result['dtype']}, {versions}, {result['date']}{commit}: `{result['command']}`"


KINDS: dict[str, Callable[[Result], str]] = {
    "attention": attention,
    "tiles": tiles,
    "ring": ring,
    "rehearsal": rehearsal,
    "train": train,
    "tries": tries,
}


def render(name: str, results: Path, maybe: bool = False) -> str:
    """The markdown of one result."""
    path = results / f"{name}.json"
    if maybe and not path.is_file():
        return "*Not measured yet.*"
    if not path.is_file():
        have = ", ".join(sorted(p.stem for p in results.glob("*.json"))) or "none"
        raise ValueError(
            f"there is no docs/results/{name}.json (there are: {have}): measure it with --save, or correct the name"
        )
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = result.get("kind")
    if kind not in KINDS:
        raise ValueError(f"docs/results/{name}.json is of kind {kind!r}, known are {', '.join(KINDS)}: add a function to KINDS")
    return KINDS[kind](result)


def update(text: str, results: Path, in_docs: bool = False) -> tuple[str, list[str]]:
    """The page with every region regenerated, and the names of those that changed. Links of a page in docs begin there."""
    stale: list[str] = []

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if OPENING.search(match["body"]):
            raise ValueError(f"the region of table {name} has no end: close it with <!-- end -->")
        # Markdown wants an empty line between a comment and a table.
        body = f"\n{render(name, results, bool(match['maybe']))}\n\n"
        body = body.replace("](docs/", "](") if in_docs else body
        if body != match["body"]:
            stale.append(name)
        return f"<!-- table: {name}{match['maybe'] or ''} -->\n{body}<!-- end -->"

    new = REGION.sub(replace, text)
    if len(OPENING.findall(text)) != len(REGION.findall(text)):
        raise ValueError("a table mark is not <!-- table: NAME --> … <!-- end -->, each on a line of its own: correct it")
    return new, stale


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """0, or 1 if --check found something stale or a region cannot be made."""
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description="Write the tables of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    args = parser.parse_args(argv)
    bad = False
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if not page.is_file():
            continue
        where, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        try:
            new, stale = update(text, root / "docs" / "results", in_docs=page.parent != root)
        except ValueError as error:
            print(f"{where}: {error}", file=sys.stderr)
            bad = True
            continue
        for name in stale:
            print(f"{where}: table {name} " + ("is stale: run python docs/tables.py" if args.check else "written"))
        bad |= args.check and bool(stale)
        if stale and not args.check:
            page.write_text(new, encoding="utf-8")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
