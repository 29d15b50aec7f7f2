"""A stage in the head's process whose brief runs the head's own thread does."""

from __future__ import annotations

import threading

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Decode, LaneClose, LaneOpen, RunFinished, Shutdown, Tag
from pipeinfer.core.types import SamplingParams, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.runtime.stage import Stage
from pipeinfer.transport.inproc import local_ports
from pipeinfer.transport.lent import Stuck
from tests.kit.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=16, n_layers=3, n_embd=8)
HEAD, OWN = "head", "stage"


class Watched:
    """A backend that notes which thread computes, and calls `before` first."""

    def __init__(self):
        self.inner, self.before = ToyBackend.load(SPEC, 0, 3), lambda run: None
        self.info, self.capabilities = self.inner.info, self.inner.capabilities
        self.threads = []

    def decode(self, rows, hidden=None, should_stop=None):
        mine = threading.current_thread().name == OWN
        self.threads.append(OWN if mine else HEAD)
        self.before(len(self.threads))
        return self.inner.decode(rows, hidden, should_stop)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Job:
    """A head's port, and a stage in a thread that lends its loop."""

    def __init__(self, *, lends=True, timeout=60.0):
        self.head, port = local_ports(2)
        self.backend, self.ended = Watched(), []
        lent = port.lent() if lends else None
        self.head.borrows = lent
        stage = Stage(port, Grid.plain(1), self.backend, timeout=timeout)

        def serve():
            try:
                stage.serve(lent)
                self.ended.append(None)
            except Exception as error:
                self.ended.append(error)

        self.thread = threading.Thread(target=serve, name=OWN, daemon=True)
        self.thread.start()
        self.head.send(1, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))

    def run(self, run_id, rows, *, speculative=False):
        """Send a run; the tokens that it brings."""
        lanes = (0,) * len(rows)
        self.head.send(1, Tag.TRANSACTION,
                       Decode(run_id, run_id - 1, make_rows(rows), lanes, speculative=speculative))
        for _ in range(100):
            if (envelope := self.head.take(Tag.RESULT)) is not None:
                assert isinstance(envelope.message, RunFinished)
                return [choice.token for choice in envelope.message.choices]
            if self.ended:
                return []
            self.head.wait(1.0)
        raise AssertionError("no result")

    def end(self):
        self.head.send(1, Tag.TRANSACTION, LaneClose(0))
        self.head.send(1, Tag.TRANSACTION, Shutdown())
        while self.head.take(Tag.RESULT) is None:
            self.head.wait(1.0)
        self.thread.join(20)
        assert self.ended == [None]


def texts(job, *, speculative=False):
    found = [job.run(0, [(3, 0, (0,), False), (5, 1, (0,), False), (7, 2, (0,), True)])]
    for k in range(6):
        found.append(job.run(1 + k, [(found[-1][0], 3 + k, (0,), True)],
                             speculative=speculative and k == 0))
    found.append(job.run(7, [(3, 9, (0,), False), (4, 10, (0,), True)]))
    return found


def until_lent(job):
    """Single rows until the head's thread does them (a slow one is not brief); the next run."""
    for k in range(200):
        job.run(k, [(3, k, (0,), True)])
        if job.backend.threads[-1] == HEAD:
            return k + 1
    raise AssertionError("the stage has kept its loop")


def test_the_heads_thread_does_brief_runs_and_the_tokens_are_the_same():
    plain, lent = Job(lends=False), Job()
    assert texts(plain) == texts(lent)
    assert set(plain.backend.threads) == {OWN}
    # a part of a prompt, then the first token: its time tells that further ones are brief
    assert lent.backend.threads[:2] == [OWN, OWN]
    until_lent(other := Job())
    for job in (plain, lent, other):
        job.end()


def test_runs_that_the_head_may_want_to_cancel_stay_with_the_stage():
    job = Job()
    texts(job, speculative=True)
    assert set(job.backend.threads) == {OWN}
    job.end()


def test_an_error_in_the_heads_thread_is_raised_in_the_stages():
    job, where = Job(), []
    at = until_lent(job)

    def fail(run):
        where.append(threading.current_thread())
        raise BackendError("no more")

    job.backend.before = fail
    assert job.run(at, [(3, at, (0,), True)]) == []
    assert len(where) == 1
    assert str(job.ended[0]) == "no more"


def test_a_run_that_hangs_in_the_heads_thread_is_seen_by_the_stages():
    job, seen = Job(timeout=0.5), threading.Event()
    at = until_lent(job)

    def hang(run):
        if threading.current_thread() is not job.thread:
            job.thread.join(20)
            seen.set()

    job.backend.before = hang
    while not seen.is_set():
        job.run(at, [(3, at, (0,), True)])
        at += 1
    with pytest.raises(Stuck, match=rf"run {at - 1} on rank 0 has not ended for 0.5 s: it hangs"):
        raise job.ended[0]
