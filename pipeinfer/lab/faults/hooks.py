"""Faults and paces as hooks of a rank: what `--fault` and `--pace-ms` load."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from pipeinfer.backends.base import Backend
from pipeinfer.backends.exact_width import Widths
from pipeinfer.backends.team import Team
from pipeinfer.cluster.hooks import Hook, Report
from pipeinfer.config import ClusterConfig
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.lab.faults.faults import (
    faulty_cache,
    faulty_progress,
    faulty_recovery,
    parse_faults,
)
from pipeinfer.lab.faults.paced import PacedBackend, PacedTeam
from pipeinfer.lab.faults.wrappers import faulty_backend, faulty_port
from pipeinfer.transport.base import Port


class FaultHook(Hook):
    """Causes the faults that `--fault` names for this rank. Raises UsageError for a bad one."""

    def __init__(self, config: ClusterConfig, rank: int) -> None:
        super().__init__(config, rank)
        self.faults = parse_faults(config.fault)
        self._recovery = faulty_recovery(self.faults, rank)

    def port(self, port: Port) -> Port:
        """A port that loses or delays messages."""
        return faulty_port(port, self.faults, self.rank)

    def progress(self, report: Report) -> Report:
        """A report at which the rank fails while it loads."""
        return faulty_progress(report, self.faults, self.rank)

    def backend(self, backend: Backend, *, in_team: bool) -> Backend:
        """A backend that fails in a run."""
        del in_team
        return faulty_backend(backend, self.faults, self.rank)

    def draft(self, backend: Backend) -> Backend:
        """A draft's backend that fails, too."""
        return faulty_backend(backend, self.faults, self.rank)

    def cached(self, shard: Path) -> None:
        """Damage the file, if a fault says so."""
        faulty_cache(shard, self.faults, self.rank)

    def recovering(self) -> None:
        """Fail in a recovery, if a fault says so."""
        self._recovery()


class PaceHook(Hook):
    """Makes every decode take as long as on another machine (`--pace-ms`, `--pace-row-ms`)."""

    def __init__(self, config: ClusterConfig, rank: int) -> None:
        super().__init__(config, rank)
        self._first, self._further = config.pace_ms / 1e3, config.pace_row_ms / 1e3

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
