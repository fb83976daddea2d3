"""How fast, how lean and how exact every attention backend is, beside every rival that is installed.

    ringspan bench kernels                                     # the shapes that matter, on whatever this machine has
    ringspan bench kernels --shapes d64-gqa4-causal-32k --only triton,fa4 --save
    ringspan bench kernels --roofline                          # what limits each, and how near it comes: see roofline.py
    ringspan bench kernels --only hopper --cycles              # clock cycles, to compare with those of another checkout
    ringspan bench kernels --only hopper,fa4 --cycles --energy # and joules: what a clock is low for
    ringspan bench kernels --only hopper,fa4 --counters        # which unit of the chip is busy how much: see nsight.py

Every kernel gets the same inputs and first has to be right: out, dq, dk and dv of the first and the last KV head, at full
length, against the definition computed in fp32 (fp64 for fp32 inputs); and finite everywhere. Only then is it timed. Clocks
drift within minutes, so kernels take turns: a round times each once (the median of many calls), every other round the other
way round, and the median over rounds is reported beside the slowest and the fastest. Memory is what a call needs beyond inputs,
output and gradients.
"""

import argparse
import contextlib
import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from ringspan.kernels.bench import nsight, roofline
from ringspan.kernels.bench.baselines import WAYS
from ringspan.kernels.bench.measure import DTYPES, RESULTS, Count, Row, kernels, machine, measure, slug
from ringspan.kernels.bench.plots import draw_roofline
from ringspan.kernels.bench.shapes import DEFAULT_SHAPES, SHAPES, Shape

NVIDIA_ONLY = dict(
    cycles="the clocks of NVIDIA's multiprocessors",
    energy="the counter of NVIDIA's driver",
    counters="what Nsight Compute counts on NVIDIA's GPUs",
)


def report(shape: Shape, rows: list[Row]) -> str:
    """The table of one shape, and our share of the best rival and of FlexAttention."""
    heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
    lines = [
        f"\n{shape.name}: batch {shape.batch}, {shape.length} tokens, {heads}; TFLOP/s (slowest-fastest round)",
        f"  {'':<15}{'forward':>9}{'':17}{'backward':>9}{'':17}{'both':>9}"
        + f"{'MiB fwd':>9}{'MiB bwd':>9}{'err out':>9}{'err grad':>9}",
    ]
    for row in rows:
        line = f"  {row['kernel']:<15}"
        if row["status"] == "ok":
            for way in WAYS:
                low, high = row[f"{way}_tflops_min"], row[f"{way}_tflops_max"]
                line += f"{row[f'{way}_tflops']:>9.4g}{f'({low:.3g}-{high:.3g})':>17}"
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
            line += f" of {row['forward_watts_limit']:.0f}, by which the clock is held down"
            line += f" {row['forward_held_down']:.0%} / {row['backward_held_down']:.0%} of the time"
        lines.append(line)
    good = [row for row in rows if row["status"] == "ok"]
    ours, rivals = ([row for row in good if row["ours"] is mine] for mine in (True, False))
    for title, others in (("the best rival", rivals), ("FlexAttention", [row for row in rivals if row["kernel"] == "flex"])):
        if ours and others:
            lines.append(f"  ours of {title}: " + ", ".join(_share(f"{way}_tflops", ours, others) for way in (*WAYS, "both")))
    if ours:
        row = max(ours, key=lambda row: row["both_tflops"])
        each = ", ".join(f"{way} {1e6 * row[f'{way}_ms'] / row['tiles']:.3g} ns" for way in WAYS)
        lines.append(f"  each of {row['tiles']:,} visible tiles of 128 × 128: {each} ({row['kernel']})")
    return "\n".join(lines)


def _share(field: str, ours: list[Row], others: list[Row]) -> str:
    mine, best = (max(rows, key=lambda row: row[field]) for rows in (ours, others))
    return f"{field.removesuffix('_tflops')} {mine[field] / best[field]:.0%} ({mine['kernel']} / {best['kernel']})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ringspan bench kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", metavar="NAME", choices=SHAPES, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--only", metavar="A,B", help=f"kernels to measure, of {', '.join(kernels())}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kernel has its turn (default %(default)s)")
    parser.add_argument("--rep", type=float, default=200, help="ms of one turn (default %(default)s)")
    parser.add_argument("--cycles", action="store_true", help="count clock cycles too: they do not drift as clocks do")
    parser.add_argument("--energy", action="store_true", help="count joules too, as the driver does, for two seconds each")
    parser.add_argument("--counters", action="store_true", help="count busy units too, with Nsight Compute")
    parser.add_argument(
        "--save", nargs="?", const="", metavar="NAME", help="write docs/results/NAME.json (default attention-DEVICE)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write this file instead")
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="what limits standard, chunked and flash attention (without a GPU: of saved results)",
    )
    parser.add_argument("--from", dest="saved", nargs="+", type=Path, metavar="JSON", help="with --roofline: measure nothing")
    parser.add_argument(
        "--plot", nargs="?", const="", metavar="PNG", help="with --roofline: draw it (default docs/roofline-DEVICE.png)"
    )
    return parser


