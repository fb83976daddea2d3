"""Generate the tables of the documentation from docs/results.

    python docs/tables.py              # rewrites README.md and the pages below docs/
    python docs/tables.py --check      # changes nothing; exits 1 and names each stale table

A region lies between two lines. NAME stands for docs/results/NAME.json, which a benchmark wrote with --save:

    <!-- table: NAME -->                      a whole result
    <!-- table: NAME if measured -->          the same; "Not measured yet." while the file is missing
    <!-- table: NAME#speed -->                TFLOP/s alone, of a result of kind "attention"
    <!-- table: NAME#3 -->                    row 3 of an experiment log (kind "tries"), counted from 1
    <!-- table: NAME#3 | LEFT | RIGHT -->     the same, with two figures per shape
    <!-- end -->

A result's field "kind" selects the function that renders it: see KINDS and PARTS.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REGION = re.compile(
    r"^<!-- table: (?P<mark>(?P<name>[^\s#]+)(?:#(?P<part>\S+))?(?P<optional> if measured)?(?: \| (?P<columns>.+?))?) -->\n"
    r"(?P<body>.*?)^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)
OPENING = re.compile(r"^<!-- table: .*-->$", re.MULTILINE)
Result = dict[str, Any]


def attention(result: Result, speed_only: bool = False) -> str:
    """Render forward / backward TFLOP/s: a row per shape, a column per kernel, then our best ÷ the best baseline."""
    rows = {(row["shape"], row["kernel"]): row for row in result["rows"]}
    labels = {row["kernel"]: row["label"] for row in result["rows"] if row["status"] in ("ok", "wrong")}
    ours = {row["kernel"] for row in result["rows"] if row["ours"]}
    kernels = sorted(labels, key=lambda kernel: kernel in ours)  # a stable sort: baselines first, then our kernels
    ratios = ["Ringspan best ÷ best baseline"] if 0 < len(ours & labels.keys()) < len(kernels) else []
    lines = ["| TFLOP/s forward / backward | " + " | ".join([*(labels[kernel] for kernel in kernels), *ratios]) + " |"]
    lines.append("|---" * (len(kernels) + len(ratios) + 1) + "|")
    for shape in result["shapes"]:
        shape_rows = [rows.get((shape["name"], kernel), {"status": "skipped"}) for kernel in kernels]
        valid = [row if row["status"] == "ok" else {} for row in shape_rows]
        cells = _bold_best(valid, ("forward_tflops", "backward_tflops"), max, _number)
        for column, row in enumerate(shape_rows):
            cells[column] = {"wrong": "wrong result", "failed": "fails"}.get(row["status"], cells[column])
        if ratios:
            our_rows = [row for row in valid if row and row["kernel"] in ours]
            baseline_rows = [row for row in valid if row and row["kernel"] not in ours]
            cells.append(" / ".join(_ratio(f"{way}_tflops", our_rows, baseline_rows) for way in ("forward", "backward")))
        lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    if not speed_only:
        lines += [*_memory(result, rows, kernels, labels), *_cycles_and_joules(result, kernels, labels)]
        lines += [*_utilisation(result, labels), *_time_per_tile(result)]
    return "\n".join(lines) + "\n\n" + _provenance(result)


def speed(result: Result, part: str, columns: list[str]) -> str:
    """Render the TFLOP/s of a result of kind "attention" alone: part `speed`."""
    if part != "speed" or columns:
        raise ValueError(f"part={part}: a result of kind='attention' has one part, #speed, without columns")
    return attention(result, speed_only=True)


def _ratio(field: str, our_rows: list[Result], baseline_rows: list[Result]) -> str:
    if not our_rows or not baseline_rows:
        return "–"
    return f"{max(row[field] for row in our_rows) / max(row[field] for row in baseline_rows):.3f}"


def _memory(result: Result, rows: dict[tuple[str, str], Result], kernels: list[str], labels: dict[str, str]) -> list[str]:
    """Memory of a call beyond inputs, output and gradients; only in results that include standard attention."""
    fields = "forward_mib", "backward_mib"
    if not any(row["kernel"] == "standard" and fields[0] in row for row in result["rows"]):
        return []
    lines = ["", "| working memory in MiB, forward / backward | " + " | ".join(labels[kernel] for kernel in kernels) + " |"]
    lines.append("|---" * (len(kernels) + 1) + "|")
    for shape in result["shapes"]:
        shape_rows = [rows.get((shape["name"], kernel), {}) for kernel in kernels]
        cells = _bold_best([row if fields[0] in row else {} for row in shape_rows], fields, min, "{:,.0f}".format)
        lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    return lines


COUNTED = (("million clock cycles", "mcycles", "{:.3f}"), ("joules", "joules", "{:.3g}"))


def _cycles_and_joules(result: Result, kernels: list[str], labels: dict[str, str]) -> list[str]:
    """Clock cycles, joules and power of back-to-back calls, as far as they were counted; the smallest of a row is bold."""
    lines = []
    for title, field, form in COUNTED:
        rows = {(row["shape"], row["kernel"]): row for row in result["rows"] if f"forward_{field}" in row}
        if not rows:
            continue
        lines += ["", f"| {title}, forward / backward | " + " | ".join(labels[kernel] for kernel in kernels) + " |"]
        lines.append("|---" * (len(kernels) + 1) + "|")
        for shape in result["shapes"]:
            shape_rows = [rows.get((shape["name"], kernel), {}) for kernel in kernels]
            cells = _bold_best(shape_rows, (f"forward_{field}", f"backward_{field}"), min, form.format)
            lines.append(f"| {shape['name']} | " + " | ".join(cells) + " |")
    powered = [(row, way) for row in result["rows"] for way in ("forward", "backward") if f"{way}_held_down" in row]
    if powered:
        watts, limits, throttled = (
            _range({row[f"{way}_{field}"] for row, way in powered}, form)
            for field, form in (("watts", "{:.0f}"), ("watts_limit", "{:.0f}"), ("held_down", "{:.0%}"))
        )
        lines += ["", f"Power: {watts} W. The {limits} W limit throttled the clock {throttled} of the time."]
    return lines


def _range(values: set[float], form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def _utilisation(result: Result, labels: dict[str, str]) -> list[str]:
    """Utilisation of the chip's units, as far as Nsight Compute counted it."""
    profiled = [(row, way) for row in result["rows"] for way in ("forward", "backward") if f"{way}_busy" in row]
    if not profiled:
        return []
    units = list(profiled[0][0][f"{profiled[0][1]}_busy"])
    head = ["utilisation (Nsight Compute)", "kernel", *units, "DRAM traffic, GiB", "longest kernel, share of time"]
    lines = ["", "| " + " | ".join(head) + " |", "|---|---" + "|--:" * (len(units) + 2) + "|"]
    for row, way in sorted(profiled, key=lambda pair: pair[1] == "backward"):
        cells = [f"{row[f'{way}_busy'][unit]:.0%}" for unit in units]
        cells += [f"{row[f'{way}_dram_bytes'] / 2**30:.2f}", f"{row[f'{way}_longest_share']:.1%}"]
        lines.append(f"| {row['shape']} {way} | {labels[row['kernel']]} | " + " | ".join(cells) + " |")
    return lines


