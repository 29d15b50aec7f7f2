"""BiTA's decoding: the tree, the groups of masks, what rows see; no token depends on it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.core.messages import Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import choose, likeliest
from pipeinfer.core.types import Choice, Request, SamplingParams
from pipeinfer.errors import ModelError
from pipeinfer.scheduler.events import Enqueue, Finish, RunDone
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.bita import Bita, Shape, tree_size
from tests.kit.drafting import job as kit_job
from tests.kit.simulated import MASK, Cell, KvModel, Lossy, WithMasks, named, plain
from tests.scheduler import test_restart as lossy

PROMPT_ID = 99  #: the prompts' sequence id
SYNCHRONOUS = Limits(n_ctx=400, policy=Policy.SPECULATIVE, exact_width=64, partitions=60)


def job(tokens, depth=10, most=50, stop=()):
    return kit_job(tokens, max_depth=depth, max_tokens=most, p_split=0.0,
                   stop_ids=frozenset(stop))


def tree_of(proposals):
    """(path, confidence) of each."""
    paths = []
    for proposal in proposals:
        above = paths[proposal.parent] if proposal.parent >= 0 else ()
        paths.append((*above, proposal.token))
    return paths


# --- the tree -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("masks", "top", "shape", "nodes"), [
    (4, 3, Shape.EFFICIENT, 12), (3, 5, Shape.EFFICIENT, 15), (2, 2, Shape.EFFICIENT, 4),
    (3, 1, Shape.EFFICIENT, 3), (3, 5, Shape.TRIANGLE, 12), (4, 5, Shape.TRIANGLE, 14),
    (4, 3, Shape.TRIANGLE, 7), (2, 2, Shape.TRIANGLE, 3), (3, 2, Shape.FULL, 14),
    (3, 4, Shape.FULL, 84),
    (3, 4, Shape.CHAIN, 3)])
def test_sizes_of_trees(masks, top, shape, nodes):
    """The paper's Figure 5: four masks of three tokens are 3+3+3+3 candidates; with its defaults
    M=3 and k=5, 1 + 15 + 16 groups of 3 masks. The published scripts' upper triangle has 5+4+3, and
    5+4+3+2 for M=4."""
    assert tree_size(masks, top, shape) == nodes
    proposer = Bita(MASK, masks, top, None, shape)
    assert proposer.candidates == nodes
    assert proposer.rows == masks * (1 if shape is Shape.CHAIN else nodes + 1)
    if (masks, top) == (3, 5):
        assert 1 + proposer.candidates + proposer.rows == {
            Shape.EFFICIENT: 64, Shape.TRIANGLE: 52}[shape]


@pytest.mark.parametrize(("masks", "top", "shape", "width", "wanted", "sizes"), [
    (3, 3, Shape.EFFICIENT, 16, 0, (6, 3)), (3, 5, Shape.EFFICIENT, 16, 1, (12, 1)),
    (3, 5, Shape.EFFICIENT, 16, 4, (3, 4)), (3, 5, Shape.EFFICIENT, 16, 9, (3, 4)),
    (3, 3, Shape.EFFICIENT, 5, 0, (1, 1)), (3, 4, Shape.FULL, 16, 0, (6, 3)),
    (3, 3, Shape.EFFICIENT, 40, 0, (9, 10)), (3, 3, Shape.EFFICIENT, 28, 0, (9, 3)),
    (3, 3, Shape.TRIANGLE, 28, 0, (6, 7)), (3, 3, Shape.TRIANGLE, 4, 0, (6, 7)),
    (3, 1, Shape.CHAIN, 16, 0, (3, 1)), (4, 3, Shape.CHAIN, 6, 0, (1, 1))])
def test_a_tree_is_cut_to_the_rows_of_a_run(masks, top, shape, width, wanted, sizes):
    """Not where it fits, and not where no candidate would: that takes two runs per step."""
    proposer = Bita(MASK, masks, top, None, shape, width, wanted)
    assert (proposer.candidates, proposer.rows) == (sizes[0], sizes[1] * masks)
    if sizes != (6, 7) or width == 28:
        assert 1 + proposer.candidates + proposer.rows <= width


def test_the_likeliest_paths_are_left_of_a_tree_that_is_cut():
    """First tokens have 1/2, 1/4, 1/6, 1/8 by `named`: 10, then 10 20, 11 at 1/4 each, 10 20 30."""
    lists = [(10, 11, 12, 13), (20, 21, 22), (30, 31)]
    for shape, fifth in ((Shape.EFFICIENT, (12,)), (Shape.FULL, (12,))):
        proposer = asked(shape, lists, 4, 16)
        found = proposer.propose(job([1, 2, 5], most=proposer.candidates))
        paths = tree_of(found)
        assert len(paths) == 6
        assert set(paths[:3]) == {(10,), (11,), (10, 20)}
        assert fifth in paths
        assert all(path[:-1] in ((), *paths[:k]) for k, path in enumerate(paths))
    assert len(asked(Shape.FULL, lists, 4, 16).propose(job([1, 2, 5], most=2))) == 2
    assert (10,) not in tree_of(asked(Shape.FULL, lists, 4, 16).propose(job([1, 2, 5], stop=[10])))


def asked(shape, lists, top=3, width=0):
    """A proposer that has heard `lists` from the masks behind the tip."""
    proposer = Bita(MASK, len(lists), top, None, shape, width)
    proposer.opened(0, [1, 2])
    rows = proposer.hints(0, [Anchor(-1, 2)], 100)
    assert [row.token for row in rows] == [MASK + r for r in range(len(lists))]
    proposer.learn(0, [Choice(5), *(named(*tokens) for tokens in lists)])
    proposer.accepted(0, [5])
    return proposer


def test_only_the_likeliest_of_a_level_has_children():
    """As in the paper's Figure 5: three tokens below the best one of each level."""
    lists = [(10, 11, 12, 13), (20, 21, 22), (30, 31, 32), (40, 41, 42)]
    found = asked(Shape.EFFICIENT, lists).propose(job([1, 2, 5]))
    assert tree_of(found) == [(10,), (11,), (12,), (10, 20), (10, 21), (10, 22), (10, 20, 30),
                              (10, 20, 31), (10, 20, 32), (10, 20, 30, 40), (10, 20, 30, 41),
                              (10, 20, 30, 42)]
    proposer = asked(Shape.TRIANGLE, lists[:3])
    found = proposer.propose(job([1, 2, 5]))
    assert tree_of(found) == [(10,), (11,), (12,), (10, 20), (10, 21), (10, 20, 30)]
    assert [p.alternative for p in found] == [False, True, True, False, True, False]
    assert found[0].confidence == pytest.approx(0.5)
    assert tree_of(proposer.propose(job([1, 2, 5], depth=1))) == [(10,), (11,), (12,)]
    assert tree_of(proposer.propose(job([1, 2, 5], most=2))) == [(10,), (11,)]
    assert tree_of(proposer.propose(job([1, 2, 5], stop=[10]))) == [
        (11,), (12,), (13,), (11, 20), (11, 21), (11, 20, 30)]


