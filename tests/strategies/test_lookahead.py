"""Lookahead decoding: the pool, the window, what rows see, and that no token depends on it.

The simulated pipeline's choice after a row is a hash of what the row really sees, so the window's
own results show whether its rows see what they should.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.cli.options import parse
from pipeinfer.core.messages import Cancel, Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import Enqueue, Finish, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.lookahead import SPEC, Lookahead, Pool, Window, window_rows
from pipeinfer.strategies.proposers.lookahead_worth import Worth
from pipeinfer.strategies.spec import ProposerSetup
from tests.kit import simulated
from tests.kit.sample import fewer
from tests.kit.simulated import Pipeline, next_token
from tests.scheduler.test_lanes import check_at_rest

SYNCHRONOUS = Limits(n_ctx=400, policy=Policy.SPECULATIVE, exact_width=64, partitions=40)
PIPELINED = Limits(n_ctx=400, exact_width=16, credit=5, partitions=30)


# --- the pool -------------------------------------------------------------------------------------


def test_every_ngram_of_a_prompt_goes_to_the_pool():
    pool = Pool(3, 100)
    pool.add_all([1, 2, 1, 2, 3, 1, 2])
    assert sum(len(tails) for tails in pool.tails.values()) == 7 - 3 + 1
    assert pool.of(1) == [(2, 3), (2, 1)]  # the newest first
    assert pool.of(2) == [(3, 1), (1, 2)]
    assert pool.of(9) == []


@pytest.mark.parametrize("pool", [True, False])
def test_the_text_as_reference_is_an_option(pool):
    given = [] if pool else ["--set", "prompt_pool=false"]
    options = parse(given, "speculation").config.job.speculation
    rows = SPEC.inline(ProposerSetup(registry.values_of(SPEC, options)))
    rows.opened(0, list(range(20)))
    assert bool(rows.tails(0, 3, 4, frozenset())) == pool


def test_a_text_that_grows_adds_only_ngrams_that_end_in_what_is_new():
    grown, whole = Pool(3, 100), Pool(3, 100)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    grown.add_all(text[:4])
    grown.add_all(text[:7], 4)
    grown.add_all(text, 7)
    whole.add_all(text)
    assert grown.tails == whole.tails


def test_a_full_key_loses_its_oldest_tail_and_a_repeated_one_becomes_the_newest():
    pool = Pool(2, 2)
    for second in (1, 2, 1, 3):
        pool.add([7, second])
    assert pool.of(7) == [(3,), (1,)]
    empty = Pool(2, 0)
    empty.add([7, 1])
    assert empty.of(7) == []


# --- the window -----------------------------------------------------------------------------------


def test_a_full_window_gives_one_ngram_per_column():
    """Keys: the current token, then level 0; tails: the column's later levels and what is new."""
    window = Window(3, 4, [[11, 12], [20, 21, 22], [30, 31, 32]])
    assert window.step(10, [40, 41, 42]) == [(10, 20, 30, 40), (11, 21, 31, 41), (12, 22, 32, 42)]
    assert window.levels == [[21, 22], [30, 31, 32], [40, 41, 42]]


@pytest.mark.parametrize(("width", "size"), [(1, 2), (1, 3), (2, 3), (5, 4), (3, 7)])
def test_levels_fill_one_per_step(width, size):
    window = Window.start(width, size, [5, 6, 7])
    for levels in range(1, size):
        assert len(window.levels) == levels
        assert window.columns == width + size - 1 - levels
        assert all(len(level) == window.columns for level in window.levels[1:])
        rows, tops = window.rows([Anchor(-1, 0)])
        assert len(rows) <= window_rows(width, size)
        assert len(tops) == window.columns
        found = window.step(0, list(range(100 * levels, 100 * levels + window.columns)))
        assert len(found) == (width if levels == size - 1 else 0)
    assert window.columns == width


def test_cells_with_one_path_are_one_row():
    window = Window(3, 3, [[1, 2], [1, 2, 9]])
    rows, tops = window.rows([Anchor(-1, 0), Anchor(0, 1), Anchor(1, 5)])
    # column 1 of level 0 and column 0 of level 1 are the candidate's 1; column 2 of level 0 and
    # column 1 of level 1 are one row below it
    assert [(row.parent, row.token) for row in rows] == [(1, 2), (3, 9)]
    assert tops == [1, 3, 4]


