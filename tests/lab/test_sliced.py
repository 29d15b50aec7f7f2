"""A prediction head in slices, emulated."""

from __future__ import annotations

import dataclasses

import pytest

from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.virtual import simulate
from pipeinfer.emulation.wide import TURNS, WideExperiment
from pipeinfer.errors import UsageError
from pipeinfer_lab import sliced

PROFILES = load_profiles()
BASE = WideExperiment("c", "dolphin-tinyllama", nodes=8, tokens=96, prompt=32)


def test_a_sliced_draft_takes_less_time_the_more_members_there_are():
    whole = wide.build(PROFILES, dataclasses.replace(BASE, widths=(8,), head=TURNS))
    few, all_of_them = (sliced.build(PROFILES, dataclasses.replace(BASE, widths=(width,)))
                        for width in (4, 8))
    times = [built.scenario.draft(1) for built in (whole, few, all_of_them)]
    assert times[0] > times[1] > times[2] > times[0] / 8
    assert simulate(all_of_them.scenario).tokens == simulate(whole.scenario).tokens


def test_it_takes_one_stage():
    with pytest.raises(UsageError, match=r"2x4.*one stage"):
        sliced.build(PROFILES, dataclasses.replace(BASE, widths=(4, 4)))
