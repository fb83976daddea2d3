"""torchrun for the ranks of one machine, without torchrun's own error report: the rank that failed has printed its message.

It adds the one fact that no rank can report: which rank was killed, and by which signal. The exit code is the failed rank's.
`ringspan launch` does not use it: torchrun opens its store on all interfaces.
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ringspan.launch.supervisor import RESUME_HINT


def main(argv: list[str] | None = None) -> int:
    """Run torchrun with these arguments; return the exit code."""
    logging.disable(logging.ERROR)  # torchrun's own; the ranks are separate processes
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        return report_failures(error.failures)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def report_failures(failures: dict[int, ProcessFailure]) -> int:
    """Print which rank was killed, if any, and return the exit code.

    A killed rank is the first cause, because the other ranks then fail too. torchrun itself ends ranks with SIGTERM.
    """
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            cause = " (if no user sent it, the machine was out of memory)" if name == "SIGKILL" else ""
            print(f"rank {rank} was ended by {name}{cause}; {RESUME_HINT}", file=sys.stderr)
            return 128 - failure.exitcode
    code = min(failures.values(), key=lambda failure: failure.timestamp).exitcode
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main())
