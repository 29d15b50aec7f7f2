"""How many threads are settled on, by the times that a backend shows."""

from __future__ import annotations

import numpy as np
import pytest

from pipeinfer.backends import exact_width
from pipeinfer.backends.exact_width import settle_threads
from pipeinfer.backends.llamacpp import backend as llama_backend
from pipeinfer.core.types import make_rows
from pipeinfer.llama import binding
from tests.kit.random_model import RandomSpec, write_random_model


class Timed:
    """Takes so many seconds for a row, by the number of threads."""

    class info:
        first = True
        n_embd = 4

    def __init__(self, seconds):
        self.seconds, self.threads, self.tried, self.now = seconds, 0, [], 0.0

    def perf_counter(self):
        return self.now

    def use_threads(self, count):
        self.threads = count
        self.tried.append(count)

    def decode(self, rows, hidden=None):
        self.now += self.seconds[self.threads]

    def seq_rm(self, *_):
        pass


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(exact_width, "cache_directory", lambda: tmp_path)


@pytest.mark.parametrize(("seconds", "chosen"), [
    ({8: 0.004, 4: 0.008, 2: 0.016, 1: 0.03}, 8),
    ({8: 0.008, 4: 0.008, 2: 0.016, 1: 0.03}, 4),
    ({8: 0.03, 4: 0.02, 2: 0.01, 1: 0.01}, 1),
    ({1: 0.005}, 1),
])
def test_the_fewest_that_are_as_fast_are_used(seconds, chosen, monkeypatch):
    backend = Timed(seconds)
    monkeypatch.setattr(exact_width, "time", backend)
    assert settle_threads(backend, max(seconds), ["a model"]) == chosen
    assert backend.threads == chosen
    again = Timed(dict.fromkeys(seconds, 0.0))
    assert settle_threads(again, max(seconds), ["a model"]) == chosen
    assert (again.tried, again.now) == ([chosen], 0.0), "a quiet result is used again"
    assert settle_threads(backend, max(seconds), ["another"]) == chosen


def test_a_single_thread_is_no_choice_and_is_not_measured(monkeypatch):
    backend = Timed({})
    monkeypatch.setattr(exact_width, "time", backend)
    assert settle_threads(backend, 1, []) == 1
    assert backend.tried == [1]
    assert backend.now == 0.0


class Disturbed(Timed):
    """Another program has one of two cores during the first `rounds` looks at them."""

    def __init__(self, rounds):
        super().__init__({2: 0.004, 1: 0.006})
        self.rounds, self.lost = rounds, 0.0

    def decode(self, rows, hidden=None):
        busy = len(self.tried) <= 2 * self.rounds
        self.lost += 0.002 * busy
        self.now += 0.008 if busy and self.threads == 2 else self.seconds[self.threads]


@pytest.mark.parametrize(("rounds", "chosen"), [(0, 2), (3, 2), (9, 2), (1000, 1)])
def test_a_neighbour_that_leaves_in_time_does_not_take_a_thread(rounds, chosen, monkeypatch):
    backend = Disturbed(rounds)
    monkeypatch.setattr(exact_width, "time", backend)
    monkeypatch.setattr(exact_width, "waited", lambda: backend.lost)
    assert settle_threads(backend, 2, []) == chosen
    assert len(backend.tried) <= 40  # it is not waited for without end
    assert backend.now < 1.2
    backend.rounds, backend.now, backend.tried = 0, 0.0, [0]
    assert settle_threads(backend, 2, []) == 2, "what was disturbed is not kept"


def test_a_slow_model_is_not_measured_for_long(monkeypatch):
    """Two rounds of three decodes of 0.3 s would take another 3.6 s."""
    backend = Timed({2: 0.3, 1: 0.33})
    monkeypatch.setattr(exact_width, "time", backend)
    assert settle_threads(backend, 2, []) == 2
    assert backend.now < 7


def test_hopeless_numbers_are_not_tried(monkeypatch):
    backend = Timed({8: 0.004, 4: 0.012, 2: 1e9, 1: 1e9})
    monkeypatch.setattr(exact_width, "time", backend)
    assert settle_threads(backend, 8, []) == 8
    assert set(backend.tried) == {8, 4}


def test_the_number_of_threads_does_not_change_a_bit(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_backend, "_LONG", 641)
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=3, qtype="Q8_0"))
    backend = llama(path, n_ctx=1024, n_seq_max=1, n_threads=2)
    found = []
    for count in (2, 1):
        backend.use_threads(count)
        assert binding.llama_n_threads(backend._ctx) == count
        for start in range(0, 640, 64):
            backend.decode(make_rows([(i % 50, i, (0,), False)
                                      for i in range(start, start + 64)]))
        found.append(backend.decode(make_rows([(7, 640, (0,), True)])))
        for position, threads in ((640, count), (641, 2), (600, count)):
            backend.seq_rm(0, position, 1 << 30)
            backend.decode(make_rows([(7, position, (0,), True)]))
            assert binding.llama_n_threads(backend._ctx) == threads
        backend.seq_rm(0, 0, 1 << 30)
    assert np.array_equal(*found)