def test_a_full_tree_and_a_chain():
    lists = [(10, 11), (20, 21)]
    full = tree_of(asked(Shape.FULL, lists, 2).propose(job([1, 2, 5])))
    assert sorted(full) == [(10,), (10, 20), (10, 21), (11,), (11, 20), (11, 21)]
    assert tree_of(asked(Shape.CHAIN, lists).propose(job([1, 2, 5]))) == [(10,), (10, 20)]


def test_the_group_of_the_last_accepted_token_proposes():
    """docs/algorithms.md 11.4: a leaf that is not the likeliest is accepted; its own group names
    what is next."""
    anchors = [Anchor(-1, 2), Anchor(0, 10), Anchor(0, 11), Anchor(1, 20)]
    for new, first in (([5], 100), ([10, 5], 110), ([11, 5], 120), ([10, 20, 5], 130)):
        proposer = Bita(MASK, 2, 2, PROMPT_ID)
        proposer.opened(0, [1, 2])
        rows = proposer.hints(0, anchors, 100)
        assert [row.parent for row in rows] == [0, 4, 1, 6, 2, 8, 3, 10]
        assert all(row.sees == (PROMPT_ID,) and row.wanted for row in rows)
        groups = itertools.chain.from_iterable(
            (named(100 + 10 * k), named(101 + 10 * k)) for k in range(4))
        proposer.learn(0, [*(Choice(0),) * 4, *groups])
        proposer.accepted(0, new)
        assert tree_of(proposer.propose(job([1, 2, *new]))) == [(first,), (first, first + 1)]
        proposer.accepted(0, [7])  # the path has gone on without masks: what the last ones named
        assert tree_of(proposer.propose(job([1, 2, *new, 7]))) == [(first + 1,)]
        proposer.accepted(0, [7])
        assert proposer.propose(job([1, 2, *new, 7, 7])) == ()


