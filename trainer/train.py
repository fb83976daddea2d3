"""Train a GPT from a config: the groups of conf/, an experiment, and overrides on the command line.

ringspan launch experiment=gpt2_124m optim.lr=3e-4                       the ranks of this machine
torchrun --nproc-per-node=4 -m ringspan.trainer.train parallel.ring=4    ranks that torchrun starts
"""

import contextlib
import os
import sys
import traceback
from datetime import datetime
from typing import NoReturn

from ringspan.trainer.config import compose, rank_variables
from ringspan.trainer.monitoring import console, supervised

PROGRAM = "ringspan train"


def main(argv: list[str] | None = None) -> int:
    supervised.watch()
    console.protect()
    composed = compose.main(PROGRAM, __doc__, argv)
    if problem := rank_variables.problem(joins=True):
        compose.fail(PROGRAM, compose.ConfigError(problem))
    # Long sequences need nearly all of the memory, and fixed segments of other sizes would fragment it. CUDA reads this
    # variable when it starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return run(composed)  # imports torch, which takes seconds; compose.main has reported an invalid config already


def run(composed: compose.Composed) -> int:
    """Train as one rank.

    Returns:
        0 if the run ended or was asked to stop, 1 if it failed or its last step is not saved. A run that cannot start exits
        the process: with code 3 if none of its checkpoints is whole, else with code 2.
    """
    from ringspan.trainer.checkpoint import run_folder
    from ringspan.trainer.checkpoint.replicas import ReplicasDifferError
    from ringspan.trainer.data.cache import Damaged
    from ringspan.trainer.loop import DifferentSamples, TooManyBadSteps, train
    from ringspan.trainer.run import Run

    try:
        job = Run(composed)
    except ValueError as error:
        run_folder.discard_unused()
        if isinstance(error, compose.ConfigError):  # equal on all ranks: rank 0 prints it
            with contextlib.suppress(SystemExit):
                compose.fail(PROGRAM, error)
        else:
            print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 2))  # gloo's threads are running, and an ordinary exit would abort in them
    except Exception as error:
        hint = "out of memory while the run starts: use more ranks, a smaller model or a larger engine.zero; "
        first_line = (str(error).strip() or "no message").splitlines()[0]
        _crash(error, composed, f"{hint}{first_line}" if _is_out_of_memory(error) else "")
    failed = False
    try:
        try:
            finished = train(job)
            if finished:
                job.finish()
            elif not job.unsaved and job.position.step:
                job.tracker.print(f"saved step {job.position.step:,}; the same command continues from it")
            elif not job.unsaved:
                job.tracker.print("no step was completed; the same command starts again")
        except (TooManyBadSteps, DifferentSamples, ReplicasDifferError) as error:
            job.tracker.print(f"stopped: {error}")
            failed = True
        job.signals.ignore_after_close()
        job.close(failed)
    except Damaged as error:  # of this rank's data
        print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {error}; {job.how_to_continue()}", file=sys.stderr, flush=True)
        os._exit(1)
    except Exception as error:
        _crash(error, composed, job.out_of_memory() if _is_out_of_memory(error) else "")
    return int(failed or bool(job.unsaved))


def _is_out_of_memory(error: Exception) -> bool:
    """torch's error on a GPU, Python's, and the RuntimeError of torch's allocator on a CPU."""
    names = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)
    return names or "DefaultCPUAllocator" in str(error)


def _crash(error: Exception, composed: compose.Composed, text: str = "") -> NoReturn:
    """Report an error in one line, write its traceback to a file, and exit.

    The other ranks wait in a collective; the supervisor, which prints the line of the first rank, or torchrun ends them then.
    """
    rank = os.environ.get("RANK", "0")
    first_line = (str(error).strip() or "no message").splitlines()[0]
    if not text:
        place = supervised.where()
        text = f"{type(error).__name__}: {first_line}" + f"; in {place}" * (place not in first_line)
    where = _write_traceback(composed, rank)
    if not where:
        traceback.print_exc()
    if not supervised.report(f"{text}{where}"):
        print(f"{PROGRAM}: rank {rank}: {text}{where}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _write_traceback(composed: compose.Composed, rank: str) -> str:
    """Append the traceback to a file of this rank in the run's folder; return text that names it, or "" without a folder."""
    from ringspan.trainer.checkpoint import run_folder
    from ringspan.trainer.run_messages import short_path

    with contextlib.suppress(OSError):
        path = run_folder.choose(composed.config) / f"traceback-rank-{rank}.txt"
        with path.open("a") as file:
            file.write(f"{datetime.now().astimezone().isoformat(' ', 'seconds')}\n{traceback.format_exc()}\n")
        return f"; the traceback is in {short_path(path)}"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
