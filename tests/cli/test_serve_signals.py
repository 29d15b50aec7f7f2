"""Signals of `pipeinfer serve` while C code is at work."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, os, signal
from pipeinfer.cli.serve import _Signals
from pipeinfer.cli.terminal import Stopped
signals = _Signals()
ctypes.CFUNCTYPE(None)(lambda: os.kill(os.getpid(), signal.SIGTERM))()
print("went on")
try:
    signals.check()
except Stopped:
    print("stopped")
"""


def test_a_signal_in_a_callback_of_c_code_stops_at_the_next_check():
    """Python drops an exception that a callback raises: llama.cpp's log is one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stdout == "went on\nstopped\n", done.stderr
