"""The pace of another machine as a hook of a rank: what `--hook pace=` loads."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import Widths
from pipeinfer.backends.team import Team
from pipeinfer.cluster.hooks import Hook
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.errors import UsageError
from pipeinfer.runtime.paced import PacedBackend, PacedTeam

_SLOWEST = 60.0  #: seconds of a decode


def pace_of(value: str) -> tuple[float, float]:
    """Return the seconds of a decode and of each of its further rows, from a text such as 40 or
    40+2.5, in milliseconds. Raises UsageError for any other."""
    parts = value.split("+")
    try:
        first, further = [float(part) / 1e3 for part in (*parts, "0")[:2]]
    except ValueError:
        first = further = -1.0
    if len(parts) > 2 or not (0 < first <= _SLOWEST and 0 <= further <= _SLOWEST):
        raise UsageError(f"--hook pace={value}: write milliseconds for a decode, and for each "
                         "further row of it, such as pace=40 or pace=40+2.5")
    return first, further


def pace_ms(hooks: Sequence[str]) -> float:
    """Return the milliseconds of a decode that values of --hook set; 0 where none does. Raises
    UsageError."""
    paces = [value for name, _, value in (word.partition("=") for word in hooks) if name == "pace"]
    return 1e3 * pace_of(paces[-1])[0] if paces else 0.0


class PaceHook(Hook):
    """Makes every decode take as long as on another machine (`--hook pace=MS+ROW_MS`)."""

    def __init__(self, values: Sequence[str], rank: int) -> None:
        super().__init__(values, rank)
        self._first, self._further = pace_of(values[-1])

    def _seconds(self, rows: int) -> float:
        return self._first + self._further * (rows - 1)

    def widths(self, widths: Widths) -> Widths:
        """What rows cost at that pace."""
        return structs.replace(widths, curve=tuple(
            self._seconds(rows) / self._first for rows in CURVE_ROWS))

    def backend(self, backend: Backend, *, in_team: bool) -> Backend:
        """The backend at that pace; members of a team wait before each sum instead."""
        return backend if in_team else PacedBackend(backend, self._seconds)

    def team(self, team: Team, n_layers: int, n_embd: int) -> Team:
        """The team at that pace: two sums a layer."""
        sums = 2 * n_layers
        return PacedTeam(team, self._first / sums, self._further / sums, n_embd)
