"""Where head and draft go on an emulated cluster, and on which grid: by the judge, before a run.

A place is an arrangement of nodes with head and draft somewhere. `choose` takes an acceptance that
is only roughly known. It knows what a job does by itself later: it stops guessing where guesses do
not pay, but it cannot move head and draft.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeinfer.core.policy import Policy
from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles
from pipeinfer.emulation.wide import APART, BESIDE, TURNS, WideExperiment
from pipeinfer.errors import PlanError
from pipeinfer.planning.grids import GridPlan, best_grid, even_grid
from pipeinfer.planning.judge import LoadMix, tokens_per_second

PARTS = (0.25, 0.5)  #: of the first member's machine for head and draft beside it
TRUST = 0.87  #: of a judged speed with guesses, at least so much came out on 30 random clusters
ENOUGH = 0.99  #: of the speed of plain decoding
ERROR = 0.15  #: by which an acceptance may be wrong before it was measured


@dataclass(frozen=True, slots=True)
class Place:
    """An arrangement. experiment: with its head; its policy is iterative where there is no draft.
    grid: of the nodes that are left."""

    experiment: WideExperiment
    grid: GridPlan

    @property
    def name(self) -> str:
        """Grid and place of the head."""
        one = self.experiment
        if one.policy == Policy.ITERATIVE:
            return f"{self.grid.name}, no draft"
        part = f" {one.part:.0%}" if one.head == BESIDE else ""
        return f"{self.grid.name}, {one.head}{part}"

    @property
    def key(self) -> object:
        """Tells places apart."""
        return self.name, self.grid.layers, tuple(one.hosts for one in self.grid.stages)

    @property
    def overlaps(self) -> bool:
        """Whether head and draft have a machine or a part of one to themselves."""
        return self.experiment.policy != Policy.ITERATIVE and self.experiment.head != TURNS

    @property
    def plain(self) -> float:
        """Tokens per second without guesses, as judged."""
        return tokens_per_second(self.grid.arrangement, LoadMix(Policy.ITERATIVE))

    def speed(self, acceptance: float) -> float:
        """Tokens per second, as judged; without guesses where those do not pay."""
        policy = Policy(self.experiment.policy)
        if policy is Policy.PIPEINFER and self.experiment.head == TURNS:
            policy = Policy.SPECULATIVE
        return tokens_per_second(self.grid.arrangement, LoadMix(policy, acceptance=acceptance))


def places(profiles: Profiles, base: WideExperiment, acceptances: Sequence[float]) -> list[Place]:
    """The arrangements that are compared: the best grid without a draft, and for every place of
    head and draft the best ones by these acceptances. Raises PlanError where none holds the model.
    """
    found = [_best(profiles, dataclasses.replace(base, policy=Policy.ITERATIVE.value), 0.0)]
    asked = dataclasses.replace(base, policy=Policy.PIPEINFER.value)
    for head, part in ((APART, wide.PART), *((BESIDE, part) for part in PARTS)):
        for acceptance in acceptances:
            with contextlib.suppress(PlanError):
                if head == BESIDE or base.nodes > 1:
                    found.append(_best(profiles, dataclasses.replace(asked, head=head, part=part),
                                       acceptance))
    turns = dataclasses.replace(asked, head=TURNS)
    cluster = wide.cluster_of(wide.ground_of(profiles, turns), turns)
    for width in cluster.cut.widths(base.nodes):
        with contextlib.suppress(PlanError):
            found.append(Place(turns, even_grid(cluster, (width,))))
    return list({place.key: place for place in found}.values())


def _best(profiles: Profiles, experiment: WideExperiment, acceptance: float) -> Place:
    planned = dataclasses.replace(experiment, acceptance=acceptance)
    return Place(experiment, best_grid(wide.cluster_of(wide.ground_of(profiles, planned), planned)))


def fastest(found: Sequence[Place], acceptance: float) -> Place:
    """The place that is fastest if the acceptance is what it is taken for."""
    return max(found, key=lambda place: place.speed(acceptance))


def around(acceptance: float, steps: int = 1) -> list[float]:
    """What the acceptance may be, in so many steps to each side."""
    return [min(max(acceptance + ERROR * step / steps, 0.0), 0.99)
            for step in range(-steps, steps + 1)]


def steady(found: Sequence[Place], acceptance: float) -> Place:
    """The place that loses least, relative to the fastest, for any acceptance within `ERROR`."""
    return _least_loss(found, acceptance, lambda place, one: place.speed(one))


def safe(found: Sequence[Place], acceptance: float) -> Place:
    """The place that loses least, by speeds of which only `TRUST` is believed where head and draft
    take something from the stages, among those that are no slower than plain decoding on the best
    grid even if the acceptance is `ERROR` lower."""
    low, plain = around(acceptance)[0], max(place.plain for place in found)
    return _least_loss([place for place in found if _trusted(place, low) >= ENOUGH * plain],
                       acceptance, _trusted)


def _trusted(place: Place, acceptance: float) -> float:
    share = TRUST if place.overlaps else 1.0
    return max(place.plain, share * place.speed(acceptance))


def _least_loss(found: Sequence[Place], acceptance: float,
                speed: Callable[[Place, float], float]) -> Place:
    near = around(acceptance, 2)
    best = [max(speed(place, one) for place in found) for one in near]
    return max(found, key=lambda place: min(
        speed(place, one) / most for one, most in zip(near, best, strict=True)))