def _bold_best(
    rows: list[Result], fields: tuple[str, str], best: Callable[..., float], form: Callable[[float], str]
) -> list[str]:
    """A cell per row with both fields, the best value of each in bold; a dash for an empty row."""
    tops = [best((row[field] for row in rows if row), default=0.0) for field in fields]
    return [
        " / ".join(
            f"**{form(row[field])}**" if row[field] == top else form(row[field])
            for field, top in zip(fields, tops, strict=True)
        )
        if row
        else "–"
        for row in rows
    ]


def _time_per_tile(result: Result) -> list[str]:
    """Time per visible tile with a window or documents, relative to plain causal attention of the same kernel and heads."""
    shapes = {shape["name"]: shape for shape in result["shapes"]}
    lines = []
    for row in result["rows"]:
        if not (row["ours"] and row["status"] == "ok" and "tiles" in row):
            continue
        shape = shapes[row["shape"]]
        plain = {name: shape[name] for name in ("causal", "head_dim", "heads", "kv_heads")}
        plain |= dict(batch=1, window=None, documents=None)
        references = [
            other
            for other in result["rows"]
            if other["kernel"] == row["kernel"] and plain.items() <= shapes[other["shape"]].items() and other["status"] == "ok"
        ]
        if not (shape["window"] or shape["documents"]) or not references:
            continue
        reference = max(references, key=lambda other: other["tiles"])
        ratio = [row[way] / row["tiles"] / (reference[way] / reference["tiles"]) for way in ("forward_ms", "backward_ms")]
        cells = [row["label"], row["shape"], f"{row['tiles']:,}", f"{ratio[0]:.2f} / {ratio[1]:.2f}", reference["shape"]]
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = "| kernel | shape | visible 128 × 128 tiles | time per tile ÷ reference, forward / backward | reference |"
    return ["", head, "|---|---|--:|--:|---|", *lines]


