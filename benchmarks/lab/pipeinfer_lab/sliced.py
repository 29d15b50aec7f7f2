"""Emulated grids of one stage whose members all have slices of a prediction head, by turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from pipeinfer.cluster.draft_ranks import STEP
from pipeinfer.core.policy import Policy
from pipeinfer.emulation import wide
from pipeinfer.emulation.profiles import Profiles
from pipeinfer.emulation.scenarios import Built, Ground
from pipeinfer.emulation.wide import TURNS, WideExperiment, sums_of
from pipeinfer.planning.teams import Wire

SLICED = "sliced"  #: a place of the head besides those of `wide`


def build(profiles: Profiles, experiment: WideExperiment) -> Built:
    """The scenario of an experiment whose head is sliced. Raises UsageError and PlanError."""
    turns = dataclasses.replace(experiment, head=TURNS)
    grid = wide.plan(profiles, turns)
    built = wide.build(profiles, turns, grid)
    built = dataclasses.replace(built, scenario=dataclasses.replace(built.scenario, draft=partial(
        _sliced, built.scenario.draft, wide.ground_of(profiles, turns), len(grid.stages[0].hosts),
        experiment)))
    return wide.by_turns(built) if experiment.policy == Policy.PIPEINFER else built


def _sliced(whole: Callable[[int], float], ground: Ground, width: int,
            experiment: WideExperiment, rows: int) -> float:
    """Time of a decode of a head in slices. Besides what slices and sums take, every member has all
    of the projection of token and row, which is as large as 2 rows of the output matrix for each
    element of a row."""
    draft, node = ground.draft, ground.drafter
    projection = 2 * draft.n_embd * draft.output_bytes / draft.n_vocab
    sums, wire = sums_of(experiment), Wire(ground.wire.latency, ground.wire.bandwidth)
    return (node.seconds(projection, draft.quantisation, rows)
            + (whole(rows) - node.overhead) / width
            + 3 * sums.seconds(width, rows * draft.n_embd, wire) + STEP)
