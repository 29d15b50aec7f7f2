"""How a rank leaves."""

from __future__ import annotations

import signal
import subprocess
import sys

PUT_OFF = """
import signal, sys
from pipeinfer.cluster.shutdown import put_off
put_off(signal.SIGTERM, 3.0)
print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""


def test_a_stage_works_on_for_a_while_after_the_signal_that_ends_it():
    process = subprocess.Popen([sys.executable, "-c", PUT_OFF], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    process.stdin.write(b"still here\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"still here\n"
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()


BLOCKED = """
import ctypes, signal
from pipeinfer.cluster.shutdown import put_off
put_off(signal.SIGTERM, 0.1)
lock = ctypes.create_string_buffer(64)
library = ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
print("ready", flush=True)
library.pthread_mutex_lock(lock)
"""


def test_one_that_hangs_in_a_library_ends_all_the_same():
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == -signal.SIGKILL
    process.stdout.close()
