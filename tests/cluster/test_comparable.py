"""A run with --ablate differs from the same run without it by the component, or is refused."""

from __future__ import annotations

import pytest

from pipeinfer.cluster.resolve import check_ablation
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import UsageError


def asks_for(policy="pipeinfer", ranks=4, *, turns=False, **options):
    """What `check_ablation` wants added, "" if nothing."""
    try:
        check_ablation(JobConfig.of(**options), Policy(policy), ranks, time_sharing=turns)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("ranks", "turns", "options", "wanted"), [
    (4, True, {"ablate": ("cancel",)}, "--set turns=off"),
    (4, True, {"ablate": ("alternatives", "cancel")}, "--set turns=off"),
    (4, True, {"ablate": ("async",)}, "--set turns=off --set adapt=false"),
    (4, True, {"ablate": ("continuous",), "adapt": False}, "--set turns=off"),
    (4, False, {"ablate": ("async",)}, "--set adapt=false"),
    (3, False, {"ablate": ("continuous",)}, "--set adapt=false --set tip=alone"),
    (3, False, {"ablate": ("continuous",), "adapt": False}, "--set tip=alone"),
    (2, False, {"ablate": ("continuous",), "adapt": False, "head_stage": True}, "--set tip=alone"),
    (7, False, {"ablate": ("continuous",), "adapt": False, "grid": "2x3"}, "--set tip=alone"),
    (1, False, {"ablate": ("cancel",)}, "--set tip=alone"),
    (1, False, {"ablate": ("async",)}, "--set adapt=false --set tip=alone"),
])
def test_what_else_would_differ_is_named(ranks, turns, options, wanted):
    assert f"add {wanted}, here and to the run" in asks_for(ranks=ranks, turns=turns, **options)


@pytest.mark.parametrize(("policy", "ranks", "options"), [
    ("pipeinfer", 4, {}), ("iterative", 4, {}), ("pipeinfer", 1, {}),
    ("pipeinfer", 4, {"ablate": ("cancel",)}),
    ("pipeinfer", 4, {"ablate": ("continuous",), "adapt": False}),
    ("pipeinfer", 3, {"ablate": ("continuous",), "adapt": False, "tip": "alone"}),
    ("pipeinfer", 3, {"ablate": ("continuous",), "adapt": False, "tip": "joined"}),
    ("pipeinfer", 1, {"ablate": ("cancel",), "tip": "alone"}),
    ("pipeinfer", 1, {"ablate": ("cancel",), "draft_max": 4}),
    ("published", 2, {"ablate": ("multibuffer",)}),
    ("published", 1, {"ablate": ("async",)}),
])
def test_what_can_be_compared_is_taken(policy, ranks, options):
    assert asks_for(policy, ranks, **options) == ""


@pytest.mark.parametrize("policy", ["iterative", "speculative"])
def test_a_policy_without_components_is_refused(policy):
    assert "has nothing to leave out" in asks_for(policy, ablate=("cancel",))
