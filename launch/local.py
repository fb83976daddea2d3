"""torchrun for the ranks of one machine, without its own report of what went wrong: the rank that failed has told that.

What is added is what no rank can say: which of them was killed, and by what. The exit code is the failed rank's.
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

WAY_ON = "the same command goes on from the last checkpoint, if there is one (checkpoint=often saves some on the way)"


def main(argv: list[str] | None = None) -> int:
    logging.disable(logging.ERROR)  # torchrun's; the ranks are processes of their own
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        return tell(error.failures)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def tell(failures: dict[int, ProcessFailure]) -> int:
    """A killed rank takes the others with it, so it is the first cause; torchrun itself ends ranks with SIGTERM."""
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            why = " (if nobody sent it: the machine was out of memory)" if name == "SIGKILL" else ""
            print(f"rank {rank} was ended by {name}{why}; {WAY_ON}", file=sys.stderr)
            return 128 - failure.exitcode
    code = min(failures.values(), key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
