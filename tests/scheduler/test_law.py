"""The law, over the simulated pipeline: whatever policy, proposer, kind of model, cancellation,
loss, restart, disk or other request there is, a request gets plain decoding's tokens, each of them
once, and one terminal event; and nothing of it stays in any cache.

The simulated choice after a row is a hash of the tokens that the row can really see, at a stage
that applied exactly the operations and rows it was sent, so wrong cells mean wrong tokens.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from pipeinfer.core.policy import COMPONENTS, Ablation, Policy
from pipeinfer.core.types import Request
from pipeinfer.scheduler.events import Enqueue, Finish, Refuse
from pipeinfer.scheduler.settings import PUBLISHED, Limits
from pipeinfer.scheduler.stored import Stored
from pipeinfer.strategies.proposers.bita import Bita, Shape
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.kit.sample import examples
from tests.kit.simulated import MASK, Lossy, WithMasks, plain
from tests.scheduler.test_lanes import check_at_rest, check_chains

N_CTX = 120
BASES = tuple(tuple(random.Random(k).choices(range(7), k=45)) for k in range(2))
OURS = (Policy.PIPEINFER, Policy.SPECULATIVE, Policy.ITERATIVE)
ANY = {
    "chunk": [1, 4, 7, 64], "exact_width": [8, 16, 4, 3, 2, 1], "credit": [9, 4, 2, 1],
    "partitions": [5, 12, 40, 2, 1, 0], "draft_max": [1, 2, 4], "tree_max": [1, 2, 8],
    "branches": [1, 2, 4], "alternatives": [0, 2], "path_min": [0.0, 0.05, 0.5],
    "eager": [False, True], "p_decay": [0.0, 0.1], "p_recovery": [0.0, 0.2],
    "join_tip": [False, True], "time_sharing": [False, True], "parallel": [1, 2, 3, 6],
    "cells": [0, N_CTX, 200], "kept": [0, 1, 3], "alone": [False, True], "guess_rows": [0, 6],
    "share": [(), (1,), (1, 1, 2), (1, 2, 2, 4)], "same_cores": [False, True],
    "group_max": [0, 6],
}


class Scene(NamedTuple):
    """limits: of the scheduler. rows: makes its proposer of rows, None for none. drafts: whether
    there is a draft. stored: whether stages have disks."""

    limits: Limits
    rows: Any = None
    drafts: bool = True
    stored: bool = False


KINDS = ("cells", "states", "published", "chains", "lookahead", "bita")


@st.composite
def scenes(draw, kind):
    def some(**values):
        return {name: draw(st.sampled_from(value)) for name, value in values.items()}

    if kind == "published":
        limits = structs.replace(Limits(n_ctx=N_CTX), policy=Policy.PUBLISHED, **PUBLISHED)
        limits = structs.replace(limits, ablations=draw(st.frozensets(
            st.sampled_from(COMPONENTS[Policy.PUBLISHED]), max_size=2)), **some(**{
                name: ANY[name] for name in ("exact_width", "credit", "partitions", "branches",
                                             "p_decay", "p_recovery", "kept", "parallel")}))
        return Scene(limits, stored=draw(st.booleans()))
    limits = Limits(n_ctx=N_CTX, **some(**ANY))
    if kind == "states":
        limits = structs.replace(limits, states=True, branches=1, eager=False, path_min=0.0,
                                 **some(policy=OURS[:2]))
    elif kind == "chains":
        limits = structs.replace(limits, chains=True, partitions=0,
                                 **some(policy=[*OURS, Policy.PUBLISHED]))
    else:
        limits = structs.replace(limits, **some(policy=OURS), ablations=draw(
            st.frozensets(st.sampled_from(Ablation), max_size=2)))
    if kind == "lookahead":
        given = some(window=[5, 2, 1, 0], size=[3, 2, 4], count=[3, 1, 0],
                     prompt_pool=[False, True])
        return Scene(limits, lambda: Lookahead(
            given["window"], given["size"], given["count"], prompt_pool=given["prompt_pool"]),
            draw(st.booleans()))
    if kind == "bita":
        given = some(masks=[1, 2, 3], top=[1, 3], shape=[*Shape], width=[0, 6, 16])
        return Scene(limits, lambda: Bita(MASK, given["masks"], given["top"], None, given["shape"],
                                          given["width"]), draw(st.booleans()))
    return Scene(limits, stored=draw(st.booleans()))


class Simulated(Lossy, WithMasks):
    """A pipeline whose stages may be lost, and whose masks name tokens."""


class Law(RuleBasedStateMachine):
    """Requests come, leave, and are computed in any order, over stages that may be lost."""

    kind = ""

    @initialize(data=st.data(), n_stages=st.sampled_from([1, 2, 3, 5]),
                n_vocab=st.sampled_from([2, 3, 7, 11]), vanish=st.sampled_from([0.0, 0.1, 0.6]),
                accuracy=st.sampled_from([0.9, 0.5, 0.0, 1.0]), respect_cancel=st.booleans(),
                seed=st.integers(0, 2**32))
    def begin(self, data, n_stages, **options):
        scene = data.draw(scenes(self.kind))
        self.scene, self.options = scene, options
        self.n_vocab = options["n_vocab"]
        self.asked: dict[int, Request] = {}
        self.before: dict[int, list[int]] = {}  # what an earlier job has given
        self.disks = [{} for _ in range(n_stages)] if scene.stored else None
        self.start(n_stages)

    def start(self, n_stages):
        scene = self.scene
        self.rows = scene.rows() if scene.rows else None
        self.pipeline = Simulated(scene.limits, n_stages=n_stages, rows=self.rows,
                                  drafts=scene.drafts, disks=self.disks, **self.options)
        if self.disks is not None:
            self.pipeline.scheduler.state.stored = Stored(
                b"root", ranges=True, names=set.intersection(*map(set, self.disks)),
                answers=not scene.limits.states)

    @rule(base=st.sampled_from(BASES), shared=st.integers(0, 45),
          own=st.lists(st.integers(0, 6), max_size=8), count=st.sampled_from([40, 5, 1, 0]),
          ends=st.booleans(), ignores=st.booleans(), salt=st.sampled_from([b"", b"", b"a key"]))
    def submit(self, base, shared, own, count, ends, ignores, salt):
        self.ask((*base[:shared], *own), count, ends, ignores, salt)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 1000), own=st.lists(st.integers(0, 6), max_size=8),
          count=st.sampled_from([40, 5]))
    def submit_next_turn(self, which, own, count):
        before = self.asked[which % len(self.asked)]
        self.ask((*before.prompt, *self.tokens(before.request_id), *own), count, salt=before.salt)

    def ask(self, tokens, count, ends=False, ignores=False, salt=b""):
        prompt = tuple(token % self.n_vocab for token in tokens)[:N_CTX - 20] or (1,)
        number = len(self.asked)
        self.asked[number] = Request(number, prompt, count, salt=salt, ignore_eos=ignores,
                                     eos_ids=frozenset({0}) if ends else frozenset())
        self.pipeline.submit(self.asked[number])

    @rule(picks=st.lists(st.integers(0, 1000), min_size=1, max_size=60))
    def take_steps(self, picks):
        for pick in picks:
            self.pipeline.step(pick)

    @rule(count=st.sampled_from([20, 60, 200]))
    def go_on(self, count):
        for _ in range(count):
            self.pipeline.step()

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 1000))
    def leave(self, which):
        self.pipeline.abort(which % len(self.asked))

    @rule(n_stages=st.sampled_from([1, 2, 4]))
    def lose_stages(self, n_stages):
        # those that come have the files of those that went, which are here one set
        self.pipeline.lose(len(self.disks) if self.disks is not None else n_stages)

    @rule()
    def start_again(self):
        """The whole job is gone; another one gets its open requests, and what they have."""
        old = self.pipeline
        self.before = {number: self.tokens(number) for number in self.asked}
        self.start(len(old.stages))
        for number, request in self.asked.items():
            self.pipeline.output[number] = []
            if number in old.finished:
                self.pipeline.finished[number] = old.finished[number]
            else:
                self.pipeline.feed(Enqueue(request, tuple(self.before[number])))

    def tokens(self, number):
        return [*self.before.get(number, ()), *self.pipeline.output[number]]

    def wanted(self, request):
        eos = frozenset() if request.ignore_eos else request.eos_ids
        found = plain(request.prompt, request.max_tokens, self.n_vocab, eos)
        return found[:max(N_CTX - len(request.prompt), 0)]

    @invariant()
    def tokens_are_those_of_plain_decoding(self):
        for number, request in getattr(self, "asked", {}).items():
            found = self.tokens(number)
            assert found == self.wanted(request)[:len(found)]

    def teardown(self):
        if not hasattr(self, "pipeline"):
            return
        open_before = set(self.asked) - set(self.pipeline.finished)
        self.pipeline.drain()
        for number, request in self.asked.items():
            if self.pipeline.finished[number] != "abort":
                assert self.tokens(number) == self.wanted(request), request
        ends = [i.request_id for i in self.pipeline.log if isinstance(i, Finish | Refuse)]
        assert len(ends) == len(set(ends))
        assert open_before <= set(ends)
        check_at_rest(self.pipeline)
        if self.scene.limits.chains and not self.pipeline.lost:
            check_chains(self.pipeline)
        if self.rows is not None:
            assert not self.rows._lanes


@pytest.mark.parametrize("kind", KINDS)
def test_every_interleaving_gives_the_plain_tokens(kind):
    run_state_machine_as_test(type("Law", (Law,), {"kind": kind}), settings=examples(200))
