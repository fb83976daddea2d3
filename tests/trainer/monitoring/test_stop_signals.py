"""Stop signals of one process; tests/trainer/test_run.py has whole runs."""

import os
import signal

from ringspan.trainer.monitoring.stop_signals import StopSignals


def test_signal_sets_the_flag_and_close_restores_the_handlers() -> None:
    previous = signal.getsignal(signal.SIGUSR1)
    signals = StopSignals()
    assert not signals.stop
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.stop and signals.received == "SIGUSR1"
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) == previous
