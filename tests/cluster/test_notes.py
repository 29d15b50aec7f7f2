"""What a start says of stages that are not as a user may expect."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from pipeinfer.cluster.notes import cut_candidates, doubts_about, one_stage, undrafted
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.nodes import RankInfo
from pipeinfer.scheduler.controller import NEVER
from pipeinfer.scheduler.events import LaneStats
from pipeinfer.scheduler.settings import Limits


@pytest.mark.parametrize(("backend", "threads", "exact", "said"), [
    ("torch", 2, 1, True), ("torch", 1, 1, False), ("torch", 2, 16, False),
    ("llamacpp", 2, 1, False)])
def test_threads_of_torch_are_named_where_they_make_runs_narrow(backend, threads, exact, said):
    stage = SimpleNamespace(backend=backend, threads=threads, gpu="", padded=0, padding_cost=1.0)
    assembly = SimpleNamespace(terms=SimpleNamespace(exact=exact), ready={1: stage})
    notes = doubts_about(JobConfig.of().model, SimpleNamespace(policy=Policy.PIPEINFER), assembly)
    assert any("with -t 1 wider runs may be exact" in note for note in notes) == said


@pytest.mark.parametrize(("hosts", "stages", "said"), [
    ("ab", (1,), True), ("aa", (1,), False), ("ab", (0, 1), False), ("abc", (1, 2), False),
    ("a", (0,), False), ("abb", (2,), True)])
def test_a_single_stage_on_another_host_is_named_with_the_option_for_two(hosts, stages, said):
    ranks = [RankInfo(k, host) for k, host in enumerate(hosts)]
    assert ("--head-stage: it holds layers as well" in one_stage(stages, ranks)) == said


@pytest.mark.parametrize(("options", "exact", "says"), [
    ({"own": {"lookahead_candidates": 15}}, 16,
     "at most 15 draft tokens per step, which are exact here: 3 whole candidates of 4 tokens "
     "instead of 15"), ({}, 16, ""), ({}, 9, ""), ({}, 8, "1 whole candidates of 4"),
    ({"own": {"lookahead_candidates": 15}, "exact": "off"}, 16, "")])
def test_candidates_of_lookahead_that_are_not_verified_are_counted(options, exact, says):
    """The paper's (15, 5, 15) of 7 B; by default two candidates of four tokens and the tip are
    nine rows."""
    job = SimpleNamespace(config=JobConfig.of(proposer=("lookahead",), **options))
    found = cut_candidates(job, exact)
    assert says in found
    assert bool(found) == bool(says)
    assert not cut_candidates(SimpleNamespace(config=JobConfig.of()), 1)


@pytest.mark.parametrize(("limits", "counts", "says"), [
    ({"policy": Policy.ITERATIVE}, {}, ""), ({}, {"issued_speculative": 1}, ""),
    ({"exact_width": 1, "time_sharing": True}, {}, "runs of one row"),
    ({"draft_price": math.inf}, {}, "cost more time here than they gain"),
    ({"path_min": NEVER}, {}, "cost more time here than they gain"),
    ({"draft_price": math.inf}, {"drafted": 4}, "none of 4 drafted tokens"),
    ({}, {}, "nothing to propose")])
def test_an_answer_without_draft_tokens_says_why(limits, counts, says):
    found = undrafted(Limits(**{"n_ctx": 10, "exact_width": 16, **limits}), LaneStats(**counts))
    assert says in found
    assert bool(found) == bool(says)
