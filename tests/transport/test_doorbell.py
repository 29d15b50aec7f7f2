"""Bells wake, count, and survive strangers and full queues."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from pipeinfer.transport.doorbell import Doorbell

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@pytest.fixture
def bells():
    made = [Doorbell(f"pipeinfer-test-{os.getpid()}-{k}") for k in range(2)]
    yield made
    for bell in made:
        bell.close()


def name(k):
    return f"pipeinfer-test-{os.getpid()}-{k}"


def test_a_ring_is_counted_once(bells):
    assert bells[0].ring(name(1))
    assert not bells[0].drain()
    assert bells[1].drain()
    assert bells[1].rung == 1
    assert not bells[1].drain()


def test_a_sleeper_wakes_for_rings_and_wakes(bells):
    for wake in (lambda: bells[0].ring(name(1)), bells[1].wake):
        thread = threading.Timer(0.05, wake)
        thread.start()
        start = time.monotonic()
        bells[1].sleep(20)
        assert time.monotonic() - start < 15
        thread.join()
        assert bells[1].drain()
    assert bells[1].rung == 1  # a wake announces no message


def test_ringing_a_doorbell_without_an_owner_does_nothing(bells):
    assert not bells[0].ring(name(7))


def test_a_full_queue_loses_rings_and_blocks_nobody(bells):
    for _ in range(5000):
        assert bells[0].ring(name(1))
    assert bells[1].drain()
    assert 0 < bells[1].rung <= 5000
