"""Lookahead parallelism, simulated: as many steps and the same tokens, whoever computes what."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.errors import ContextOverflow, ProtocolError
from pipeinfer.scheduler.events import (
    Abort,
    Emit,
    Finish,
    IssueRun,
    Refuse,
    Restart,
    RunDone,
    Submit,
)
from pipeinfer.scheduler.replicas import ReplicaScheduler, ToNode
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.strategies.test_lookahead import Watched
from tests.support import simulated
from tests.support.sample import examples, matrix
from tests.support.simulated import KvModel, Pipeline, Stage, next_token, plain

LIMITS = Limits(n_ctx=300, policy=Policy.SPECULATIVE, exact_width=16, partitions=40)


class Replicas(Pipeline):
    """Every node has a queue and cells of its own, and answers when it is its turn."""

    def __init__(self, limits, rows, nodes, *, n_vocab, seed=0):
        super().__init__(limits, n_stages=nodes, n_vocab=n_vocab, seed=seed)
        self.scheduler = ReplicaScheduler(limits, rows, nodes)
        self.replicas = [Stage(KvModel(), deque()) for _ in range(nodes)]

    def feed(self, event):
        for instruction in self.scheduler.handle(event):
            match instruction:
                case ToNode(node, inner):
                    self.replicas[node - 1].queue.append(inner)
                    run = self.scheduler.runs.get(getattr(inner, "run_id", -1))
                    if run is not None and not run.chunk and \
                            run.n_rows > self.scheduler.limits.exact_width:
                        assert all(node.hint for node in run.nodes)  # nothing that verifies
                        self.probe_runs.add(run.run_id)
                case Emit(request_id, choice, _):
                    self.output[request_id].append(choice.token)
                case Finish(request_id, reason, _) | Refuse(request_id, reason):
                    assert request_id not in self.finished
                    self.finished[request_id] = reason

    def lose(self, nodes):
        """So many replicas are left, with empty caches; what was on its way is lost."""
        self.replicas = [Stage(KvModel(), deque()) for _ in range(nodes)]
        self.results.clear()
        self.scheduler.nodes = nodes
        self.feed(Restart(self.scheduler.limits))

    def choices(self):
        return [("node", k) for k, r in enumerate(self.replicas) if r.queue] + \
            [("result", k) for k in range(len(self.results))]

    def step(self, pick=None):
        options = self.choices()
        if not options:
            return False
        kind, index = self.rng.choice(options) if pick is None else options[pick % len(options)]
        if kind == "result":  # answers of different nodes may overtake one another
            self.results.rotate(-index)
            self.feed(self.results.popleft())
            return True
        replica = self.replicas[index]
        item = replica.queue.popleft()
        if isinstance(item, IssueRun):
            replica.kv.apply(item.ops)
            self.results.append(RunDone(item.run_id, tuple(self._evaluate(replica, item))))
        elif hasattr(item, "ops"):
            replica.kv.apply(item.ops)
        return True

    def _check_widths(self, lane, cells):
        for cell in cells:
            wide = cell.made[1] > self.scheduler.limits.exact_width
            assert not wide or cell.made[0] % self.scheduler.limits.chunk == 0


def repeats(path, n_vocab, salt=0):
    """A model whose text comes round again and again, with surprises."""
    return (path[-1] * 5 + path[-2] * 3 + (len(path) % 13 == 0)) % n_vocab


@pytest.mark.parametrize(("setting", "width"), matrix(
    [(5, 3, 2), (4, 4, 3), (1, 3, 4), (7, 2, 5), (0, 4, 3)], [64, 12]))
def test_steps_tokens_and_pool_are_those_of_one_node(monkeypatch, setting, width):
    monkeypatch.setattr(simulated, "next_token", repeats)
    limits = structs.replace(LIMITS, exact_width=width)
    request = Request(0, (1, 2, 3, 4, 5, 6), 70)
    alone = Watched(*setting)
    single = Pipeline(limits, n_vocab=13, rows=alone, drafts=False)
    single.submit(request)
    single.drain()
    steps = sum(isinstance(i, IssueRun) and i.run_id not in single.probe_runs for i in single.log)

    class Noted(Watched):
        def advance(self, lane, current, chosen):
            super().advance(lane, current, chosen)
            if type(self) is Noted:
                self.pools.append(simulated_contents(self, lane))

        def learn(self, lane, choices, **which):
            raise AssertionError("replicas advance the window themselves")

    for nodes in (1, 2, 3, 4):
        rows = Noted(*setting)
        job = Replicas(limits, rows, nodes, n_vocab=13)
        finish = []
        feed = job.scheduler.handle

        def handle(event, feed=feed, finish=finish):
            out = feed(event)
            finish.extend(i for i in out if isinstance(i, Finish))
            return out

        job.scheduler.handle = handle
        job.submit(request)
        job.drain()
        assert job.output[0] == single.output[0]
        assert finish[0].stats.runs == steps
        if setting[0]:
            assert rows.pools[: len(alone.pools)] == alone.pools[: len(rows.pools)]
            assert len(rows.pools) >= steps - 3


def simulated_contents(rows, lane):
    return {key: list(tails) for key, tails in rows._lanes[lane].pool.tails.items()}


def test_columns_and_candidates_are_dealt_out_in_chunks():
    """The example of docs/algorithms.md 6.8 for two nodes: columns 0 to 2 and 3 to 4; three
    candidates 2 + 1."""
    class Prepared(Lookahead):
        def opened(self, lane, tokens):
            super().opened(lane, tokens)
            state = self._lanes[lane]
            state.window.levels = [[10, 11, 12, 13], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]
            state.pool.tails = {7: {(70, 71, 72): None, (60, 61, 62): None, (50, 51, 52): None}}

    scheduler = ReplicaScheduler(structs.replace(LIMITS, exact_width=32), Prepared(
        5, 4, 3, prompt_pool=False), 2)
    out = scheduler.handle(Submit(Request(0, (1, 2), 50)))
    runs = [i.instruction for i in out if isinstance(i.instruction, IssueRun)]
    assert [run.rows.outputs.tolist() for run in runs] == [[False, True], [False, False]]
    out = scheduler.handle(RunDone(runs[0].run_id, (Choice(7),)))
    parts = {i.node: i.instruction.rows for i in out if isinstance(i, ToNode)}
    assert sorted(parts[1].tokens.tolist()) == sorted(
        [7, 50, 51, 52, 60, 61, 62, 10, 11, 20, 21, 22, 30, 31, 32])
    assert sorted(parts[2].tokens.tolist()) == sorted(
        [7, 70, 71, 72, 10, 11, 12, 13, 23, 24, 33, 34])


def test_a_replica_that_did_not_win_computes_the_accepted_tokens_with_its_next_step():
    limits = structs.replace(LIMITS, exact_width=8)
    rows = Lookahead(0, 3, 2, prompt_pool=False)
    scheduler = ReplicaScheduler(limits, rows, 2)
    scheduler.handle(Submit(Request(0, (1, 2), 50)))
    rows_opened = rows.opened

    def opened(lane, tokens):
        rows_opened(lane, tokens)
        rows._lanes[lane].pool.tails = {7: {(30, 31): None, (40, 41): None}, 9: {(50, 51): None,
                                                                               (60, 61): None}}

    rows.opened = opened
    out = scheduler.handle(RunDone(0, (Choice(7),)))
    first, second = (i.instruction for i in out if isinstance(i, ToNode))
    assert first.rows.tokens.tolist() == [7, 40, 41]
    assert second.rows.tokens.tolist() == [7, 30, 31]
    scheduler.handle(RunDone(second.run_id, (Choice(40), Choice(0), Choice(0))))
    out = scheduler.handle(RunDone(first.run_id, (Choice(40), Choice(41), Choice(9))))
    assert [i.choice.token for i in out if isinstance(i, Emit)] == [40, 41, 9]
    issued = {i.node: i.instruction.rows for i in out if isinstance(i, ToNode)
              if isinstance(i.instruction, IssueRun)}
    assert issued[1].tokens.tolist() == [9, 60, 61]  # it has the cells of 40 and 41
    assert issued[2].tokens.tolist() == [40, 41, 9, 50, 51]
    assert issued[2].positions.tolist() == [3, 4, 5, 6, 7]
    assert issued[2].outputs.tolist() == [False, False, True, True, True]


@given(data=st.data(), nodes=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**32),
       window=st.sampled_from([0, 1, 5]), ngram=st.sampled_from([2, 3, 5]),
       most=st.sampled_from([0, 1, 4]), width=st.sampled_from([1, 2, 5, 16]),
       partitions=st.sampled_from([0, 3, 40]))
@examples(150)
def test_every_interleaving_gives_the_plain_tokens(data, nodes, seed, window, ngram, most, width,
                                                   partitions):
    n_vocab = data.draw(st.sampled_from([2, 3, 11]))
    limits = structs.replace(LIMITS, exact_width=width, partitions=partitions,
                                 parallel=data.draw(st.sampled_from([1, 1, 3])),
                                 n_ctx=data.draw(st.sampled_from([40, 300])),
                                 chunk=data.draw(st.sampled_from([1, 4, 64])))
    rows = Lookahead(window, ngram, most)
    job = Replicas(limits, rows, nodes, n_vocab=n_vocab, seed=seed)
    token, todo = st.integers(0, n_vocab - 1), []
    for k in range(data.draw(st.integers(1, 3))):
        request = Request(k, tuple(data.draw(st.lists(token, min_size=1, max_size=20))),
                          data.draw(st.sampled_from([0, 1, 5, 40])),
                          eos_ids=frozenset({0}) if data.draw(st.booleans()) else frozenset())
        job.submit(request)
        todo.append(request)
        for pick in data.draw(st.lists(st.integers(0, 1000), max_size=40)):
            job.step(pick)
        if data.draw(st.booleans()) and nodes > 1:
            nodes -= 1
            job.lose(nodes)
            for pick in data.draw(st.lists(st.integers(0, 1000), max_size=20)):
                job.step(pick)
        if data.draw(st.integers(0, 9)) == 0:
            job.abort(request.request_id)
        if data.draw(st.booleans()):
            job.drain()
    job.drain()
    for k, request in enumerate(todo):
        wanted = plain(request.prompt, request.max_tokens, n_vocab, request.eos_ids)
        got = job.output[k]
        if job.finished[k] in ("abort", "context"):
            assert got == wanted[: len(got)]
        else:
            assert got == wanted
    assert job.scheduler.idle
    assert all(not replica.kv.cells for replica in job.replicas)
    assert not rows._lanes
    for pool in job.scheduler._pools:
        assert sorted(pool.free) == list(range(pool.size))


def test_what_an_earlier_job_has_brought_does_not_come_again():
    wanted = plain((1, 2, 3), 30, 11, frozenset())
    job = Replicas(LIMITS, Lookahead(3, 4, 2), 2, n_vocab=11)
    request = Request(0, (1, 2, 3), 30, ignore_eos=True)
    job.output[0] = []
    job.feed(Submit(request, tuple(wanted[:12])))
    job.drain()
    assert job.output[0] == wanted[12:]
    job.output[1] = []
    job.feed(Submit(structs.replace(request, request_id=1), tuple(wanted)))
    job.drain()
    assert (job.output[1], job.finished[1]) == ([], "length")


def test_several_requests_take_turns():
    """Each has a step out at a time, so a short one ends long before a long one that was first."""
    limits = structs.replace(LIMITS, parallel=3, chunk=4, cells=600)
    job = Replicas(limits, Lookahead(2, 3, 2), 2, n_vocab=11)
    todo = [Request(0, tuple(range(10)) * 4, 100, ignore_eos=True),
            Request(1, (1, 2, 3), 12, ignore_eos=True), Request(2, (4, 5), 12, ignore_eos=True),
            Request(3, (6, 7), 5, ignore_eos=True)]
    for request in todo:
        job.submit(request)
    assert len(job.scheduler.snapshot()["lanes"]) == 3
    assert [len(replica.queue) for replica in job.replicas] == [2 + 3 + 2] * 2
    while len(job.finished) < 3:
        for replica in (0, 1):  # every replica does one thing, then all results come in
            if ("node", replica) in job.choices():
                job.step(job.choices().index(("node", replica)))
        while job.results:
            job.step(job.choices().index(("result", 0)))
    assert 0 not in job.finished
    assert len(job.output[0]) < 60
    job.drain()
    for request in todo:
        assert job.output[request.request_id] == plain(request.prompt, request.max_tokens, 11)
    assert not any(replica.kv.cells for replica in job.replicas)


@pytest.mark.parametrize(("width", "joined"), [(40, 4), (16, 4), (3, 3), (1, 1)])
def test_steps_of_several_requests_share_runs_of_exact_width(width, joined):
    """Four requests, of up to seven rows a step each, on one replica."""
    limits = structs.replace(LIMITS, parallel=4, exact_width=width, cells=1200)
    job = Replicas(limits, Lookahead(0, 4, 2), 1, n_vocab=11, seed=3)
    todo = [Request(k, (1, 2, 3, k), 60, ignore_eos=True) for k in range(4)]
    for request in todo:
        job.submit(request)
    lanes, out = [], set()
    while job.step(0):
        for run_id, sent in job.scheduler._sent.items():
            if run_id not in out and not sent.chunk:
                out.add(run_id)
                lanes.append(len(set(sent.lanes)))
                assert job.scheduler.runs[run_id].n_rows <= width
    assert max(lanes) == joined
    for request in todo:
        assert job.output[request.request_id] == plain(request.prompt, 60, 11)


def test_small_steps_do_not_wait_until_a_request_with_large_ones_has_ended(monkeypatch):
    rows = Lookahead(0, 3, 6)
    monkeypatch.setattr(rows, "tails", lambda lane, token, depth, stop_ids: [
        (k, k)[:depth] for k in range(6) if lane == 0])
    job = Replicas(structs.replace(LIMITS, parallel=2, cells=600), rows, 1, n_vocab=11)
    job.submit(Request(0, tuple(range(10)), 100, ignore_eos=True))
    job.submit(Request(1, (1, 2, 3), 12, ignore_eos=True))
    while not job.finished:
        assert job.step(0)
    assert 1 in job.finished
    job.drain()
    assert job.output[0] == plain(tuple(range(10)), 100, 11)


def test_a_request_that_ends_while_its_step_is_held_leaves_nothing():
    limits = structs.replace(LIMITS, parallel=3)
    job = Replicas(limits, Lookahead(0, 3, 2), 2, n_vocab=11)
    todo = [Request(k, (1, 2, k), 30, ignore_eos=True) for k in range(3)]
    for request in todo:
        job.submit(request)
    while not any(job.scheduler._held):
        assert job.step(0)
    held = next(part.task for parts in job.scheduler._held for part in parts)
    job.abort(held.request.request_id)
    assert not any(part.task is held for parts in job.scheduler._held for part in parts)
    job.drain()
    for request in todo:
        wanted = plain(request.prompt, 30, 11)
        got = job.output[request.request_id]
        assert got == (wanted[: len(got)] if request is held.request else wanted)
    assert not any(replica.kv.cells for replica in job.replicas)


def test_requests_that_do_not_fit_together_wait():
    limits = structs.replace(LIMITS, parallel=4, cells=150)
    job = Replicas(limits, Lookahead(2, 3, 2), 2, n_vocab=11)
    for k in range(3):
        job.submit(Request(k, (1, 2, k), 70, ignore_eos=True))
    assert len(job.scheduler.snapshot()["lanes"]) == 2
    assert job.scheduler.snapshot()["waiting"] == 1
    job.drain()
    assert set(job.finished.values()) == {"length"}


@pytest.mark.parametrize(("guess_rows", "at_work"), [(0, 4), (32, 4), (24, 3)])
def test_requests_whose_candidates_do_not_fit_wait(guess_rows, at_work):
    """Four of 50 tokens fill the cells; beyond these there are twice `guess_rows` for 16 each."""
    limits = structs.replace(LIMITS, parallel=4, cells=200, guess_rows=guess_rows)
    job = Replicas(limits, Lookahead(0, 3, 2), 2, n_vocab=11)
    for k in range(4):
        job.submit(Request(k, (1, 2, 3, 4, k), 45, ignore_eos=True))
    assert len(job.scheduler.snapshot()["lanes"]) == at_work


def test_what_does_not_fit():
    scheduler = ReplicaScheduler(LIMITS, Lookahead(), 2)
    out = scheduler.handle(Submit(Request(0, tuple(range(300)), 5)))
    assert isinstance(out[0].error, ContextOverflow)
    with pytest.raises(ProtocolError, match="plain requests"):
        scheduler.handle(Submit(Request(1, (1,), 5), (), lambda: None))
    with pytest.raises(ProtocolError, match="never issued"):
        scheduler.handle(RunDone(7, ()))
    with pytest.raises(ProtocolError, match="unknown"):
        scheduler.handle("hello")
    assert scheduler.handle(Abort(9, "left")) == []
    assert next_token((1, 2), 5) < 5
