"""Describes a grid in text: the slices of each member, and the time of a sum.

It uses what the stages reported at the start of a job, or a plan before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeinfer.core.control import Ready
from pipeinfer.models.slice_parts import Slice
from pipeinfer.planning.replan import Holding
from pipeinfer.planning.wide import stages_of


def drawing(held: Sequence[Holding], ready: Mapping[int, Ready]) -> list[str]:
    """Return a line per wide stage: the slices of its members, and the measured time of a sum."""
    nodes = {holding: node for node, holding in enumerate(held, 1)}

    def sums(team: Sequence[Holding]) -> str:
        last = ready[nodes[team[-1]]]
        return f"a sum takes {1e6 * last.sum_seconds:.0f} us ({last.sums})"

    return lines_of(held, lambda one: ready[nodes[one]].host,
                    lambda one: ready[nodes[one]].weight_bytes, sums)


def lines_of(held: Sequence[Holding], host_of: Callable[[Holding], str],
             bytes_of: Callable[[Holding], float], sums: Callable[[Sequence[Holding]], str]
             ) -> list[str]:
    """Return a line per stage whose layers are cut.

    host_of: returns the host of a member. bytes_of: returns the weights of a member.
    sums: returns the text on the sums of a stage.
    """
    lines = []
    for number, team in enumerate(stages_of(held), 1):
        if not team[0].cut:
            continue
        members = [f"rank {one.rank} on {host_of(one)} ({_slices(one)}; "
                   f"{bytes_of(one) / 1e6:.0f} MB)" for one in team]
        lines.append(f"stage {number}: layers {team[0].start}-{team[0].stop - 1}, {sums(team)}: "
                     + "; ".join(members))
    return lines


def _slices(holding: Holding) -> str:
    own = [Slice.parse(holding.cut[index]) for index in holding.slices]
    return " and ".join(f"{_heads(one)}, columns {one.ff[0]}-{one.ff[1] - 1}" for one in own)


def _heads(piece: Slice) -> str:
    if piece.queries is not None:
        return f"query heads {piece.queries[0]}-{piece.queries[1] - 1} of KV head {piece.heads[0]}"
    return f"KV heads {piece.heads[0]}-{piece.heads[1] - 1}"
