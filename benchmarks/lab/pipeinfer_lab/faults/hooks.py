"""Faults as a hook of a rank: what `--hook fault=` loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeinfer.backends.base import Backend
from pipeinfer.cluster.hooks import Hook, Report
from pipeinfer.transport.base import Port
from pipeinfer_lab.faults.faults import (
    faulty_cache,
    faulty_progress,
    faulty_recovery,
    parse_faults,
)
from pipeinfer_lab.faults.stored import damage_store
from pipeinfer_lab.faults.wrappers import faulty_backend, faulty_port


class FaultHook(Hook):
    """Causes the faults that `--hook fault=` names for this rank. Raises UsageError for a bad
    one."""

    def __init__(self, values: Sequence[str], rank: int) -> None:
        super().__init__(values, rank)
        self.faults = parse_faults(values)
        self._recovery = faulty_recovery(self.faults, rank)
        damage_store(self.faults, rank)

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