def test_masks_of_a_chain_shrink_when_their_tokens_are_accepted():
    """Straightforward decoding: what masks behind the old tip named beyond the new one remains."""
    proposer = Bita(MASK, 3, 1, None, Shape.CHAIN)
    proposer.opened(0, [1, 2])
    rows = proposer.hints(0, [Anchor(-1, 2), Anchor(0, 10)], 100)
    assert [row.parent for row in rows] == [0, 2, 3]
    proposer.learn(0, [Choice(0), Choice(0), named(11), named(12), named(13)])
    proposer.accepted(0, [10, 11])
    assert tree_of(proposer.propose(job([1, 2, 10, 11]))) == [(12,), (12, 13)]


def test_a_group_that_found_no_room_proposes_what_it_can():
    proposer = Bita(MASK, 2, 2, None)
    proposer.opened(0, [1, 2])
    rows = proposer.hints(0, [Anchor(-1, 2), Anchor(0, 10)], 3)
    assert len(rows) == 2
    proposer.learn(0, [Choice(0), Choice(0), named(7), None])
    proposer.accepted(0, [9])
    assert tree_of(proposer.propose(job([1, 2, 9]))) == [(7,)]


# --- what rows see (docs/algorithms.md 11.4) ------------------------------------------------------


@pytest.mark.parametrize("width", [16, 8])
def test_visible_sets(width):
    """M=2, k=2: 4 candidates, 5 groups, 15 rows, in one run or the masks in one behind."""
    proposer = Bita(MASK, 2, 2, PROMPT_ID)
    scheduler = Scheduler(structs.replace(SYNCHRONOUS, exact_width=width), proposer,
                          drafts=False)
    out = scheduler.handle(Enqueue(Request(0, (1, 2), 50)))
    runs = [i for i in out if isinstance(i, Decode)]
    out = scheduler.handle(RunDone(0, (Choice(3),)))
    runs += [i for i in out if isinstance(i, Decode)]
    out = scheduler.handle(RunDone(1, (Choice(4), named(10, 11), named(20, 21))))
    last = [i for i in out if isinstance(i, Decode)]
    assert [len(run.rows) for run in last] == ([15] if width == 16 else [5, 10])
    kv, seen = KvModel(), []
    kv.cells = [Cell(0, {PROMPT_ID}, -1)]  # stands for the learned prompts
    for run in (*runs, *last):
        kv.apply(run.ops)
        rows = run.rows
        kv.cells += [Cell(p, set(ids), t) for t, p, ids in zip(
            rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids, strict=True)]
        for i, views in enumerate(rows.views or rows.seq_ids):
            pos = int(rows.positions[i])
            cells = {id(c): c for view in views for c in kv.view(view, pos)}
            seen.append((pos, [c.token for c in sorted(cells.values(), key=lambda c: (
                c.pos, c.token))]))
    n, base = 3, [1, 2, 3, 4]  # the current token 4 is at position 3
    m1, m2 = MASK, MASK + 1
    expected = [(n, base), (n + 1, [*base, 10]), (n + 1, [*base, 11]), (n + 2, [*base, 10, 20]),
                (n + 2, [*base, 10, 21])]
    for pos, path in tuple(expected):
        expected += [(pos + 1, [-1, *path, m1]), (pos + 2, [-1, *path, m1, m2])]
    assert sorted(seen[-15:]) == sorted(expected)


