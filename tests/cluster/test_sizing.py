"""From options to limits: what several requests need."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from pipeinfer.cluster.draft_ranks import PlacedProposer
from pipeinfer.cluster.notes import doubts
from pipeinfer.cluster.resolve import choose_policy, with_usual
from pipeinfer.cluster.sizing import (
    cancel_path,
    cells_for,
    chunk_of,
    controller_for,
    grouped,
    ids_for,
    kept_for,
    limits_for,
    sizes_for,
    tried_rows,
)
from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.core.policy import CancelPath, Policy
from pipeinfer.errors import UsageError
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.scheduler.controller import least_hope
from pipeinfer.strategies import registry
from pipeinfer.strategies.resources import Asked, Draft

CURVE = ((2, 1.2), (4, 1.6), (8, 2.4), (16, 4.0))
DRAFT = EMBEDDED / "draft.gguf"
PROPOSERS = [PlacedProposer(registry.proposers()["draft"], Draft(DRAFT))]


def limits(config, n_stages=3):
    found, _ = limits_for(
        config.speculation,
        choose_policy(config, PROPOSERS),
        sizes_for(0.2),
        n_ctx=1000,
        chunk=64,
        exact=16,
        n_stages=n_stages,
        curve=CURVE,
        spare=200,
    )
    return grouped(found, 16, n_stages, CURVE)


def test_one_request_shares_with_nobody():
    found = limits(JobConfig())
    assert (found.parallel, found.cells, found.share) == (1, 1000, (1,))
    assert not found.alone


def test_several_requests_get_cells_ids_and_groups():
    config = JobConfig.of(parallel=16)
    found = limits(config)
    assert found.cells == 2000
    assert found.kept == 32
    assert found.n_ids == ids_for(config.speculation, 4)
    assert len(found.share) == 16
    assert found.share[0] == 1 < found.share[15]
    assert kept_for(config.replace(prefix_cache=False).speculation) == 0
    assert cells_for(config.replace(cache_tokens=5000).speculation, 1000) == 5000


def test_runs_of_many_requests_are_tried_only_where_there_may_be_some():
    many = JobConfig.of(parallel=40)
    assert [tried_rows(JobConfig.of(parallel=lanes), 16, grouped=True)
            for lanes in (1, 16, 40, 128)] == [16, 16, 40, 64]
    assert tried_rows(many, 16, grouped=False) == 16
    wide = grouped(limits(many), 40, 1, CURVE)
    assert (wide.exact_width, wide.group(40), wide.group(20)) == (16, 40, 20)
    assert grouped(limits(many), 16, 1, CURVE).group(40) <= 16


def test_speculation():
    assert limits(JobConfig.of(speculation="on")).alone
    assert limits(JobConfig.of(speculation="off")).policy is Policy.ITERATIVE
    assert limits(JobConfig.of(speculation="off", policy="iterative")).policy \
        is Policy.ITERATIVE


@pytest.mark.parametrize(("given", "draft", "ranks", "guesses"), [
    ({}, DRAFT, 2, ("prompt-lookup", "draft")),
    ({}, DRAFT, 1, ("prompt-lookup", "draft")),
    ({}, None, 1, ("prompt-lookup",)),
    ({"policy": "speculative"}, DRAFT, 1, ("draft",)),
    ({"adapt": False}, DRAFT, 1, ("draft",)),
    ({"credit": 3}, DRAFT, 1, ("draft",)),
    ({}, None, 3, ("prompt-lookup",)),
    ({}, None, 2, ()),
    ({"head_stage": True}, None, 2, ("prompt-lookup",)),
    ({"grid": "1x3"}, None, 4, ()),
    ({"grid": "2x2"}, None, 5, ("prompt-lookup",)),
    ({"policy": "speculative"}, DRAFT, 4, ("prompt-lookup", "draft")),
    ({"policy": "published"}, DRAFT, 4, ("draft",)),
    ({"policy": "iterative"}, None, 4, ()),
    ({"speculation": "off"}, DRAFT, 4, ()),
    ({"draft_model": "none"}, None, 4, ()),
    ({"proposer": ("draft",)}, DRAFT, 4, ("draft",)),
])
def test_the_default_proposers_by_what_is_there(given, draft, ranks, guesses):
    found = with_usual(Asked(JobConfig.of(**given), None, draft, ("llamacpp",)), ranks)
    assert found.speculation.proposer == guesses


def test_what_cannot_be():
    with pytest.raises(UsageError, match="smaller than the context of one request"):
        cells_for(SpeculationConfig(cache_tokens=999), 1000)
    with pytest.raises(UsageError, match="sequence ids"):
        ids_for(SpeculationConfig(parallel=128, partitions=200), 4)


FOURS = ((2, 1.5), (3, 2.3), (4, 1.55), (5, 2.2), (8, 2.6))
DEAR = ((2, 2.6), (3, 3.0), (4, 3.4), (8, 4.2))


def shared(curve, exact=8, share=0.02, **options):
    """Limits and controller of a job whose draft computes on the only stage's cores."""
    config = JobConfig.of(**options).speculation
    found, pinned = limits_for(
        config, Policy.PIPEINFER, sizes_for(0.2), n_ctx=1000, chunk=64, exact=exact, n_stages=1,
        curve=curve, spare=200, draft_share=share)
    return found, controller_for(config, found, pinned, curve, 200, share)


