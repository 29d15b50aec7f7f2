"""Stores the grid that --grid auto chose for a model on these hosts, for the next start.

Slices follow measured speeds, which differ a little between starts, and other slices round
differently. So a choice (also that of one rank per stage) is stored next to the ranks'
measurements, on rank 0's host, and is valid as long as it fits. This module decides nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pipeinfer.errors import PipeinferError, PlanError
from pipeinfer.models.shard_cache import cache_directory, recall, remember
from pipeinfer.models.slice_parts import Slice, check_fits, sizes_of
from pipeinfer.nodes import RankInfo, group_of
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.wide import Teams, stages_of

_FORMAT = 1


class _Stage(msgspec.Struct, frozen=True):
    """One stage of the choice.

    places: of its members, as indices into the candidate ranks. layers: how many.
    """

    places: tuple[int, ...]
    layers: int
    cut: tuple[str, ...]


class _Note(msgspec.Struct, frozen=True):
    """The stored choice. when: seconds since the epoch; stages: none for one rank per stage."""

    when: float
    stages: tuple[_Stage, ...]


class GridChoice(Struct, frozen=True):
    """The stages with the number of layers of each, and the names of their slices if decided."""

    teams: Teams
    layers: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...] | None = None


class Remembered(Struct, frozen=True):
    """A stored choice. day: of the choice, such as 2026-11-23; choice: None for one rank per
    stage."""

    day: str
    choice: GridChoice | None


def recall_grid(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int]) -> Remembered | None:
    """Return the stored choice for this model on the hosts of these ranks, None if there is
    none.

    Raises PlanError if it does not fit any more.
    """
    value = recall(_path(model, hosts, ranks))
    try:
        note = msgspec.convert(value, _Note)
    except msgspec.ValidationError:
        return None
    day = time.strftime("%Y-%m-%d", time.localtime(note.when))
    if not note.stages:
        return Remembered(day, None)
    _check(model, hosts, ranks, note.stages)
    teams = Teams(tuple(tuple(ranks[place] for place in one.places) for one in note.stages),
                  tuple((1.0,) * len(one.cut) for one in note.stages))
    return Remembered(day, GridChoice(teams, tuple(one.layers for one in note.stages),
                                      tuple(one.cut for one in note.stages)))


def keep_grid(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int], plan: Plan | None
              ) -> None:
    """Store a choice. plan: None for one rank per stage."""
    places = {rank: place for place, rank in enumerate(ranks)}
    stages = () if plan is None else tuple(
        _Stage(tuple(places[one.rank] for one in team), team[0].stop - team[0].start, team[0].cut)
        for team in stages_of(plan.held))
    remember(_path(model, hosts, ranks), msgspec.to_builtins(_Note(time.time(), stages)))


def _path(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int]) -> Path:
    """Return the file for this model and the hosts of these ranks."""
    identity = (_FORMAT, model.fingerprint, [hosts[rank].host for rank in ranks])
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return cache_directory() / f"grid-{digest}.json"


def _check(model: Any, hosts: Sequence[RankInfo], ranks: Sequence[int], stages: Sequence[_Stage]
           ) -> None:
    """Raise PlanError unless these stages are possible with these ranks."""
    places = [place for one in stages for place in one.places]
    if len(set(places)) != len(places) or not all(0 <= place < len(ranks) for place in places):
        raise PlanError("it names ranks that are not there")
    if sum(one.layers for one in stages) != model.n_layers:
        raise PlanError("it has other layers than the model")
    for one in stages:
        groups = {group_of(hosts[ranks[place]]) for place in one.places}
        if len(groups) > 1:
            raise PlanError("a stage would have members of different groups of the nodes file")
        if len(one.cut) < len(one.places) and (one.cut or len(one.places) != 1):
            raise PlanError("a member would have no slice")
        try:
            _check_cut(model, [Slice.parse(name) for name in one.cut])
        except PipeinferError as error:
            raise PlanError(str(error)) from None


def _check_cut(model: Any, cut: Sequence[Slice]) -> None:
    """Raise PlanError unless the slices are all of the model, in order."""
    if not cut:
        return
    sizes = sizes_of(model)
    at = query = row = 0
    for piece in cut:
        check_fits(model, piece)
        low, high = sizes.queries(piece)
        if (piece.ff[0], low, piece.vocab[0]) != (at, query, row):
            raise PlanError("its slices are not all of the model")
        at, query, row = piece.ff[1], high, piece.vocab[1]
    if (at, query, row) != (sizes.ff, sizes.heads, sizes.vocab):
        raise PlanError("its slices are not all of the model")
