"""Where head and draft go when the acceptance is known roughly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.scenarios import controller_of
from pipeinfer.emulation.virtual import simulate
from pipeinfer.emulation.wide import WideExperiment
from pipeinfer.forecast.placing import ERROR, TRUST, around, fastest, places, safe, steady


@dataclass(frozen=True)
class Line:
    """A place whose speed with guesses grows with the acceptance."""

    name: str
    plain: float
    start: float
    slope: float
    overlaps: bool = False

    def speed(self, acceptance):
        return max(self.plain, self.start + self.slope * acceptance)


ALONE = Line("no draft", 10.0, 0.0, 0.0)
TURNS = Line("by turns", 10.0, 7.0, 6.0)
APART = Line("apart", 7.0, 2.0, 15.0, overlaps=True)


@pytest.mark.parametrize(("acceptance", "judged", "chosen"), [
    (0.5, "no draft", "by turns"),  # it costs nothing while it rests
    (0.7, "apart", "by turns"),     # at 0.55 apart would be slower than plain decoding
    (0.95, "apart", "apart"),       # at 0.80 it is 14, of which 12.2 are trusted
])
def test_a_place_that_may_be_slower_than_plain_decoding_is_not_chosen(acceptance, judged, chosen):
    found = [ALONE, TURNS, APART]
    assert fastest(found, acceptance).name == judged
    one = safe(found, acceptance)
    assert one.name == chosen
    assert max(one.plain, TRUST * one.speed(acceptance - ERROR)) >= 0.99 * 10.0


def test_the_least_loss_within_the_error_counts():
    steep, flat = Line("steep", 1.0, 0.0, 10.0), Line("flat", 5.0, 5.0, 0.0)
    assert steady([steep, flat], 0.55).name == "steep"  # 4 of 5 against 5 of 7
    assert steady([steep, flat], 0.45).name == "flat"
    assert around(0.05) == pytest.approx([0.0, 0.05, 0.2])


def test_goliath_on_four_nodes_is_no_slower_with_its_draft_than_without():
    """Its draft is right in 52 % and a seventh of its time: no guess pays on one wide stage."""
    profiles = load_profiles()
    base = WideExperiment("c", "goliath-xwin7b", nodes=4, tokens=97)
    found = places(profiles, base, around(0.52 + ERROR))
    speeds = {}
    for place in (found[0], safe(found, 0.52 + ERROR)):
        built = wide.build(profiles, place.experiment, place.grid)
        speeds[place.name] = simulate(
            built.scenario, controller_of(built, place.experiment)).tokens_per_second
    plain = speeds["1x4, no draft"]
    assert min(speeds.values()) >= 0.98 * plain
    assert dataclasses.replace(found[0]).plain == pytest.approx(plain, rel=0.02)
