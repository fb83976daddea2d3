"""The list of experiments, `ringspan experiments`: model, length, GPUs, and what each shows. Imports no torch.

GPUs are the fewest H200s on which a step fits, by the planner of `ringspan check`; an experiment for a CPU says so itself.
"""

import sys
from typing import NamedTuple

from ringspan.trainer.config import compose
from ringspan.trainer.config.help import CONF, group_choices
from ringspan.trainer.config.mixture import BYTES_VOCABULARY
from ringspan.trainer.monitoring.tracking import with_unit

PROGRAM = "ringspan experiments"


class Experiment(NamedTuple):
    """A line of the list."""

    name: str
    model: str
    weights: str
    length: str
    gpus: str
    about: str


def experiments() -> list[Experiment]:
    """Return all experiments of conf/experiment, the one with the fewest weights first."""
    from ringspan.trainer.planning.flops import parameters
    from ringspan.trainer.planning.machines import MACHINES
    from ringspan.trainer.planning.plans import fewest_gpus

    found = []
    for name in group_choices("experiment", [CONF]):
        config = compose.load([f"experiment={name}"], world_size=1, planning=True).config
        if not config.model.vocabulary:  # the tokenizer's, whose file may be absent
            size = BYTES_VOCABULARY if config.tokenizer.kind == "bytes" else 151_936
            config.model.vocabulary = -(-size // 64) * 64
        if config.model.positions == "learned":
            config.model.max_positions = config.model.max_positions or config.data.length
        weights = parameters(config.model).total
        gpus = fewest_gpus(config, MACHINES["h200"])
        row = Experiment(name, config.model.name, with_unit(weights), f"{config.data.length:,}", str(gpus or "–"), _about(name))
        found.append((weights, row))
    return [row for _, row in sorted(found)]


def _about(name: str) -> str:
    """The first sentence of the comment at the top of an experiment's file."""
    lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
    comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line]
    return comments[0].partition(". ")[0].rstrip(".") if comments else ""


def main(argv: list[str] | None = None) -> int:
    """Print the list."""
    argv = sys.argv[1:] if argv is None else argv
    if argv:
        wanted_help = argv[0] in ("-h", "--help")
        print(
            f"usage: {PROGRAM}\n\n{__doc__}" if wanted_help else f"{PROGRAM}: {argv[0]}: it takes no argument",
            file=sys.stdout if wanted_help else sys.stderr,
        )
        return 0 if wanted_help else 2
    rows = [Experiment("experiment", "model", "weights", "length", "fewest H200s", "what it is"), *experiments()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\nringspan launch experiment=laptop      # trains one; any option can follow, such as steps=50")
    print("ringspan check experiment=NAME hardware=h200 hardware.gpus=4      # plans one")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
