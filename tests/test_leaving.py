"""How a rank leaves."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LINGERING = """
import signal, time
from pipeinfer.leaving import linger
signal.signal(signal.SIGTERM, linger)
print("ready", flush=True)
try:
    time.sleep(60)
finally:
    print("not reached", flush=True)
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stage_dies_of_the_signal_that_it_puts_off(signals):
    process = subprocess.Popen([sys.executable, "-c", LINGERING], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert out == b""
