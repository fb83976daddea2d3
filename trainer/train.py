"""Train a GPT from a config: the groups of conf/, an experiment, and overrides on the command line.

ringspan launch experiment=gpt2_124m optim.lr=3e-4                       the ranks of this machine
torchrun --nproc-per-node=4 -m ringspan.trainer.train parallel.ring=4    ranks that torchrun starts
"""

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from ringspan.trainer.config import compose
from ringspan.trainer.monitoring import console, supervised

PROGRAM = "ringspan train"


def main(argv: list[str] | None = None) -> int:
    supervised.watch()
    console.protect()
    composed = compose.main(PROGRAM, __doc__, argv)
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
    from ringspan.trainer.checkpoint.replicas import ReplicasDifferError
    from ringspan.trainer.data.cache import Damaged
    from ringspan.trainer.loop import DifferentSamples, TooManyBadSteps, train
    from ringspan.trainer.run import Run

    try:
        job = Run(composed)
    except ValueError as error:
        if isinstance(error, compose.ConfigError):  # equal on all ranks: rank 0 prints it
            with contextlib.suppress(SystemExit):
                compose.fail(PROGRAM, error)
        else:
            print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 2))  # gloo's threads are running, and an ordinary exit would abort in them
    except Exception as error:
        _crash(error)
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
        job.signals.ignore_after_close()
        job.close(failed=True)
        return 1
    except Damaged as error:  # of this rank's data
        print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {error}; {job.how_to_continue()}", file=sys.stderr, flush=True)
        os._exit(1)
    except Exception as error:
        _crash(error, job.out_of_memory() if type(error).__name__ == "OutOfMemoryError" else "")  # torch's, on a GPU
    job.signals.ignore_after_close()
    job.close()
    return int(bool(job.unsaved))


def _crash(error: Exception, text: str = "") -> NoReturn:
    """Print and report an error, and exit. The other ranks wait in a collective; the supervisor or torchrun ends them then."""
    traceback.print_exc()
    if text:
        print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {text}", file=sys.stderr)
    first_line = (str(error).strip() or "no message").splitlines()[0]
    supervised.report(text or f"{type(error).__name__}: {first_line}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