def test_on_the_same_cores_draft_and_target_take_turns():
    limits, controller = shared(FOURS)
    assert limits.time_sharing
    assert limits.synchronous
    assert limits.costs[2] < limits.costs[1]  # rows are taken in fours
    assert limits.p_min == least_hope(limits.costs, 0.02)
    assert controller.limits == limits


def test_where_not_even_a_good_draft_would_pay_none_is_asked():
    assert shared(DEAR)[1].limits.path_min < 1.0
    assert shared(FOURS, share=0.9)[1].limits.path_min > 1.0
    assert not shared(FOURS, exact=1)[0].speculates


def test_models_that_cannot_pay_are_left_out_and_what_the_text_repeats_goes_on():
    limits, controller = shared(FOURS, share=0.9, proposer=("prompt-lookup", "draft"))
    assert controller.limits.path_min < 1.0
    assert limits.draft_price == math.inf
    assert (limits.free_max, limits.free_min) == (7, least_hope(limits.costs, 0.0))
    assert limits.free_min < limits.p_min
    limits, _ = shared(FOURS, share=0.02, proposer=("prompt-lookup", "draft"))
    assert limits.draft_price == 0.02
    dear = tuple((rows, float(rows)) for rows, _ in FOURS)
    assert shared(dear, proposer=("prompt-lookup",))[1].limits.path_min > 1.0


@pytest.mark.parametrize("options", [{"credit": 4}, {"tip": "joined"}, {"path_min": 0.1},
                                     {"ablate": ("cancel",)}, {"draft_max": 2}])
def test_options_of_the_asynchronous_kind_are_taken_at_their_word(options):
    assert not shared(FOURS, **options)[0].time_sharing


def test_a_width_that_was_asked_for_stays():
    limits, controller = shared(FOURS, tree_max=5, draft_p_min=0.3)
    assert (limits.time_sharing, limits.tree_max, limits.p_min) == (True, 5, 0.3)
    assert {"tree_max", "p_min"} <= set(controller.pinned)
    assert not limits.costs
    limits, controller = shared(FOURS, draft_p_min=0.3)
    assert (limits.p_min, limits.free_min) == (0.3, None)  # of all guesses
    assert {"p_min", "free_min"} <= set(controller.pinned)


@pytest.mark.parametrize("options", [{"adapt": False}, {"speculation": "on"}])
def test_without_tuning_every_guess_of_the_usual_width_travels(options):
    limits, _ = shared(FOURS, **options)
    assert (limits.time_sharing, limits.tree_max, limits.costs) == (True, 3, ())


def test_prompts_like_llama_cpp_travel_in_its_chunks():
    assert chunk_of(JobConfig()) == 64
    assert chunk_of(JobConfig.of(like_llama_cpp=True)) == 512
    assert chunk_of(JobConfig.of(like_llama_cpp=True, ubatch=32)) == 32


