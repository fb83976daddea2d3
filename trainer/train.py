"""Trains a GPT as its config says: conf/, an experiment, and what the command line changes.

ringspan launch experiment=gpt2_124m optim.lr=3e-4             the ranks of this machine
torchrun --nproc-per-node=4 -m ringspan.trainer.train parallel.ring=4    ranks that you start yourself
"""

import contextlib
import os
import sys
import traceback

from ringspan.trainer.config import compose

PROGRAM = "ringspan train"


def main(argv: list[str] | None = None) -> int:
    composed = compose.main(PROGRAM, __doc__, argv)
    # Long sequences want all of the memory: without this, blocks of other sizes leave holes. Read when CUDA starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return run(composed)  # torch is imported only now: a mistake has been told by then


def run(composed: compose.Composed) -> int:
    """Exit code 0 for a run that ended or was asked to stop, 1 for one that failed or is not saved, 2 for what cannot be."""
    from ringspan.trainer.loop import TooManyBadSteps, train
    from ringspan.trainer.run import Run

    try:
        job = Run(composed)
    except ValueError as error:
        if isinstance(error, compose.ConfigError):  # the same on all ranks: said once
            with contextlib.suppress(SystemExit):
                compose.fail(PROGRAM, error)
        else:
            print(f"{PROGRAM}: rank {os.environ.get('RANK', 0)}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)  # gloo's threads are there already, and an ordinary exit would abort in them
    try:
        finished = train(job)
        if finished:
            job.finish()
        elif not job.unsaved:
            job.tracker.say(f"saved step {job.position.step:,}; the same command goes on from there")
    except TooManyBadSteps as error:
        job.tracker.say(f"stopped: {error}")
        job.close(failed=True)
        return 1
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others wait in a collective; torchrun ends them as soon as one is gone
    job.close()
    return int(bool(job.unsaved))


if __name__ == "__main__":
    raise SystemExit(main())
