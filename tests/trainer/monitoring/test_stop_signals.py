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


def test_signals_after_a_run_are_ignored_if_the_process_is_about_to_exit() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    signals = StopSignals()
    signals.ignore_after_close()
    signals.close()
    try:
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, previous)
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