# --- what rows see (docs/algorithms.md 6.3) -------------------------------------------------------


class Prepared(Lookahead):
    """Starts with a full window and two candidates for token 7."""

    def opened(self, lane, tokens):
        super().opened(lane, tokens)
        state = self._lanes[lane]
        state.window.levels = [[10, 11, 12, 13], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]
        state.pool.tails = {7: {(50, 51, 52): None, (60, 61, 62): None}}


def visible(runs):
    """For each row (by token): the tokens that it sees beyond the prompt of two."""
    kv = simulated.KvModel()
    seen = {}
    for run in runs:
        kv.apply(run.ops)
        rows = run.rows
        columns = list(zip(rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids,
                           strict=True))
        kv.cells += [simulated.Cell(pos, set(ids), token) for token, pos, ids in columns]
        for token, pos, ids in columns:
            seen[token] = (pos, [c.token for c in kv.view(ids[0], pos) if c.pos > 1])
    return seen


@pytest.mark.parametrize("width", [32, 16])
def test_visible_sets_of_a_window_with_two_candidates(width):
    """W=5, N=4, G=2: 21 rows; at most 16 rows that verify push the window into a run behind."""
    scheduler = Scheduler(structs.replace(SYNCHRONOUS, exact_width=width),
                          Prepared(5, 4, 2, prompt_pool=False), drafts=False)
    first = scheduler.handle(Enqueue(Request(0, (1, 2), 50)))
    out = scheduler.handle(RunDone(0, (Choice(7),)))
    runs = [i for i in (*first, *out) if isinstance(i, Decode)]
    assert [len(run.rows) for run in runs[1:]] == ([21] if width == 32 else [7, 14])
    found = visible(runs)
    n = 2
    level0 = [7, 10, 11, 12, 13]  # column 0 of level 0 is the current token
    expected = {7: (n, [7])}
    for tail in ((50, 51, 52), (60, 61, 62)):
        for j, token in enumerate(tail):
            expected[token] = (n + 1 + j, [7, *tail[: j + 1]])
    for i in range(1, 5):
        expected[level0[i]] = (n + i, level0[: i + 1])
    for i in range(5):
        expected[20 + i] = (n + i + 1, [*level0[: i + 1], 20 + i])
        expected[30 + i] = (n + i + 2, [*level0[: i + 1], 20 + i, 30 + i])
    assert {k: v for k, v in found.items() if k > 2} == expected
    wanted = {int(t) for run in runs[1:] for t, out in zip(run.rows.tokens, run.rows.outputs,
                                                          strict=True) if out}
    assert wanted == {7, 50, 51, 52, 60, 61, 62, 30, 31, 32, 33, 34}


# --- against a direct implementation --------------------------------------------------------------


def direct(prompt, count, n_vocab, window, size, most):
    """Lookahead decoding without a tree, cache or pipeline: tokens, steps, and what the pool holds
    after each window."""
    path = [*prompt, next_token(tuple(prompt), n_vocab)]
    levels, pool = Window.start(window, size, path).levels, Pool(size, most)
    pool.add_all(path)
    steps, pools = 1, []
    while len(path) < len(prompt) + count:
        steps += 1
        chosen = []
        for tail in [(), *pool.of(path[-1])]:
            matched = []
            for token in (*tail, None):
                matched.append(next_token((*path, *matched), n_vocab))
                if matched[-1] != token:
                    break
            chosen = max(chosen, matched, key=len)
        columns = len(levels[0]) + 1
        new = [next_token((*path, *levels[0][:i], *(level[i] for level in levels[1:])), n_vocab)
               for i in range(columns)]
        if len(levels) < size - 1:
            levels = [level[1:] for level in (*levels, new)]
        else:
            for i, key in enumerate([path[-1], *levels[0]]):
                pool.add((key, *(level[i] for level in levels[1:]), new[i]))
            levels = [[*levels, new][1][1:], *[*levels, new][2:]]
        pools.append(contents(pool))
        for token in chosen:
            path.append(token)
            pool.add_all(path, len(path) - 1)
    return path[len(prompt) : len(prompt) + count], steps, pools


def contents(pool):
    return {key: list(tails) for key, tails in pool.tails.items()}


