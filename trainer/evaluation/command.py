"""Evaluate a checkpoint: needle tasks by length and depth, or loss on held-out packages, as tables, JSON and a figure.

    ringspan evaluate runs/x --suite long --lengths 4k 8k 16k 32k --json x.json --plot x.png
    ringspan evaluate runs/x --suite text --lengths 4k 32k --context 4k
    torchrun --nproc-per-node=2 -m ringspan.trainer.evaluation.command runs/x --lengths 128k     under a ring of two

Every rank holds the whole model. --cut-ring is a control: each rank attends to its own shard only, in contiguous shards, so
that an answer beyond a shard can be right by chance alone. --rope evaluates with another scaling of positions than the
checkpoint's. The result is also recorded in the run's folder, where `ringspan results` finds it.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringspan.kernels.bench.plots import pyplot
from ringspan.trainer.checkpoint.load_model import RestoredModel
from ringspan.trainer.config import validate
from ringspan.trainer.config.compose import ConfigError, fail, set_options
from ringspan.trainer.config.schema import Config, Rope
from ringspan.trainer.data.needles import FAMILIES, SEEN
from ringspan.trainer.data.tokenizer import Tokenizer
from ringspan.trainer.distributed import DistributedContext
from ringspan.trainer.evaluation import long_suite, recorded, text_loss
from ringspan.trainer.evaluation.cut_ring import model_attention

PROGRAM = "ringspan evaluate"


def _tokens(text: str) -> int:
    """Read 4096, 4k or 1M."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m") else (text, "")
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"{text}: write a number of tokens, such as 4096, 32k or 1M")
    return int(number) * {"": 1, "k": 1024, "m": 1024**2}[unit]


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: it must be a number of at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    parser.add_argument("checkpoint", metavar="RUN", help="a run's folder, for its newest checkpoint, or a checkpoint")
    parser.add_argument("--suite", choices=("long", "text"), default="long", help="what to evaluate (default %(default)s)")
    parser.add_argument(
        "--lengths", nargs="+", type=_tokens, metavar="TOKENS", help="tokens per sequence, such as 4k 32k (default the run's)"
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="families (default all)")
    parser.add_argument(
        "--sequences",
        type=_count,
        default=100,
        help="sequences per family and length, or windows of text (default %(default)s)",
    )
    parser.add_argument("--context", type=_tokens, default=4096, help="text: tokens of the short context (default %(default)s)")
    parser.add_argument("--cache", default="~/.cache/ringspan", help="text: folder of tokenized text (default %(default)s)")
    parser.add_argument("--questions", type=_count, default=16, help="questions per sequence (default %(default)s)")
    parser.add_argument(
        "--seen",
        nargs="+",
        choices=SEEN,
        default=[],
        help="long: take templates or keys of training (of this version), to find out what a model does not transfer from",
    )
    parser.add_argument("--micro-batch", type=_count, default=1, help="sequences per forward (default %(default)s)")
    parser.add_argument("--ring", type=int, default=0, help="ranks of a ring (default all; the others share the sequences)")
    parser.add_argument(
        "--rope",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="options of rope in the place of the checkpoint's, such as attention_factor=1.6, or kind=yarn factor=8 for a "
        "model without an extension",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default %(default)s)")
    parser.add_argument("--cut-ring", action="store_true", help="control: each rank attends to its own shard only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the figure")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        restored, tokenizer, lengths = _open(args)
        config = Config()
        config.parallel.device, config.parallel.ring = args.device, args.ring
        distributed = DistributedContext(config)
    except (ValueError, OSError, ImportError) as error:
        fail(PROGRAM, error)
    try:
        result = distributed.call_on_all_ranks(partial(_evaluate, args, restored, tokenizer, lengths, distributed))
    except ConfigError as error:
        fail(PROGRAM, error)
    finally:
        distributed.close()
    if distributed.rank == 0:
        _write(args, result, restored.folder.parent.parent)
    return 0


