"""Compile the attention kernels of a model or of listed shapes before the first step: `ringspan warmup`.

    ringspan warmup experiment=llama_1b_128k                        what this run uses on one GPU
    ringspan warmup 32/8x128 128x192/128 --documents --window       HEADS[/KV_HEADS]xHEAD_DIM[/V_HEAD_DIM], causal, bf16
    ringspan warmup 32/8x128 --target sm_90                         without a GPU, for an H100 or H200

Kernels do not depend on lengths, batch sizes or the number of documents. A ring compiles kernels of its blocks in its first
step, which warmup does not know. Kernels are compiled in parallel processes into Triton's cache (docs/guides/attention.md:
where it is, and how ranks and hosts share it). Kernels that are already there take no time.
"""

import argparse
import os
import re
import sys
from dataclasses import replace

from ringspan.kernels.runtime.warmup import DTYPES, TARGETS, AttentionCall, compile_all, current_target, report
from ringspan.trainer.planning.host_memory import num_cores

PROGRAM = "ringspan warmup"
SHAPE = re.compile(r"(\d+)(?:/(\d+))?x(\d+)(?:/(\d+))?")


def main(argv: list[str] | None = None) -> int:
    """Compile; return 0, or 1 if a kernel does not compile. A wrong option exits with code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        target = args.target or current_target()
        if target is None:
            raise ValueError(f"there is no GPU here: name the one that will run, --target {' or '.join(TARGETS)}")
        if args.processes < 1:
            raise ValueError(f"--processes {args.processes}: it needs at least 1")
        options = [text for text in args.what if "=" in text]
        shapes = [shape_call(text, args) for text in args.what if "=" not in text]
        if options and shapes:
            raise ValueError("name shapes or a run's options (key=value), not both")
        calls = run_calls(options) if options else shapes
    except ValueError as error:
        parser.error(str(error))
    count = 2 * len(dict.fromkeys(calls))
    print(
        f"{PROGRAM}: {count} jobs for {target} in {min(args.processes, count)} processes; cache: {cache_folder()}", flush=True
    )
    compiled, cached, failed = report(
        compile_all(calls, target, args.processes), count, lambda line: print(f"  {line}", flush=True)
    )
    print(f"{compiled} kernels compiled, {cached} were in the cache" + f", {failed} jobs failed" * bool(failed))
    return int(failed > 0)


def cache_folder() -> str:
    """Return the folder of Triton's cache."""
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.environ.get("TRITON_HOME", "~"), ".triton", "cache")


def shape_call(text: str, args: argparse.Namespace) -> AttentionCall:
    """Return the call of a shape on the command line."""
    match = SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text}: write a shape as HEADS[/KV_HEADS]xHEAD_DIM[/V_HEAD_DIM], such as 32/8x128, or key=value")
    heads, kv_heads, head_dim, v_head_dim = (None if number is None else int(number) for number in match.groups())
    assert heads is not None and head_dim is not None
    call = AttentionCall(heads, kv_heads or heads, head_dim, v_head_dim or head_dim, args.dtype, not args.not_causal)
    if heads == 0 or heads % call.kv_heads:
        raise ValueError(f"{text}: the query heads must be a multiple of the KV heads")
    if any(width % 8 or not 16 <= width <= 256 for width in (call.head_dim, call.v_head_dim)):
        raise ValueError(f"{text}: head dims are 16 to 256 in steps of 8")
    flags = {name: getattr(args, name) for name in ("window", "documents", "softcap", "sinks", "dropout", "deterministic")}
    return replace(call, backend=args.backend, **flags)


def run_calls(options: list[str]) -> list[AttentionCall]:
    """Return the calls that one GPU of a run makes: with and without documents, for each kind of window.

    Raises:
        ValueError: a wrong option, or a run of several ranks.
    """
    try:
        from ringspan.trainer.config import compose
        from ringspan.trainer.layer import head_dim
    except ImportError as error:
        raise ValueError(f'options of a run need the trainer ({error}): pip install "ringspan[train]"') from error
    try:
        config = compose.load(options, world_size=1, planning=True).config
    except ValueError as error:
        one = "use parallel.data=1 parallel.ring=1 parallel.ulysses=1; a ring compiles kernels of its blocks in its first step"
        raise ValueError(f"{error}\nwarmup compiles the kernels of one GPU: {one}") from error
    model = config.model
    width = head_dim(model)
    dtype = "fp32" if config.engine.precision == "fp32" else "bf16"
    call = AttentionCall(model.heads, model.kv_heads, width, width, dtype, backend=config.parallel.attention)
    call = replace(call, softcap=model.softcap > 0, sinks=model.sinks, dropout=model.dropout > 0)
    call = replace(call, deterministic=config.debug.deterministic)
    windows = sorted({window > 0 for window in model.windows or [0]})
    return [replace(call, window=window, documents=documents) for window in windows for documents in (False, True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", metavar="SHAPE|key=value", help="shapes, or options of a run as for ringspan check")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the shapes (default %(default)s)")
    parser.add_argument("--not-causal", action="store_true", help="the shapes have no causal mask")
    for name in ("window", "documents", "softcap", "sinks", "dropout", "deterministic"):
        parser.add_argument(f"--{name}", action="store_true", help=f"the shapes are called with {name}, of any value")
    parser.add_argument("--backend", choices=("auto", "triton", "hopper"), default="auto", help="of the shapes")
    parser.add_argument("--target", choices=TARGETS, help="compile for this chip (default: that of this machine's GPU)")
    parser.add_argument("--processes", type=int, default=num_cores(), help="compiling processes (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
