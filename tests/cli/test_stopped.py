"""An interrupt that arrives while a finaliser runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import signal, time
from pipeinfer.cli import chat_loop, terminal
{watch}

class Finalised:
    def __del__(self):
        {lost}

try:
    Finalised()
    for _ in range(200):
        time.sleep(0.05)
except terminal.Stopped:
    print("stopped")
"""


@pytest.mark.slow
@pytest.mark.parametrize("watch", ["terminal.watch_signals()", "chat_loop.Interrupts()"])
def test_an_order_to_end_that_a_finaliser_drops_comes_again(watch):
    script = SCRIPT.format(watch=watch, lost="signal.raise_signal(signal.SIGTERM)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


@pytest.mark.slow
def test_other_errors_of_finalisers_are_reported_as_ever():
    script = SCRIPT.format(watch="chat_loop.Interrupts()", lost="signal.alarm(1); 1 / 0")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False, timeout=60)
    assert "ZeroDivisionError" in done.stderr