class Watched(Lookahead):
    """Notes what the pool holds after each window."""

    def opened(self, lane, tokens):
        super().opened(lane, tokens)
        self.pools = []

    def learn(self, lane, choices, **which):
        super().learn(lane, choices, **which)
        self.pools.append(contents(self._lanes[lane].pool))


@pytest.mark.parametrize(("window", "size", "most", "width"), [
    (3, 2, 2, 64), (5, 3, 2, 64), (4, 4, 3, 64), (1, 3, 1, 64), (2, 5, 4, 64),
    (3, 2, 2, 4), (5, 3, 2, 5), (4, 4, 3, 10), (1, 3, 1, 3)])
def test_tokens_steps_and_pool_of_a_direct_implementation(monkeypatch, window, size, most, width):
    """Also with the window in runs of its own, and in a model that repeats itself."""
    def repeats(path, n_vocab, salt=0):
        return (path[-1] * 5 + path[-2] * 3 + (len(path) % 17 == 0)) % n_vocab

    monkeypatch.setattr(simulated, "next_token", repeats)
    monkeypatch.setitem(globals(), "next_token", repeats)
    proposer = Watched(window, size, most)
    pipeline = Pipeline(structs.replace(SYNCHRONOUS, exact_width=width), n_vocab=13,
                        rows=proposer, drafts=False)
    request = Request(0, (1, 2, 3, 4, 5, 6), 80)
    pipeline.submit(request)
    pipeline.drain()
    tokens, steps, pools = direct(list(request.prompt), 80, 13, window, size, most)
    assert pipeline.output[0] == tokens
    verified = [i for i in pipeline.runs() if i.run_id not in pipeline.probe_runs]
    assert len(verified) == steps
    assert len(proposer.pools) >= steps - 2  # that of the last step is called off
    assert proposer.pools == pools[: len(proposer.pools)]


# --- exactness ------------------------------------------------------------------------------------

def test_a_probe_that_is_accepted_would_be_noticed(monkeypatch):
    """Negative control: rows of a wide run may not become output, and the simulation sees it."""
    from pipeinfer.scheduler.token_tree import Node

    monkeypatch.setattr(Node, "child", lambda self, token: next(
        (c for c in self.children if c.token == token), None))

    def runs():
        for seed in range(40):
            pipeline = Pipeline(Limits(n_ctx=400, exact_width=4, partitions=20), n_vocab=3,
                                rows=Lookahead(5, 3, 2), drafts=False, seed=seed)
            pipeline.submit(Request(0, (1, 2, 0, 1), 60))
            pipeline.drain()

    with pytest.raises(AssertionError):
        runs()


def steps_of(monkeypatch, model, rows, count=120):
    monkeypatch.setattr(simulated, "next_token", model)
    pipeline = Pipeline(SYNCHRONOUS, n_vocab=1000, rows=rows, drafts=False)
    pipeline.submit(Request(0, tuple(range(20, 60)), count))
    pipeline.drain()
    return sum(i.run_id not in pipeline.probe_runs for i in pipeline.runs())


def test_a_text_that_repeats_takes_fewer_steps_and_a_random_one_does_not(monkeypatch):
    def cycle(path, n_vocab, salt=0):
        return 20 + (path[-1] - 19) % 40

    assert steps_of(monkeypatch, cycle, Lookahead(5, 4, 3)) < 120 / 1.5
    assert steps_of(monkeypatch, cycle, Lookahead(5, 4, 3, prompt_pool=False)) < 120
    assert steps_of(monkeypatch, next_token, Lookahead(5, 4, 3)) >= 118
    assert steps_of(monkeypatch, cycle, Lookahead(5, 4, 0)) == 120


# --- in the pipeline ------------------------------------------------------------------------------


def test_a_window_goes_behind_and_is_not_called_off_when_its_rows_die():
    """Its results are wanted as hints; the end of the request does call it off."""
    limits = Limits(n_ctx=400, exact_width=4, partitions=20, credit=4)
    scheduler = Scheduler(limits, Lookahead(5, 3, 1), drafts=False)
    out = scheduler.handle(Enqueue(Request(0, (5, 6, 7), 2)))
    prompt, window = (i for i in out if isinstance(i, Decode))
    assert window.parent_id == prompt.run_id
    assert len(window.rows) > limits.exact_width
    out = scheduler.handle(RunDone(prompt.run_id, (Choice(1),)))
    assert not [i for i in out if isinstance(i, Cancel)]
    again = [i for i in out if isinstance(i, Decode)]
    assert [run.rows.tokens.tolist() for run in again] == [[1]]  # no second window meanwhile
    out = scheduler.handle(RunDone(again[0].run_id, (Choice(2),)))
    assert [i.run_ids for i in out if isinstance(i, Cancel)] == [(window.run_id,)]
    assert [i.reason for i in out if isinstance(i, Finish)] == ["length"]
    assert scheduler.handle(RunDone(window.run_id, None)) == []
    assert scheduler.idle