def tiles(result: Result) -> str:
    """Render the fastest tile of each kernel and head dim."""
    lines = [
        "| kernel | head dim | tile, warps, stages | TFLOP/s | register spill, bytes | measured, wrong, not runnable |",
        "|---|--:|---|--:|--:|---|",
    ]
    portable = any(isinstance(row["tile"], list) for row in result["rows"])
    if portable:
        lines = [lines[0] + " best TFLOP/s by resident rows |", lines[1] + "---|"]
    valid = [row for row in result["rows"] if row["status"] == "ok"]
    for kernel, width in dict.fromkeys((row["kernel"], row["width"]) for row in valid):
        candidates = [row for row in result["rows"] if (row["kernel"], row["width"]) == (kernel, width)]
        best = min((row for row in candidates if row["status"] == "ok"), key=lambda row: row["ms"])
        num_wrong = sum(row["status"] == "wrong" for row in candidates)
        num_ok = sum(row["status"] == "ok" for row in candidates)
        counts = f"{num_ok}, {num_wrong}, {len(candidates) - num_ok - num_wrong}"
        tile = _tile(best["tile"])
        lines.append(f"| {kernel} | {width} | {tile} | {_number(best['tflops'])} | {best['spills']} | {counts} |")
        if portable:
            speeds: dict[int, float] = {}
            for row in candidates:
                if row["status"] == "ok":
                    speeds[row["tile"][0]] = max(row["tflops"], speeds.get(row["tile"][0], 0.0))
            lines[-1] += " " + ", ".join(f"{resident}: {_number(speeds[resident])}" for resident in sorted(speeds)) + " |"
    return "\n".join(lines) + "\n\n" + _provenance(result)


def _tile(tile: list[int] | Result) -> str:
    """(resident, streamed, warps, stages) of a portable kernel, or the named options of a Hopper kernel."""
    if isinstance(tile, dict):
        return ", ".join(f"{name} {int(value)}" for name, value in tile.items())
    return " × ".join(str(n) for n in tile[:2]) + f", {tile[2]}, {tile[3]}"


