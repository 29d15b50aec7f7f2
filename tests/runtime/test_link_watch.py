"""A head whose stages do not hear each other finds out which link is cut, and blames nobody who
computes. By a clock of the test's own."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from pipeinfer.core.control import Standing
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import Tag
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Request
from pipeinfer.errors import LinkCut, TransportTimeout
from pipeinfer.runtime import head as heads
from pipeinfer.runtime import link_watch
from pipeinfer.runtime import stage as stages
from pipeinfer.scheduler.events import Emit
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.transport.inproc import local_ports
from tests.kit.toy import ToyBackend, ToySpec

SPEC = ToySpec(n_vocab=16, n_layers=3, n_embd=8)
TIMEOUT = 16.0


class Cut:
    """A port that sends a node only so many transactions."""

    def __init__(self, inner, node, after):
        self._inner, self._node, self._left = inner, node, after

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, dest, tag, message):
        if dest == self._node:
            self._left -= 1
            if self._left < 0:
                return
        self._inner.send(dest, tag, message)


class Job:
    """A head with a request, and three stages of one layer each, worked on by turns. busy: a stage
    that takes its messages no more once it has taken so many."""

    def __init__(self, monkeypatch, source=0, node=0, after=0, busy=(0, 0), asks=True):
        self.now, self.tokens = 1e3, []
        clock = SimpleNamespace(monotonic=self._look, time=time.time,
                                perf_counter=time.perf_counter)
        for module in (heads, link_watch, stages):
            monkeypatch.setattr(module, "time", clock)
        ports = local_ports(4)
        for port in ports:  # each is a rank
            port.rank_of = int
        if source:
            ports[source] = Cut(ports[source], node, after)
        self.stages = {k: stages.Stage(ports[k], Grid.plain(3), ToyBackend.load(SPEC, k - 1, k))
                       for k in (1, 2, 3)}
        self.head = heads.Head(ports[0], Grid.plain(3), Scheduler(
            Limits(n_ctx=64, policy=Policy.ITERATIVE)), None, timeout=TIMEOUT)
        self._busy, self._left = busy
        if asks:
            self.head.submit(Request(0, (5, 6, 7), 30))

    def _look(self):
        self.now += 1e-6
        return self.now

    def hear(self):
        """Let the head handle what has come, and look at its deadline once."""
        while (news := self.head.next_news(1.5e-6)) is not None:
            self.tokens += [news.choice.token] if isinstance(news, Emit) else []

    def turn(self, seconds=0.0):
        self.now += seconds
        for number, stage in self.stages.items():
            while True:
                if number == self._busy:
                    if not self._left:
                        break
                    self._left -= 1
                if (message := stage._take()) is None:
                    break
                stage._handle(message)
        self.hear()

    def run(self, seconds, until=30):
        for _ in range(200):
            self.turn(seconds)
            if len(self.tokens) >= until:
                return


@pytest.fixture
def whole(monkeypatch):
    job = Job(monkeypatch)
    job.run(1.0)
    assert len(job.tokens) == 30
    return job.tokens


@pytest.mark.parametrize("link", [(1, 2), (2, 3)])
def test_the_nodes_of_a_cut_link_are_named_long_before_the_deadline(whole, monkeypatch, link):
    job = Job(monkeypatch, *link, after=12)
    with pytest.raises(LinkCut, match=f"rank {link[0]} sends .* to rank {link[1]} ") as found:
        job.run(1.0)
    assert (found.value.source, found.value.target) == link
    assert found.value.seconds < TIMEOUT / 2
    assert 0 < len(job.tokens) < 30
    assert job.tokens == whole[:len(job.tokens)]


def test_a_cut_link_is_reported_once_and_the_deadline_restarts(monkeypatch):
    job, losses = Job(monkeypatch, 1, 2, after=12), []
    job.head.on_loss = lambda loss: losses.append((loss.source, loss.target))
    for _ in range(100):
        job.turn(1.0)
        if losses:
            break
    before = job.now
    for _ in range(100):  # nothing is done about it
        job.turn(1.0)
        if len(losses) == 2:
            break
    assert losses == [(1, 2)] * 2
    assert job.now - before > TIMEOUT / 4


def test_a_long_computation_is_not_taken_for_a_cut_link(monkeypatch):
    job = Job(monkeypatch, busy=(2, 6))
    with pytest.raises(TransportTimeout, match=r"waited 16\.0 s for RESULT"):
        job.run(1.0)


def test_a_late_result_is_still_delivered(whole, monkeypatch):
    """All of it a little earlier than what would count as lost."""
    job = Job(monkeypatch)
    for _ in range(400):
        for stage in job.stages.values():  # a stage at a time: the others have been idle for long
            job.now += TIMEOUT / 5
            while (message := stage._take()) is not None:
                stage._handle(message)
            job.hear()
        if len(job.tokens) == 30:
            break
    assert job.tokens == whole


def test_stages_that_took_long_to_load_have_the_whole_deadline(monkeypatch):
    job = Job(monkeypatch)
    job.turn()
    job.now += 2 * TIMEOUT
    job.head.restart(Grid.plain(3), job.head.scheduler.limits, None)
    job.now += 0.9 * TIMEOUT
    job.hear()
    job.now += 0.2 * TIMEOUT
    with pytest.raises(TransportTimeout):
        job.hear()


def test_a_message_through_all_stages_shows_that_all_links_are_there(monkeypatch):
    job = Job(monkeypatch, asks=False)
    port, watch = job.head._port, link_watch.LinkWatch(job.head._port, Grid.plain(3), 4.0)
    watch.greet()
    for stage in job.stages.values():
        assert not watch.all_reached
        stage._handle(stage._take())
        watch.hear(port.take(Tag.RESULT).message)
    assert watch.all_reached


def test_a_reply_to_an_earlier_probe_accuses_no_node(monkeypatch):
    """Stages that were held up answer all questions at once, when they have caught up since."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr(link_watch, "time", clock)
    ports, grid = local_ports(3), Grid.plain(2)
    watch = link_watch.LinkWatch(ports[0], grid, 4.0)

    def answers(late):
        """Of two stages, the second of which has not got what the first has."""
        asked = [ports[node].take(Tag.CANCEL).message.number for node in (1, 2)]
        for node, number in zip((1, 2), asked, strict=True):
            watch.hear(Standing(grid.name(node), number - late, 3 - node, 9.0))

    for late in (1, 1, 1, 0):
        assert watch.turn() is None
        answers(late)
        clock.now += 1.0
    assert watch.turn() is None
    answers(0)
    clock.now += 1.0
    assert watch.turn() == (1, 2)
