"""Benchmark of every attention backend and every installed baseline: speed, memory and accuracy on one GPU.

    ringspan bench kernels                                     # the default shapes, on this machine's GPU or CPU
    ringspan bench kernels --shapes d64-gqa4-causal-32k --only triton,fa4 --save
    ringspan bench kernels --roofline                          # limits, and the measured share of them: see roofline.py
    ringspan bench kernels --only hopper --cycles              # clock cycles, to compare two checkouts
    ringspan bench kernels --only hopper,fa4 --cycles --energy # and joules, which explain a low clock
    ringspan bench kernels --only hopper,fa4 --counters        # utilisation of the GPU's units: see nsight.py
    ringspan bench kernels --shapes head-dims short --rounds 7 --energy --json before.json
    ringspan bench kernels --gate before.json --rounds 7       # fails if a ratio to a baseline fell: see gate.py

Every kernel gets equal inputs and is checked first: out, dq, dk and dv of the first and the last KV head, at full length,
against fp32 (fp64 for fp32 inputs). All values must be finite. Only a correct kernel is timed. Clocks drift within minutes,
so rounds alternate: a round times each kernel once (the median of many calls), and every other round runs in reverse order.
The table shows the median over rounds with the slowest and the fastest. Memory is a call's peak beyond inputs, output and
gradients.
"""

import argparse
import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from ringspan.kernels.bench import gate, nsight, roofline
from ringspan.kernels.bench.baselines import DIRECTIONS
from ringspan.kernels.bench.measure import (
    DTYPES,
    RESULTS,
    SAVE_HELP,
    CounterFn,
    Row,
    kernels,
    machine,
    measure,
    result_path,
    slug,
)
from ringspan.kernels.bench.plots import draw_roofline
from ringspan.kernels.bench.shapes import DEFAULT_SHAPES, GROUPS, SHAPES, Shape

NVIDIA_ONLY = dict(
    cycles="the clocks of NVIDIA's multiprocessors",
    energy="the counter of NVIDIA's driver",
    counters="the counters of NVIDIA's GPUs, by Nsight Compute",
)


def report(shape: Shape, rows: list[Row]) -> str:
    """Return the table of one shape, and the ratio of our best kernel to the best baseline and to FlexAttention."""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}" + f" and {shape.v_width} in v" * bool(shape.v_head_dim)
    lines = [
        f"\n{shape.name}: batch {shape.batch}, {shape.length} tokens, {heads}; TFLOP/s (slowest-fastest round)",
        f"  {'':<15}{'forward':>9}{'':17}{'backward':>9}{'':17}{'both':>9}"
        + f"{'MiB fwd':>9}{'MiB bwd':>9}{'err out':>9}{'err grad':>9}",
    ]
    for row in rows:
        line = f"  {row['kernel']:<15}"
        if row["status"] == "ok":
            for direction in DIRECTIONS:
                low, high = row[f"{direction}_tflops_min"], row[f"{direction}_tflops_max"]
                line += f"{row[f'{direction}_tflops']:>9.4g}{f'({low:.3g}-{high:.3g})':>17}"
            line += f"{row['both_tflops']:>9.4g}"
            line += "".join(f"{row[key]:>9.0f}" if key in row else f"{'-':>9}" for key in ("forward_mib", "backward_mib"))
        else:
            line += f"{row['status']}: {row['note']}"
        if row.get("error_out") is not None:
            line += f"{row['error_out']:>9.1e}{row['error_grad']:>9.1e}"
        if "forward_mcycles" in row:
            line += f"  {row['forward_mcycles']:.4f} / {row['backward_mcycles']:.4f} million cycles"
        if "forward_joules" in row:
            line += f"  {row['forward_joules']:.4g} / {row['backward_joules']:.4g} J"
            line += f" at {row['forward_watts']:.0f} / {row['backward_watts']:.0f} W"
            line += f" (limit {row['forward_watts_limit']:.0f} W; it throttles the clock"
            line += f" {row['forward_held_down']:.0%} / {row['backward_held_down']:.0%} of the time)"
        lines.append(line)
    valid = [row for row in rows if row["status"] == "ok"]
    ours, baselines = ([row for row in valid if row["ours"] is is_ours] for is_ours in (True, False))
    flex = [row for row in baselines if row["kernel"] == "flex"]
    for title, others in (("the best baseline", baselines), ("FlexAttention", flex)):
        if ours and others:
            ratios = ", ".join(_ratio(f"{direction}_tflops", ours, others) for direction in (*DIRECTIONS, "both"))
            lines.append(f"  our best ÷ {title}: {ratios}")
    if ours:
        row = max(ours, key=lambda row: row["both_tflops"])
        times = ", ".join(f"{direction} {1e6 * row[f'{direction}_ms'] / row['tiles']:.3g} ns" for direction in DIRECTIONS)
        lines.append(f"  time per tile, of {row['tiles']:,} visible tiles of 128 × 128: {times} ({row['kernel']})")
    return "\n".join(lines)