def ring(result: Result) -> str:
    """Render TFLOP/s per rank (forward + backward), share of the kernel alone and peak memory: a row per setting."""
    rows = {(row["setting"], row["name"]): row for row in result["rows"]}
    labels = {row["name"]: row["label"] for row in result["rows"] if row["status"] in ("ok", "wrong", "refused")}
    title = f"{result['ranks']} GPUs: TFLOP/s per GPU (share of one rank alone), peak GiB"
    lines = [f"| {title} | " + " | ".join(labels.values()) + " |", "|---" * (len(labels) + 1) + "|"]
    for setting in result["settings"]:
        cells = []
        for name in labels:
            row = rows.get((setting["name"], name), {"status": "skipped"})
            if row["status"] == "ok":
                share = f" ({row['both_share']:.1%})" if "both_share" in row and name != "alone" else ""
                peak = f", {row['peak_gib']:.2f}" if "peak_gib" in row else ""
                cells.append(_number(row["both_tflops"]) + share + peak)
            else:
                names = {"wrong": "wrong result", "failed": "fails", "refused": "refused"}
                cells.append(names.get(row["status"], "–"))
        lines.append(f"| {setting['name']} | " + " | ".join(cells) + " |")
    host: dict[str, list[str]] = {}  # of the settings, in their order
    for row in result["rows"]:
        if "both_host_share" in row:
            host.setdefault(row["label"], []).append(f"{row['both_host_share']:.0%}")
    if host:
        shares = ", ".join(f"{label} {' and '.join(each)}" for label, each in host.items())
        lines += ["", f"Time of the host's launches as a share of the time: {shares}."]
    refusals = dict.fromkeys(f"- {row['label']}: {row['note']}" for row in result["rows"] if row["status"] == "refused")
    if refusals:
        lines += ["", "Refused:", "", *refusals]
    return "\n".join(lines) + "\n\n" + _provenance(result)