# --- exactness ------------------------------------------------------------------------------------


class LossyMasks(Lossy, WithMasks):
    """Stages of which some are lost."""


def test_batches_in_flight_are_forgotten_with_the_stages_that_had_them():
    """Losses, and a cache that is too small, with masks behind guesses."""
    preempted = guessed = 0
    limits = structs.replace(lossy.LIMITS["small cache"], partitions=30, alone=True)
    for seed in range(3):
        rng = random.Random(seed)
        rows = Bita(MASK, 2, 3, None, rng.choice([*Shape]), rng.choice([0, 6]))
        pipeline = LossyMasks(limits, n_vocab=11, n_stages=3, accuracy=0.7, seed=seed, rows=rows,
                              drafts=bool(seed % 2))
        todo = [Request(k, (1, 2, 3, 4, k), 60) for k in range(4)]
        for request in todo:
            pipeline.submit(request)
        lossy.drive(pipeline, rng, seed % 3)
        for request in todo:
            assert pipeline.output[request.request_id] == plain(request.prompt, 60, 11)
        lossy.check_at_rest(pipeline)
        assert not rows._lanes
        ends = [i.stats for i in pipeline.log if isinstance(i, Finish)]
        preempted += sum(stats.preempted for stats in ends)
        guessed += sum(stats.issued_speculative for stats in ends)
    assert guessed > 100
    assert preempted


def test_masks_that_are_right_bring_as_many_tokens_as_there_are_masks_and_one():
    """The longest path is accepted in every step once there are masks, whatever a run's width."""
    for width in (64, 8):
        pipeline = WithMasks(structs.replace(SYNCHRONOUS, exact_width=width), n_vocab=500,
                             accuracy=1.0, rows=Bita(MASK, 3, 3, None), drafts=False)
        pipeline.rng.choice = lambda options: 0 if options == [0, 0, 1] else options[0]
        pipeline.answer((1, 2, 3), 81)
        steps = sum(i.run_id not in pipeline.probe_runs for i in pipeline.runs()) - 1
        assert steps == 1 + math.ceil((80 - 1) / 4)


def test_guesses_that_travel_have_masks_of_their_own():
    """docs/algorithms.md 11.6: batches come back in order, those that were skipped too, and the
    last one on the path names what is next."""
    proposer = Bita(MASK, 2, 2, None)
    proposer.opened(0, [1, 2])
    proposer.hints(0, [Anchor(-1, 2)], 100, batch=3)
    rows = proposer.hints(0, [Anchor(-1, 10), Anchor(0, 11)], 100, batch=4, below=())
    assert [row.parent for row in rows] == [0, 2, 1, 4]
    proposer.hints(0, [Anchor(-1, 30)], 100, batch=5, below=(20,))
    proposer.hints(0, [Anchor(-1, 12)], 100, batch=7, below=(10, 11))
    proposer.learn(0, [Choice(10), named(11), named(12)], batch=3)
    proposer.accepted(0, [10])
    assert tree_of(proposer.propose(job([1, 2, 10]))) == [(11,), (11, 12)]
    proposer.learn(0, [Choice(11), Choice(12), *(named(t) for t in (40, 41, 13, 14))], batch=4)
    proposer.accepted(0, [11, 12])
    assert tree_of(proposer.propose(job([1, 2, 10, 11, 12]))) == [(13,), (13, 14)]
    proposer.learn(0, [None, None, None], batch=5)  # another path
    assert tree_of(proposer.propose(job([1, 2, 10, 11, 12]))) == [(13,), (13, 14)]
    proposer.learn(0, [Choice(13), named(14), named(15)], batch=7)
    proposer.accepted(0, [13])
    assert tree_of(proposer.propose(job([1, 2, 10, 11, 12, 13]))) == [(14,), (14, 15)]