@pytest.mark.parametrize(("policy", "options", "turns", "says"), [
    ("published", {"alternatives": 2, "tip": "joined"}, "",
     "--set alternatives and --set tip without effect: policy published does not use them"),
    ("published", {"alternatives": 0}, "", ""),
    ("speculative", {"tip": "alone"}, "", "--set tip without effect"),
    ("pipeinfer", {"alternatives": 2, "tip": "joined"}, "", ""),
    ("pipeinfer", {"p_recovery": 0.1, "p_decay": 0.1}, "shared weighed",
     "--set p_recovery and --set p_decay without effect: policy pipeinfer does not use them where "
     "ranks take turns"),
    ("pipeinfer", {"p_recovery": 0.1}, "weighed",
     "--set p_recovery without effect: policy pipeinfer does not use it where draft and target "
     "take turns (--set adapt=false)"),
    ("pipeinfer", {"p_recovery": 0.1, "p_decay": 0.1, "adapt": False}, "shared", ""),
    ("published", {"p_recovery": 0.1}, "", ""),
    ("pipeinfer", {"ablate": ("cancel",)}, "", ""),
    ("pipeinfer", {"ablate": ("continuous",), "adapt": False}, "", ""),
    ("pipeinfer", {"ablate": ("async",), "adapt": False}, "", "also ends continuous speculation"),
    ("published", {"ablate": ("multibuffer",)}, "", ""),
    ("published", {"p_decay": 0.1}, "", ""),
    ("pipeinfer", {"branches": 4}, "", "--set branches has no effect"),
    ("published", {"branches": 4}, "", ""),
    ("speculative", {"branches": 4, "ablate": ()}, "", ""),
    ("speculative", {"branches": 4}, "", ""),
    ("pipeinfer", {"p_decay": 0.1}, "", "--set p_decay has no effect"),
    ("pipeinfer", {"p_decay": 0.1, "p_recovery": 0.1}, "", "")])
def test_options_that_a_policy_does_not_use_are_named(policy, options, turns, says):
    job = SimpleNamespace(policy=Policy(policy), gaps=False, chains=False,
                          time_sharing="shared" in turns, plan=SimpleNamespace(ranks=(1, 2)))
    found = doubts(JobConfig.of(**options).speculation, job, "weighed" in turns)
    assert [says in note for note in found] == [True] * bool(says)


def published(**options):
    config = JobConfig.of(policy="published", **options)
    limits, _ = limits_for(config.speculation, choose_policy(config, PROPOSERS),
                           sizes_for(0.9), n_ctx=100, chunk=64, exact=8, n_stages=3, curve=FOURS,
                           spare=100)
    return limits, controller_for(config.speculation, limits, frozenset(), FOURS, 100)


def test_the_published_policy_starts_as_its_experiments_did():
    limits, controller = published()
    assert controller is None
    assert (limits.draft_max, limits.p_min, limits.credit) == (3, 0.1, 4)
    assert (limits.p_recovery, limits.p_decay, limits.path_min) == (0.0, 0.0, 0.0)
    limits, _ = published(draft_max=4, draft_p_min=0.001, p_recovery=0.4, p_decay=0.01)
    assert (limits.draft_max, limits.p_min) == (4, 0.001)
    assert (limits.p_recovery, limits.p_decay) == (0.4, 0.01)


def test_branches_of_the_published_policy_have_its_cutoff_and_more_ids():
    limits, _ = published(branches=3)
    assert (limits.max_branches, limits.p_split, limits.partitions) == (3, 0.1, 24)
    limits, _ = published(branches=3, p_split=0.3, partitions=5)
    assert (limits.p_split, limits.partitions) == (0.3, 5)
    assert published()[0].max_branches == 1


def test_the_published_policy_cancels_from_the_last_stage_backward():
    assert cancel_path(JobConfig.of(policy="published")) is CancelPath.BACKWARD
    assert cancel_path(JobConfig.of(policy="pipeinfer")) is CancelPath.DIRECT
    assert cancel_path(JobConfig.of(policy="published", cancel_path="direct")) is CancelPath.DIRECT


@pytest.mark.parametrize(("options", "says"), [
    ({"policy": "pipeinfer", "ablate": ("multibuffer",)}, "one of published"),
    ({"ablate": ("multibuffer",)}, "one of published"),
    ({"policy": "published", "ablate": ("alternatives",)}, "one of pipeinfer"),
])
def test_what_a_policy_does_not_have(options, says):
    with pytest.raises(UsageError, match=says):
        choose_policy(JobConfig.of(**options), PROPOSERS)


@pytest.mark.parametrize(("proposers", "asked"), [
    ("draft", True), ("prompt-lookup,draft", False)])
def test_beside_copies_a_draft_has_to_pay_as_drafts_usually_guess(proposers, asked):
    """A guess costs 0.35 and a row 0.35: 0.9 right pays, 0.7 does not."""
    config = JobConfig.of(proposer=tuple(proposers.split(",")))
    found, _ = limits_for(
        config.speculation, Policy.PIPEINFER, sizes_for(0.35), n_ctx=1000, chunk=64, exact=16,
        n_stages=1, curve=((2, 1.35), (4, 2.0), (8, 3.9), (16, 6.7)), spare=64, draft_share=0.35)
    assert found.asks_models == asked
