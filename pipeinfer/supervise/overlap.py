"""Decides whether the next job loads while the old one serves, and which one continues if one
dies.

Pure: the caller passes what is known of memory (`room`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Overlap: TypeAlias = Literal["auto", "always", "never"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)
RESERVE = 512 << 20  #: bytes that stay free on every host
_MORE = 1.1  #: times the estimate, as the actual plan and caches differ a little
_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Room:
    """A host's memory, in bytes.

    free: what more ranks may take, 0 if unknown. need: of the next job's ranks, None if unknown.
    """

    host: str
    free: float
    need: float | None


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """Whether both jobs run at the same time; and why not, or how much memory there is."""

    both: bool
    why: str


def choose(overlap: Overlap, rooms: Sequence[Room], unknown: str = "") -> OverlapChoice:
    """Decide whether the next job loads while the old one serves.

    rooms: of its hosts. unknown: why their memory is unknown, "" if it is known.
    """
    if overlap == "never":
        return OverlapChoice(False, "--overlap never")
    if overlap == "always":
        return OverlapChoice(True, "--overlap always")
    if unknown or not rooms:
        return OverlapChoice(False, f"what it needs is not known ({unknown or 'no host'})")
    for room in rooms:
        if room.need is None or room.free <= 0:
            what = "its free memory" if room.need is not None else "what its ranks need"
            return OverlapChoice(False, f"{what} is not known on {room.host}")
    tight = max(rooms, key=lambda room: _with_reserve(room) - room.free)
    words = (f"{tight.host} has {tight.free / _GIB:.1f} GiB free, the next job needs "
             f"{_with_reserve(tight) / _GIB:.1f} there")
    return OverlapChoice(_with_reserve(tight) <= tight.free, words)


def _with_reserve(room: Room) -> float:
    return _MORE * (room.need or 0.0) + RESERVE


def inherits(*, reachable: bool, same: bool, open_requests: int, force: bool) -> bool:
    """Whether the next job takes over although it still loads, because the old one has died. If
    not, it is ended, and the old one is started again.

    reachable: whether the HTTP process, which it has entered, answers.
    same: whether answers continue with the same tokens.
    force: whether open requests may end with an error.
    """
    return reachable and (same or not open_requests or force)