def rehearsal(result: Result) -> str:
    """Render each simulated rank's share of the kernel alone: a row per setting, clock cycles in parentheses if counted."""
    names = {row["rank"]: "alone, TFLOP/s" if row["rank"] is None else f"rank {row['rank']}" for row in result["rows"]}
    title = f"{result['ranks']} ranks: share of the kernel alone by time (by clock cycles)"
    lines = [f"| {title} | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for setting in dict.fromkeys(row["setting"] for row in result["rows"]):
        cells = [setting]
        for row in (row for row in result["rows"] if row["setting"] == setting):
            cycles = f" ({row['cycles_share']:.1%})" if "cycles_share" in row else ""
            cells.append(_number(row["both_tflops"]) if row["rank"] is None else f"{row['both_share']:.1%}{cycles}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + _provenance(result)


def mechanisms(result: Result) -> str:
    """Render time or cycles without each mechanism ÷ those with it; then the ring's share and the host's time."""
    shapes = result["shapes"]
    unit = "mcycles" if result.get("queued") else "ms"
    names = dict.fromkeys(name for shape in shapes.values() for name in shape["rows"] if name not in ("", "alone"))
    title = "rehearsed, " * result["rehearsed"] + f"{result['ranks']} ranks: forward, forward + backward"
    title += ", clock cycles" if unit == "mcycles" else ""
    lines = [f"| {title} | " + " | ".join(shapes) + " |", "|---" + "|--:" * len(shapes) + "|"]

    def line(label: str, name: str, form: Callable[[Result], str]) -> None:
        rows = [shape["rows"].get(name, {}) for shape in shapes.values()]
        lines.append(f"| {label} | " + " | ".join(form(row) if "both_ms" in row else "–" for row in rows) + " |")

    for name in names:
        line(name, name, lambda row: f"{row[f'forward_{unit}_gain']:.3f}, {row[f'both_{unit}_gain']:.3f}")
    line("share of the kernel alone", "", lambda row: f"{row['forward_share']:.1%}, {row['both_share']:.1%}")
    line("ms", "", lambda row: f"{row['forward_ms']:.2f}, {row['both_ms']:.2f}")
    host = "host_forward_us", "host_backward_us"
    line("ms of the host: forward, backward", "", lambda row: ", ".join(f"{row[x] / 1e3:.2f}" for x in host if x in row) or "–")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    setup = f"{result['device']}, {result['dtype']}, {versions}, {result['date']}, commit {result['commit']}."
    return "\n".join(lines) + "\n\n" + setup


def train(result: Result) -> str:
    """Render whole training steps, a row per run, then the loss differences between runs that should agree."""
    lines = [
        "| run | tokens/s | TFLOP/s per GPU, attention counted 3.5× (3×) | MFU 3.5× (3×) | peak GiB: measured, planned "
        "| s per step: measured, planned | profiled step: share outside matmuls and attention |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        split = " × ".join(f"{name} {size}" for name, size in row["split"].items() if size > 1) or "no split"
        ranks = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}"
        plan = f", memory plan {row['memory']}" if row.get("memory", "none") != "none" else ""
        model = row["model"] + (f" ({row['parameters'] / 1e9:.3g}B weights)" if "parameters" in row else "")
        name = f"{model}, {row['batch']} × {row['length']:,} tokens, {ranks}: {split}, ZeRO {row['zero']}{plan}"
        cells = [f"{row['tokens_per_s']:,.0f}", f"{_number(row['tflops_3.5x'])} ({_number(row['tflops_3x'])})"]
        cells.append(f"{row['mfu_3.5x']:.1%} ({row['mfu_3x']:.1%})" if "mfu_3x" in row else "–")
        cells.append(f"{row['gib']:.1f}, {row['planned_gib']:.1f}" if "gib" in row else "–")
        planned = f"{row['planned_seconds']:.3g}" if "planned_seconds" in row else "–"
        cells.append(f"{row['seconds']:.3g}, {planned}" if "seconds" in row else "–")
        cells.append(f"{1 - row['shares']['attention'] - row['shares']['products']:.1%}" if "shares" in row else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if result["differences"]:
        lines += [
            "",
            "| runs differ in | splits | steps | mean loss difference | largest loss difference | loss at the largest |",
            "|---|---|--:|--:|--:|--:|",
        ]
        for row in result["differences"]:
            splits = " and ".join(dict.fromkeys(row["splits"]))
            differences = f"{row['mean']:.2g} | {row['largest']:.2g} | {row['loss']:.3f}"
            lines.append(f"| {row['differ_in']} | {splits} | {row['steps']} | {differences} |")
    picture = f"[Loss curves]({result['plot']}). " if result.get("plot") else ""
    return "\n".join(lines) + f"\n\n{picture}{_provenance(result)}"


# Wordings of the recorded experiment log → terms of the documentation.
TERMS = {
    "all": "all shapes",
    "a ring's rectangles of 16k x 32k": "16k × 32k",
    "a ring's rectangle at 8k": "rectangle of a ring, 8k",
    "8k of 2, whose rounds differ by a fifth": "8k, 2 ranks; rounds differ by a fifth",
    "8k of 2, in time, whose rounds differ by far more": "8k, 2 ranks; in time; rounds differ by far more",
    "GQA 8k of 2, as well": "GQA 8k, 2 ranks; likewise",
    "of one run, 32k": "one row range, 32k",
    "shape not noted": "shape not recorded",
    "one text of 128k": "1 sequence of 128k",
    "of 512k": "1 sequence of 512k",
    "8 of 16k": "8 sequences of 16k",
    "64 of 2k": "64 sequences of 2k",
    "D256, first kernel with roles": "D256, first kernel with split roles",
    "without looking for maxima (before that was taken)": "row maximum (kernel before the search was made conditional)",
    "without exponentials": "exponentials",
    "without the mask": "mask",
    "without storing dq to shared memory": "store of dq to shared memory",
    "without dq's product": "dq matmul",
    "without the exponentials": "exponentials",
    "without the additions to memory": "additions of dq to memory",
    "writing": "paged decode",
    "a ring": "ring, forward and backward",
    "a ring's forward": "ring, forward",
    "a ring's backward": "ring, backward",
}
UNITS = {"time": "time", "cycles": "clock cycles"}


def long_step(result: Result) -> str:
    """Render a long training step: planned and measured memory and time."""
    planned, alone, phases = result["predicted"], result["attention_alone"], result["phases"]
    lines = [
        "| | planned | measured |",
        "|---|--:|--:|",
        f"| one step, s | {planned['seconds']:.1f} | {result['seconds']:.1f} |",
        f"| peak allocated, GiB | {planned['gib']:.2f} | {result['gib']:.2f} |",
        f"| peak reserved by torch, GiB | – | {result['gib_reserved']:.2f} |",
        f"| GPU memory outside of torch's allocator, GiB | – | {max(phase['outside'] for phase in phases):.2f} |",
        f"| pinned host memory, GiB | {planned['host_gib']:.2f} | {phases[-1]['host_pinned']:.2f} |",
        f"| host memory of the process at its peak, GiB | – | {max(phase['host_peak'] for phase in phases):.2f} |",
        f"| TFLOP/s per GPU, attention counted 3.5× | – | {result['step_tflops']:.0f} |",
        f"| attention's kernel alone at this length, TFLOP/s | – | {alone['tflops']:.0f} |",
        "",
        f"Plan `{planned['plan']}`, {planned['gpus']} × {result['device']}, {result['date'][:10]}: "
        f"`ringspan launch {' '.join(planned['options'])}`",
    ]
    return "\n".join(lines)


def tries(result: Result) -> str:
    """Render the number of recorded experiments per area."""
    lines = ["| area | recorded rows | kept | not kept |", "|---|--:|--:|--:|"]
    for area in dict.fromkeys(row["which"] for row in result["tries"]):
        kept = [row["taken"] for row in result["tries"] if row["which"] == area]
        lines.append(f"| {_term(area)} | {len(kept)} | {sum(kept)} | {len(kept) - sum(kept)} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(lines) + f"\n\n{result['device']}, {result['dtype']}, {versions}, {result['date']}."


def experiment(result: Result, part: str, columns: list[str]) -> str:
    """Render one experiment: a row per shape. Part `limits-WHICH` lists the parts that were left out of a kernel."""
    if limits := [row for row in result["limits"] if f"limits-{row['which']}" == part]:
        shapes = list(dict.fromkeys(shape for row in limits for shape in row["gave"]))
        lines = [
            "| clock cycles, before ÷ without | " + " | ".join(map(_term, shapes)) + " |",
            "|---" + "|--:" * len(shapes) + "|",
        ]
        for row in limits:
            lines.append(f"| {_term(row['what'])} | " + " | ".join(row["gave"].get(shape, "–") for shape in shapes) + " |")
        return "\n".join(lines)
    numbers = {str(number): row for number, row in enumerate(result["tries"], 1)}
    if part not in numbers:
        known = ", ".join(f"limits-{area}" for area in dict.fromkeys(row["which"] for row in result["limits"]))
        raise ValueError(f"part={part}: the log has no such row; write 1 to {len(numbers)}, or one of {known}")
    row = numbers[part]
    title = f"{UNITS[row['unit']]}, before ÷ after"
    head = [f"shape ({title})", *columns] if columns else ["shape", title]
    joules = _recorded_joules(row["what"])
    if joules:
        head.append("joules, before ÷ after")
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for shape, text in row["gave"].items():
        cells = _figures(text, columns) + ([joules.get(shape, "–")] if joules else [])
        lines.append(f"| {_term(shape)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _recorded_joules(text: str) -> dict[str, str]:
    """The log notes joules in parentheses: "(joules: 16k 1.034, GQA 32k 1.003)" is 16k → 1.034, GQA 32k → 1.003."""
    match = re.search(r"\(joules: ([^()]+)\)", text)
    return dict(pair.rsplit(" ", 1) for pair in match[1].split(", ")) if match else {}


def _figures(text: str, columns: list[str]) -> list[str]:
    """Split a recorded cell into columns: "1.02 (1.00), 1.04 (1.02)" is "1.02, 1.04" and "1.00, 1.02"."""
    if not columns:
        return [text]
    if "(" in text:
        pairs = re.findall(r"([^,()]+?) \(([^()]+)\)", text)
        figures = [", ".join(figure.strip() for figure in column) for column in zip(*pairs, strict=True)]
    else:
        figures = text.split(", ")
    if len(figures) != len(columns):
        raise ValueError(f"columns={' | '.join(columns)}: the log has {len(figures)} figures per shape ({text}); name as many")
    return figures


def _term(text: str) -> str:
    text = TERMS.get(text, text).replace(" x ", " × ")
    return re.sub(r"^((?:GQA )?\d+k) of (\d)$", r"\1, \2 ranks", text)


def _number(value: float) -> str:
    """Three digits: 626, 53.7, 0.0342."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _provenance(result: Result) -> str:
    """Machine, versions, date and commit of a result, and the command that measures it."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    return f"{result['device']}, {result['dtype']}, {versions}, {result['date']}{commit}: `{result['command']}`"


KINDS: dict[str, Callable[[Result], str]] = {
    "attention": attention,
    "tiles": tiles,
    "ring": ring,
    "rehearsal": rehearsal,
    "mechanisms": mechanisms,
    "train": train,
    "long step": long_step,
    "tries": tries,
}
PARTS: dict[str, Callable[[Result, str, list[str]], str]] = {"attention": speed, "tries": experiment}


def render(name: str, results: Path, part: str | None = None, columns: str | None = None, optional: bool = False) -> str:
    """Render one result as markdown.

    Args:
        name: stem of the file in `results`.
        results: folder with the JSON files.
        part: row of an experiment log; None renders the whole result.
        columns: column titles of a part, separated by " | ".
        optional: allow the file to be missing.
    Raises:
        ValueError: the file, its kind, the part or the number of columns is not as the region says.
    """
    path = results / f"{name}.json"
    if optional and not path.is_file():
        return "*Not measured yet.*"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in results.glob("*.json"))) or "no file"
        raise ValueError(
            f"table={name}: docs/results has no such file, it has {known}; measure it with --save, or correct the name"
        )
    result = json.loads(path.read_text(encoding="utf-8"))
    kind = result.get("kind")
    if kind not in KINDS:
        raise ValueError(f"table={name}: no function renders kind={kind!r}, known are {', '.join(KINDS)}; add it to KINDS")
    if part is None:
        return KINDS[kind](result)
    if kind not in PARTS:
        raise ValueError(f"table={name}#{part}: a result of kind={kind!r} has no parts; leave out #{part}")
    return PARTS[kind](result, part, columns.split(" | ") if columns else [])


def update(text: str, results: Path, docs: str = "docs/") -> tuple[str, list[str]]:
    """Regenerate every region of a page.

    Args:
        text: the page.
        results: folder with the JSON files.
        docs: path from the page's folder to docs, with a final slash or empty; links in results begin with "docs/".
    Returns:
        The new page, and the marks of the regions that changed.
    """
    stale: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if OPENING.search(match["body"]):
            raise ValueError(f"table={match['mark']}: the region has no end; close it with <!-- end -->")
        # Markdown needs an empty line between a comment and a table.
        body = f"\n{render(match['name'], results, match['part'], match['columns'], bool(match['optional']))}\n\n"
        body = body.replace("](docs/", f"]({docs}")
        if body != match["body"]:
            stale.append(match["mark"].partition(" ")[0])
        return f"<!-- table: {match['mark']} -->\n{body}<!-- end -->"

    new = REGION.sub(replace, text)
    if len(OPENING.findall(text)) != len(REGION.findall(text)):
        raise ValueError(
            "region: a table mark has no end or no name; write <!-- table: NAME --> … <!-- end -->, each on its own line"
        )
    return new, stale


def pages(root: Path) -> list[Path]:
    """All pages that may hold tables: README.md and every page below docs."""
    return [page for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if page.is_file()]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command. Returns 0, or 1 if --check found a stale table or a region cannot be rendered."""
    parser = argparse.ArgumentParser(prog="python docs/tables.py", description="Write the tables of the documentation.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    args = parser.parse_args(argv)
    failed = False
    for page in pages(root):
        name, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        docs = os.path.relpath(root / "docs", page.parent).replace(os.sep, "/") + "/"
        try:
            new, stale = update(text, root / "docs" / "results", docs.removeprefix("./"))
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        for table in stale:
            print(f"{name}: table {table} " + ("is stale: run python docs/tables.py" if args.check else "written"))
        failed |= args.check and bool(stale)
        if stale and not args.check:
            page.write_text(new, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
