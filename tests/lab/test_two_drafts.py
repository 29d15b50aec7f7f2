"""Trees of two drafts, emulated."""

from __future__ import annotations

import dataclasses

import pytest

from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import Experiment
from pipeinfer.errors import UsageError
from pipeinfer_lab.commands import bench
from pipeinfer_lab.two_drafts import TwoDrafts

PROFILES = load_profiles()


def test_two_drafts_are_right_where_either_is_and_take_the_time_of_both():
    """Their merged trees, under both policies that have trees."""
    for policy in ("published", "speculative"):
        one = Experiment("c", "dolphin-tinyllama", policy, nodes=5, tokens=96, limits=(
            ("branches", 2), ("tree_max", 4), ("p_min", 0.1), ("p_split", 0.1)))
        both = TwoDrafts(**dataclasses.asdict(one), second="dolphin-orca2")
        alone, merged = (bench.measure(PROFILES, case) for case in (one, both))
        assert alone["tokens_equal"]
        assert merged["tokens_equal"]
        assert merged["accepted_speculative"] > alone["accepted_speculative"]
        assert merged["draft_busy"] / merged["drafted"] > alone["draft_busy"] / alone["drafted"]
    with pytest.raises(UsageError, match="drafts for falcon"):
        bench.measure(PROFILES, TwoDrafts(**dataclasses.asdict(one), second="falcon-7b"))
