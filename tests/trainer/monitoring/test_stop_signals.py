"""Stop signals of one process; tests/trainer/test_run.py has whole runs."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ringspan import ROOT
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


BUSY = """
from ringspan.trainer.monitoring.stop_signals import StopSignals
signals = StopSignals()
print("ready", flush=True)
import hashlib
hashlib.pbkdf2_hmac("sha512", b"a", b"b", 60_000_000)  # a minute in C, without a bytecode
"""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_signals_are_named_and_a_second_ctrl_c_ends_a_long_operator_at_once(number: int, name: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.stderr.readline()
    assert process.stderr.readline().startswith(f"{name}: saving, then stopping; {name} again")
    time.sleep(1.1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT and time.monotonic() - began < 5