def counts(args: argparse.Namespace) -> list[Count]:
    found: list[Count] = []
    if args.cycles:
        from ringspan.kernels.bench.clock_cycles import count_cycles  # only here: it needs Triton

        found.append(count_cycles)
    if args.energy:
        from ringspan.kernels.bench.energy import count_energy

        found.append(count_energy)
    return found


def show_roofline(results: list[Row], plot: str | None, note: str) -> None:
    """The tables, and the picture if there is to be one."""
    for result in results:
        print(f"\n{roofline.report(result)}")
        if plot is not None:
            path = Path(plot) if plot else RESULTS.parent / f"roofline-{slug(result['device'])}.png"
            draw_roofline(result, path)
            print(f"\ndrawn: {path}")
    print(f"\n{note}")


def saved_roofline(args: argparse.Namespace) -> None:
    """Of the results that are named, or of all that are about a chip with known peaks."""
    results = roofline.load(args.saved or sorted(RESULTS.glob("attention-*.json")), args.shapes)
    if not args.saved:
        results = [result for result in results if result["device"] in roofline.CHIPS]
    results = [result for result in results if result["shapes"]]
    if not results:
        raise ValueError(f"no result has these shapes on {' or '.join(roofline.CHIPS)}: measure them there with --save")
    if args.plot is not None and len(results) > 1:
        raise ValueError(f"--plot is one picture, and there are {len(results)} results: name one with --from")
    counted = any(f"{way}_dram_bytes" in row for result in results for row in result["rows"] for way in roofline.WAYS)
    there = "of the time of measuring" if counted else "not in these results; measure on a GPU with --roofline and --save"
    show_roofline(results, args.plot, f"ncu: DRAM bytes are {there}")


def main(argv: list[str] | None = None) -> int:
    """0, or 1 if a kernel of ours is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.saved or args.plot is not None) and not args.roofline:
        parser.error("--from and --plot belong to --roofline: add it")
    if args.roofline and (args.saved or not torch.cuda.is_available()):
        for name in ("only", "device", "dtype", "rounds", "rep", "cycles", "energy", "counters", "save", "json"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} belongs to a measurement, and saved results are shown as they are: leave it out")
        try:
            saved_roofline(args)
        except (ValueError, ImportError) as error:
            parser.error(str(error))
        return 0
    if args.rounds < 1 or args.rep < 1:
        parser.error(f"--rounds {args.rounds} and --rep {args.rep:g} must be at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no GPU here: use --device cpu")
    for name, reads in NVIDIA_ONLY.items():
        if getattr(args, name) and (args.device == "cpu" or torch.version.hip):
            parser.error(f"--{name} reads {reads}: leave it out here")
    usual = [name for name, kernel in kernels().items() if args.device in kernel.devices]
    if args.roofline:
        usual = roofline.KERNELS
    names = list(dict.fromkeys(args.only.split(","))) if args.only else usual
    if unknown := [name for name in names if name not in kernels()]:
        parser.error(f"--only {','.join(unknown)}: the kernels are {', '.join(kernels())}")
    device, dtype = torch.device(args.device), args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    about, path = machine(device), args.json
    if args.roofline:
        try:
            roofline.chip_of(about | {"dtype": dtype})
        except ValueError as error:
            parser.error(str(error))
    if path is None and args.save is not None:
        path = RESULTS / f"{(args.save or 'attention-' + slug(about['device'])).removesuffix('.json')}.json"
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(exist_ok=True)
    if path is not None and not path.parent.is_dir():  # better now than after an hour of measuring
        parser.error(f"{path.parent} is no folder: make it first, or give a path with --json")
    warnings.filterwarnings("ignore")  # rivals explain at length why they do not run; the table says it in a line
    shapes = [SHAPES[name] for name in dict.fromkeys(args.shapes or DEFAULT_SHAPES[args.device])]
    print(about["device"], dtype, *(f"{name} {version}" for name, version in about["versions"].items()), sep=", ")
    only = ["--only", args.only] if args.only else []
    chosen = shlex.join(["--shapes", *(shape.name for shape in shapes), *only, "--device", args.device, "--dtype", dtype])
    chosen += (
        f" --rounds {args.rounds} --rep {args.rep:g}"
        + " --cycles" * args.cycles
        + " --energy" * args.energy
        + " --counters" * args.counters
        + " --roofline" * args.roofline
    )
    rows, note = list[Row](), ""
    result = {"kind": "attention", **about, "dtype": dtype, "command": f"ringspan bench kernels {chosen}"}
    for index, shape in enumerate(shapes):
        its = measure(shape, names, device, DTYPES[dtype], args.rounds, args.rep, counts(args))
        print(report(shape, its), flush=True)
        rows += its
        if args.roofline or args.counters:
            note = nsight.count(its, dtype, None if args.counters else tuple(roofline.KERNELS))
        result |= {"shapes": [asdict(shape) for shape in shapes[: index + 1]], "rows": rows}
        if path is not None:  # after each shape: who is cut short keeps what was measured
            path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if path is not None:
        print(f"\nwritten: {path}")
    if args.roofline:
        show_roofline([result], args.plot, note)
    elif args.counters:
        print(f"{nsight.report(rows)}\n\n{note}")
    return int(any(row["ours"] and row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