def test_rows_that_verify_are_never_wider_than_r_and_windows_come_one_at_a_time():
    limits = Limits(n_ctx=400, exact_width=6, partitions=30, credit=6)
    pipeline = Pipeline(limits, n_vocab=3, rows=Lookahead(6, 4, 3), drafts=False, n_stages=4)
    pipeline.submit(Request(0, (1, 2, 0, 1), 150))
    while pipeline.step():
        out = [run for run in pipeline.scheduler.runs.values() if run.hint]
        assert len(out) <= 1
    widths = {i.run_id in pipeline.probe_runs: len(i.rows) for i in pipeline.runs()}
    assert widths[False] <= 6 < widths[True]
    assert pipeline.stats().accepted_speculative > 20


@pytest.mark.parametrize("settings", [(-1, 3, 2), (5, 1, 2), (5, 3, -1)])
def test_settings_that_cannot_be(settings):
    with pytest.raises(ValueError, match="impossible sizes"):
        Lookahead(*settings)


# --- what pays ------------------------------------------------------------------------------------


def test_candidates_and_windows_are_chosen_by_what_they_bring_and_cost():
    """Of three candidates the second is right; without windows the pool would have none."""
    def choice(row, gain=4, **fixed):
        worth = Worth(lambda rows: 1 + row * (rows - 1), 5, 3, 8, **fixed)
        came = (1, 2, 3, 4)[:gain] + (0,) * (4 - gain)
        for _ in range(40):
            worth.learn(([], [(9,) * 4, (1, 2, 3, 4), (8,) * 4]), came)
            worth.choose()
        return [(one.candidates, one.window) for one in (worth.choose() for _ in range(96))]

    assert choice(0.0).count((2, True)) == 96
    assert choice(5.0).count((0, False)) == 96
    assert 90 <= choice(0.1, gain=0).count((0, False)) < 96  # a window now and then may help later
    assert choice(0.1).count((2, True)) == 96  # 5 tokens for 17 rows, 2.6 times as long as one
    assert choice(5.0, fixed_candidates=True, fixed_window=True).count((3, True)) == 96


@given(st.floats(0.0, 4.0), st.integers(1, 400))
def test_measuring_a_window_that_finds_nothing_costs_little(row, steps):
    """In times of plain steps, whatever rows cost."""
    worth, time = Worth(lambda rows: 1 + row * (rows - 1), 5, 3, 8), 0.0
    for _ in range(steps):
        worth.learn(([], [(1, 2, 3, 4)]), (0,) * 4)
        found = worth.choose()
        time += worth.cost(1 + 4 * found.candidates + 8 * found.window)
    assert time <= steps + 3 + steps / 32 + 0.01


@pytest.mark.parametrize("row", [0.0, 0.3, 9.0])
def test_no_token_depends_on_what_pays(row):
    for seed in range(4):
        rows = Lookahead(3, 3, 2, cost=lambda rows: 1 + row * (rows - 1))
        pipeline = Pipeline(SYNCHRONOUS if seed % 2 else PIPELINED, seed=seed, n_vocab=5,
                            rows=rows, drafts=bool(seed > 1))
        pipeline.answer((1, 2, 3, 1, 2), 120)
        check_at_rest(pipeline)


def test_where_rows_are_dear_fewer_are_issued():
    def issued(**options):
        pipeline = Pipeline(SYNCHRONOUS, n_vocab=11, rows=Lookahead(4, 4, 3, **options),
                            drafts=False)
        pipeline.answer((1, 2, 3), fewer(160, 100))
        return sum(len(i.rows) for i in pipeline.runs())

    dear = {"cost": float}
    assert issued(**dear) < 0.6 * issued()
    assert issued(**dear, fixed=("window", "candidates")) == issued()