def _ratio(field: str, ours: list[Row], others: list[Row]) -> str:
    our_best, best = (max(rows, key=lambda row: row[field]) for rows in (ours, others))
    return f"{field.removesuffix('_tflops')} {our_best[field] / best[field]:.0%} ({our_best['kernel']} / {best['kernel']})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringspan bench kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="NAME",
        choices=[*SHAPES, *GROUPS],
        help=f"shapes to measure, of {', '.join(SHAPES)}; "
        + "; ".join(f"{name}: {', '.join(shapes)}" for name, shapes in GROUPS.items()),
    )
    parser.add_argument("--only", metavar="A,B", help=f"kernels to measure, of {', '.join(kernels())}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--rounds", type=int, default=3, help="times that each kernel is measured (default %(default)s)")
    parser.add_argument("--rep", type=float, default=200, help="ms per kernel, round and direction (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="also count clock cycles, which do not drift as clocks do")
    parser.add_argument("--energy", action="store_true", help="also measure joules with the driver, two seconds per direction")
    parser.add_argument("--counters", action="store_true", help="also measure the utilisation of units, with Nsight Compute")
    parser.add_argument("--save", nargs="?", const="", metavar="NAME", help=f"{SAVE_HELP} (default attention-DEVICE)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--gate",
        type=Path,
        metavar="JSON",
        help=f"measure the shapes and kernels of this result; fail if a ratio to a baseline fell by {gate.TOLERANCE:.0%}%",
    )
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="show the limits of standard, chunked and flash attention (without a GPU: from saved results)",
    )
    parser.add_argument("--from", dest="saved", nargs="+", type=Path, metavar="JSON", help="with --roofline: measure nothing")
    parser.add_argument(
        "--plot",
        nargs="?",
        const="",
        metavar="PNG",
        help="with --roofline: draw it (default docs/roofline-DEVICE.png, without a checkout ./roofline-DEVICE.png)",
    )
    return parser


def expand(names: list[str] | None) -> list[str]:
    """Return the shapes that --shapes names, those of groups included."""
    return [shape for name in names or () for shape in GROUPS.get(name, [name])]


def chosen_counters(args: argparse.Namespace) -> list[CounterFn]:
    """Return the counters that --cycles and --energy select."""
    counters: list[CounterFn] = []
    if args.cycles:
        from ringspan.kernels.bench.clock_cycles import count_cycles  # imported here because it needs Triton

        counters.append(count_cycles)
    if args.energy:
        from ringspan.kernels.bench.energy import count_energy

        counters.append(count_energy)
    return counters


def show_roofline(results: list[Row], plot: str | None, note: str) -> None:
    """Print the tables, and draw the picture that --plot asks for."""
    for result in results:
        print(f"\n{roofline.report(result)}")
        if plot is not None:
            path = Path(plot) if plot else RESULTS.parent / f"roofline-{slug(result['device'])}.png"
            draw_roofline(result, path)
            print(f"\ndrawn: {path}")
    print(f"\n{note}")


