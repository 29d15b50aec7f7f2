"""What loads side by side in one process is measured in turn."""

from __future__ import annotations

import threading
import time

from pipeinfer.backends import exact_width


def test_two_that_load_at_a_time_are_measured_one_after_the_other():
    inside, most = [0], [0]

    def load():
        with exact_width.alone():
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (inside, most) == ([0], [1])


def test_nobody_waits_for_a_measurement_without_end(monkeypatch):
    monkeypatch.setattr(exact_width, "_PATIENCE", 0.01)
    with exact_width.alone(), exact_width.alone():
        pass
    assert exact_width._turn.acquire(timeout=1)  # the one who did not wait has released nothing
    exact_width._turn.release()
