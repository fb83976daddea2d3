"""The command `ringspan`: dispatches to the programs of the sub-packages, each of which has its own --help."""

import difflib
import importlib
import importlib.util
import io
import os
import select
import sys

from ringspan import __version__

COMMANDS = {  # command: (module with main(argv), what it does)
    "launch": ("ringspan.launch.__main__", "start the ranks of this machine and train"),
    "train": ("ringspan.trainer.train", "train as one rank; torchrun … -m ringspan.trainer.train starts several"),
    "experiments": ("ringspan.trainer.config.experiments", "list the experiments: model, length, GPUs"),
    "check": ("ringspan.trainer.check", "plan a run: memory, step time, the longest sequence that fits"),
    "evaluate": ("ringspan.trainer.evaluation.command", "evaluate a checkpoint on long-context tasks: tables, JSON, a figure"),
    "tokenizer": ("ringspan.trainer.data.train_tokenizer", "train a tokenizer on installed packages or on text"),
    "generate": ("ringspan.trainer.generate", "generate text from a checkpoint"),
    "export": ("ringspan.trainer.export", "write a checkpoint as Hugging Face weights"),
    "results": ("ringspan.trainer.reports.results", "report runs: speed, memory, loss curves"),
    "compare": ("ringspan.trainer.reports.compare", "compare runs, also while they train: table, curves, an HTML page"),
    "parity": ("ringspan.trainer.parity", "measure that sharding does not change the loss"),
    "completion": ("ringspan.launch.completion", "print a script that completes commands and options: bash or zsh"),
    "warmup": ("ringspan.launch.warmup", "compile the attention kernels of a run or of shapes before its first step"),
    "doctor": ("ringspan.launch.doctor", "check this machine for training"),
    "bench kernels": ("ringspan.kernels.bench.__main__", "benchmark attention on one GPU"),
    "bench first-call": ("ringspan.kernels.bench.first_call", "time a process's first forward and backward"),
    "bench matmul": ("ringspan.kernels.bench.matmul", "measure matmuls by shape, for ringspan check"),
    "bench ring": ("ringspan.parallel.bench.__main__", "benchmark the ring; start it with torchrun"),
    "bench rehearse": ("ringspan.parallel.bench.rehearse", "time one rank of a ring on one GPU, with modelled transfers"),
    "bench tune": ("ringspan.kernels.bench.tune", "measure tile sizes"),
}
FIRST_STEPS = """
First steps:
  ringspan experiments                        what can be trained
  ringspan launch experiment=laptop           train a small model, in about a minute, also without a GPU
  ringspan compare runs/*                     compare runs"""
TRAIN_EXTRA = ("hydra", "omegaconf", "deepspeed", "wandb")  # packages of ringspan[train]
NEEDS_TRAIN_EXTRA = (
    "experiments",
    "completion",
    "launch",
    "train",
    "check",
    "evaluate",
    "generate",
    "export",
    "results",
    "compare",
    "parity",
    "tokenizer",
)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: ringspan COMMAND [options]", "", *lines, "", "ringspan COMMAND --help has the options of each.", FIRST_STEPS]
    )


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters that a table has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return run_command(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        if not any(events & select.POLLERR for _, events in poll.poll(0)):
            raise  # another pipe is broken
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has closed it, and Python's exit flushes it
        return 1


def run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"ringspan {__version__}")
        return 0
    size = 2 if argv[0] == "bench" else 1
    name, rest = " ".join(argv[:size]), argv[size:]
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f"; did you mean `ringspan {nearest[0]}`?" if nearest else ""
        print(f"ringspan: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    if name in NEEDS_TRAIN_EXTRA and (missing := [p for p in TRAIN_EXTRA if importlib.util.find_spec(p) is None]):
        print(f'ringspan {name} needs {", ".join(missing)}: pip install "ringspan[train]"', file=sys.stderr)
        return 2
    return importlib.import_module(COMMANDS[name][0]).main(rest) or 0


if __name__ == "__main__":
    raise SystemExit(main())