def saved_roofline(args: argparse.Namespace) -> None:
    """Show the roofline of the results that --from names, else of all saved results for a chip with known peaks."""
    results = roofline.load(args.saved or sorted(RESULTS.glob("attention-*.json")), expand(args.shapes) or None)
    if not args.saved:
        results = [result for result in results if result["device"] in roofline.CHIPS]
    results = [result for result in results if result["shapes"]]
    if not results:
        raise ValueError(f"no result has these shapes on {' or '.join(roofline.CHIPS)}: measure them there with --save")
    if args.plot is not None and len(results) > 1:
        raise ValueError(f"--plot is one picture, and there are {len(results)} results: name one with --from")
    is_counted = any(
        f"{direction}_dram_bytes" in row for result in results for row in result["rows"] for direction in DIRECTIONS
    )
    note = "from the saved run" if is_counted else "not in these results; measure on a GPU with --roofline and --save"
    show_roofline(results, args.plot, f"ncu: DRAM bytes are {note}")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0, or 1 if a kernel of ours is wrong or slower than the gate allows."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.saved or args.plot is not None) and not args.roofline:
        parser.error("--from and --plot belong to --roofline: add it")
    if args.roofline and (args.saved or not torch.cuda.is_available()):
        for name in ("only", "device", "dtype", "rounds", "rep", "cycles", "energy", "counters", "save", "json", "gate"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} belongs to a measurement, and saved results are shown as they are: leave it out")
        try:
            saved_roofline(args)
        except (ValueError, ImportError) as error:
            parser.error(str(error))
        return 0
    if args.roofline and (uneven := [name for name in expand(args.shapes) if SHAPES[name].v_head_dim]):
        parser.error(f"--roofline has no model of {', '.join(uneven)}, whose v has another head dim: leave them out")
    if args.rounds < 1 or args.rep < 1:
        parser.error(f"--rounds {args.rounds} and --rep {args.rep:g} must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --device cpu")
    for name, source in NVIDIA_ONLY.items():
        if getattr(args, name) and (args.device == "cpu" or torch.version.hip):
            parser.error(f"--{name} reads {source}: leave it out here")
    defaults = [name for name, kernel in kernels().items() if args.device in kernel.devices]
    if args.roofline:
        defaults = roofline.KERNELS
    device, dtype = torch.device(args.device), args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    about = machine(device)
    shape_names = expand(args.shapes)
    earlier: list[Row] = []
    if args.gate:
        try:
            earlier = gate.load(args.gate, about["device"], dtype, args.rounds)["rows"]
        except ValueError as error:
            parser.error(str(error))
        defaults = [row["kernel"] for row in earlier if row["status"] == "ok"]
        shape_names = shape_names or [row["shape"] for row in earlier]
    names = list(dict.fromkeys(args.only.split(",") if args.only else defaults))
    if unknown := [name for name in names if name not in kernels()]:
        parser.error(f"--only {','.join(unknown)}: the kernels are {', '.join(kernels())}")
    try:
        if args.roofline:
            roofline.chip_of(about | {"dtype": dtype})
        path = result_path(args.json, args.save, f"attention-{slug(about['device'])}")
    except ValueError as error:
        parser.error(str(error))
    warnings.filterwarnings("ignore")  # baselines explain at length why they do not run; the table has one line for it
    shapes = [SHAPES[name] for name in dict.fromkeys(shape_names or DEFAULT_SHAPES[args.device])]
    print(about["device"], dtype, *(f"{name} {version}" for name, version in about["versions"].items()), sep=", ")
    only = ["--only", args.only] if args.only else []
    options = shlex.join(["--shapes", *(shape.name for shape in shapes), *only, "--device", args.device, "--dtype", dtype])
    options += (
        f" --rounds {args.rounds} --rep {args.rep:g}"
        + " --cycles" * args.cycles
        + " --energy" * args.energy
        + " --counters" * args.counters
        + " --roofline" * args.roofline
    )
    rows, note = list[Row](), ""
    result = {
        "kind": "attention",
        **about,
        "dtype": dtype,
        "rounds": args.rounds,
        "command": f"ringspan bench kernels {options}",
    }
    for index, shape in enumerate(shapes):
        shape_rows = measure(shape, names, device, DTYPES[dtype], args.rounds, args.rep, chosen_counters(args))
        print(report(shape, shape_rows), flush=True)
        rows += shape_rows
        if args.roofline or args.counters:
            note = nsight.add_counters(shape_rows, dtype, None if args.counters else tuple(roofline.KERNELS))
        result |= {"shapes": [asdict(shape) for shape in shapes[: index + 1]], "rows": rows}
        if path is not None:  # after each shape, so that an interrupted run keeps its results
            path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if path is not None:
        print(f"\nwritten: {path}")
    if args.roofline:
        show_roofline([result], args.plot, note)
    elif args.counters:
        print(f"{nsight.report(rows)}\n\n{note}")
    table, passes = gate.compare(rows, earlier)
    if args.gate:
        print(table)
    return int(any(row["ours"] and row["status"] == "wrong" for row in rows) or not passes)


if __name__ == "__main__":
    sys.exit(main())