def _open(args: argparse.Namespace) -> tuple[RestoredModel, Tokenizer, list[int]]:
    """Open the checkpoint, and raise a ValueError for what it cannot be evaluated on."""
    restored = RestoredModel(args.checkpoint)
    if not restored.has_tokenizer:
        raise ValueError(
            f"checkpoint={args.checkpoint!r} was trained on token shards of an unknown tokenizer, and the suite is text: "
            "train with the tokenizer that made the shards: tokenizer.kind=hf tokenizer.path=…"
        )
    tokenizer, model = restored.tokenizer(), restored.model
    if args.rope:
        restored.rope = _changed_rope(restored, args.rope)
    if tokenizer.size > model.vocabulary:
        raise ValueError(
            f"model.vocabulary={model.vocabulary}: the tokenizer has {tokenizer.size} tokens; train with model.vocabulary=0"
        )
    lengths = sorted(set(args.lengths or [restored.length]))
    if model.positions == "learned" and lengths[-1] > model.max_positions:
        raise ValueError(
            f"--lengths {lengths[-1]}: the model has learned {model.max_positions} positions; evaluate at most that, or "
            "train with model.positions=rope, which rope=yarn extends"
        )
    if args.suite == "long":
        for length in lengths:  # raises if the suite does not fit
            long_suite.suite_data(tokenizer, length, args.families, args.questions, seen=args.seen)
    elif args.plot or args.cut_ring or args.seen or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "--suite text: it has neither figure nor needles, on one rank; leave out --plot, --cut-ring, --seen, torchrun"
        )
    for path in (args.json, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist; make it first")
    if args.plot:
        pyplot()  # reports a missing matplotlib before any work
    return restored, tokenizer, lengths


def _changed_rope(restored: RestoredModel, arguments: list[str]) -> Rope:
    """Return the checkpoint's rope with the options of --rope.

    Another kind starts from the defaults of its options, with the model's length of pretraining.

    Raises:
        ValueError: an option is unknown, wrong, or of another kind of scaling.
    """
    own: Rope = restored.rope
    rope: Rope = set_options(own, arguments)
    if rope.kind != own.kind:
        with_length = "yarn", "llama3"
        start = Rope(base=own.base)
        if rope.kind in with_length:
            start.original_length = own.original_length if own.kind in with_length else restored.length
        rope = set_options(start, arguments)
    config = Config()
    config.model, config.rope, config.data.length = restored.model, rope, restored.length
    names, unused = _names(arguments), validate.unused_options(config)
    problems = [*validate.validate_rope(rope), *validate.validate_model(config)]
    problems += filter(None, (unused.get(f"rope.{name}") for name in names))
    if problems:
        raise ValueError("; ".join(problems))
    return rope


def _names(arguments: list[str]) -> list[str]:
    """Return the names of `key=value` arguments, sorted."""
    return sorted({text.partition("=")[0] for text in arguments})


def _evaluate(
    args: argparse.Namespace, restored: RestoredModel, tokenizer: Tokenizer, lengths: list[int], distributed: DistributedContext
) -> dict[str, Any]:
    device, mesh = distributed.device, distributed.mesh
    model = restored.build(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows: list[dict[str, Any]] = []
    seconds = {}
    for length in lengths:
        began = time.perf_counter()
        layout = mesh.layout("contiguous" if args.cut_ring else "zigzag", length)
        if args.suite == "long":
            model.attention = model_attention(layout, mesh, cut=args.cut_ring)
            data = long_suite.suite_data(tokenizer, length, args.families, args.questions, seen=args.seen)
            ranks = mesh.data_rank, mesh.data, distributed.sum
            positions = layout.positions(mesh.context_rank)
            rows += long_suite.score(model, data, args.sequences, positions, device, args.micro_batch, *ranks)
        else:
            data, context = text_loss.text_data(tokenizer, length, args.cache), min(args.context, length // 4)
            rows.append(text_loss.text_loss(model, data, args.sequences, context, device))
        seconds[str(length)] = round(time.perf_counter() - began, 1)
        if distributed.rank == 0:
            print(f"{long_suite.short(length)}: {seconds[str(length)]} s", file=sys.stderr, flush=True)
    state = restored.reader.state.get("model", {})
    sources = state.get("data", {}).get("sources", {}).values()
    trained = {name for source in sources if source.get("kind") == "needles" for name in source.get("families", [])}
    return dict(
        kind=f"{args.suite}-suite",
        checkpoint=f"{restored.folder.parent.parent.name}/{restored.folder.name}",
        trained_length=restored.length,
        trained_families=sorted(trained),
        rope=dict(kind=restored.rope.kind, factor=restored.rope.factor),
        rope_changes={name: getattr(restored.rope, name) for name in _names(args.rope)},
        ranks=distributed.world,
        ring=mesh.ring,
        cut_ring=args.cut_ring,
        seen=[name for name in SEEN if name in args.seen],
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        sequences=args.sequences,
        data={name: source.get("sha256") for name, source in state.get("fingerprint", {}).items()},
        seconds=seconds,
        rows=rows,
    )


def _write(args: argparse.Namespace, result: dict[str, Any], run: Path) -> None:
    """Print the result, record it in the run's folder, and write the files that were asked for."""
    print(recorded.text(result))
    if (run / "config.yaml").is_file():
        try:
            recorded.append(run, result)
        except OSError as error:
            print(f"{run}: not recorded for ringspan results: {error.strerror}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten: {args.json}")
    if args.plot:
        recorded.draw(pyplot(), result, args.plot)
        print(f"\nplotted: {args.plot}")


if __name__ == "__main__":
    sys.exit(main())
