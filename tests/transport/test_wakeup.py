"""What ends a wait, from threads and from signal handlers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from pipeinfer.transport.base import Wakeup

STORM = """
import faulthandler, signal, time
from pipeinfer.transport.base import Wakeup
faulthandler.dump_traceback_later(20, exit=True)
wakeup, rings = Wakeup(), 0
def ring(*_):
    global rings
    rings += 1
    wakeup.set()
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    wakeup.set()
    wakeup.wait(0.0)
    wakeup.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
print(rings)
"""


def test_a_handler_that_interrupts_its_own_thread_does_not_block():
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_what_is_set_before_or_during_a_wait_ends_it():
    wakeup = Wakeup()
    assert not wakeup.wait(0.01)
    wakeup.set()
    assert wakeup.wait(10.0)
    wakeup.clear()
    assert not wakeup.is_set()
    threading.Timer(0.05, wakeup.set).start()
    assert wakeup.wait(30.0)


def test_setting_often_leaves_nothing_behind():
    wakeup = Wakeup()
    for _ in range(1000):
        wakeup.set()
    wakeup.clear()
    assert not wakeup.wait(0.0)


def test_no_ring_is_lost_between_threads():
    wakeup, seen, sent = Wakeup(), [0], [0]

    def send():
        for _ in range(2000):
            sent[0] += 1
            wakeup.set()

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + 30
    while seen[0] < 2000 and time.monotonic() < deadline:
        if wakeup.wait(0.5):
            wakeup.clear()
            seen[0] = sent[0]
    thread.join()
    assert seen[0] == 2000


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_shortest_wait_ends():
    """One in some thousand of `queue.SimpleQueue` does not."""
    for timeout in (1e-6, 1e-5):
        for _ in range(30_000):
            assert not Wakeup().wait(timeout)