def test_runs_with_masks_follow_one_another_through_the_stages():
    """While a tip travels its guesses follow, each in a run with masks; what comes back names the
    next, so that with masks that are right a pipeline of four stages is never empty."""
    limits = Limits(n_ctx=400, exact_width=5, credit=5, partitions=60, draft_max=1)
    pipeline = WithMasks(limits, n_stages=4, n_vocab=500, accuracy=1.0,
                         rows=Bita(MASK, 3, 1, None, Shape.CHAIN, 5), drafts=False)
    pipeline.rng.choice = lambda options: 0 if options == [0, 0, 1] else options[0]
    pipeline.submit(Request(0, (1, 2, 3), 61))
    useful = []
    while pipeline.choices():
        # the last stage first: every stage has one run at a time, as if all took as long
        kinds = sorted(pipeline.choices(), key=lambda c: (c[0] != "result", -int(c[1])))
        pipeline.step(pipeline.choices().index(kinds[0]))
        useful.append(pipeline.scheduler.state.useful)
    assert pipeline.output[0] == plain((1, 2, 3), 61, 500)
    guessed = [i for i in pipeline.runs() if i.speculative]
    assert len(guessed) > 30
    assert all(len(i.rows) <= 5 and (MASK in i.rows.tokens) for i in guessed[:-4])
    assert max(useful) == 4


def test_a_tree_that_is_cut_takes_one_run_per_step():
    """And nearly as few steps: only paths without a group behind them need one more."""
    runs = {}
    for width in (0, 16):
        pipeline = WithMasks(structs.replace(SYNCHRONOUS, exact_width=16), n_vocab=500,
                             accuracy=0.7, rows=Bita(MASK, 3, 3, None, width=width), drafts=False)
        pipeline.answer((1, 2, 3), 81)
        runs[width] = len(pipeline.runs()) - 1
        assert bool(pipeline.probe_runs) == (width == 0)
    assert runs[16] < 0.8 * runs[0]


# --- what a mask names ----------------------------------------------------------------------------


def test_what_is_named_follows_the_targets_rule_and_noise():
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, 50).astype(np.float32)
    for params in (SamplingParams(), SamplingParams(0.8, 20, 0.9, key=5), SamplingParams(1.2,
                                                                                        key=6)):
        choice = likeliest(logits, params, 17, 4)
        assert choice.token == choose(logits, params, np.zeros(18, np.int32), 17).token
        assert choice.top[0][0] == choice.token
        assert 1 <= len(choice.top) <= 4
        assert all(p <= 0 for _, p in choice.top)
    assert [i for i, _ in likeliest(logits, SamplingParams(), 0, 3).top] == \
        np.argsort(-logits)[:3].tolist()
    assert len(likeliest(logits[:2], SamplingParams(), 0, 8).top) == 2


def test_files_that_are_no_adapter(tmp_path):
    pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    from pipeinfer.models.bita_adapter import BitaAdapter, load_bita, save_bita

    good = BitaAdapter(np.ones((3, 8), np.float32), np.zeros((2, 4, 1, 8), np.float32),
                       np.zeros((2, 4, 1, 8), np.float32), {"seed": 1})
    save_bita(tmp_path / "good", good)
    read = load_bita(tmp_path / "good")
    assert (read.n_masks, read.n_prompts, read.about) == (3, 4, {"seed": 1})
    with pytest.raises(ModelError, match="2 layers of 8 elements, the model has 2 layers of 9"):
        read.check(2, 9)
    save_file({"masks": np.ones((3, 8), np.float16)}, tmp_path / "part")
    (tmp_path / "noise").write_bytes(b"hello")
    nan = structs.replace(good, masks=np.full((3, 8), np.nan, np.float32))
    save_bita(tmp_path / "nan", nan)
    for name, says in (("none", "no such file"), ("part", "it lacks"), ("noise", "cannot be"),
                       ("nan", "not finite numbers")):
        with pytest.raises(ModelError, match=says):
            load_bita(tmp_path / name)
    with pytest.raises(ModelError, match="shapes do not match"):
        BitaAdapter(np.ones((0, 8), np.float32), good.keys, good.values)
