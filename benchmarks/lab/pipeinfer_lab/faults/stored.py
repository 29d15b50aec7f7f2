"""Faults of the disk with prompts: damaged files, no room, slow. Replaces what the store reads and
writes by, in this process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.backends.llamacpp.saved_cells import SavedCells
from pipeinfer.runtime.kv_store import KvStore
from pipeinfer_lab.faults.faults import KV, Fault, Kind, begin, flip_byte, happened_here


class FaultyDisk:
    """What `KvStore` does with files, with the faults of one rank."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults, self._reads, self._writes = faults, 0, 0
        self._read, self._put = KvStore._read, KvStore._put

    def read(self, store: KvStore, path: Path) -> SavedCells:
        """Read a file; a byte of some is flipped first."""
        self._reads += 1
        for fault in self._faults:
            if fault.kind is Kind.KV_CORRUPT and self._reads % fault.every == 0 and path.exists():
                self._happens(fault)
                flip_byte(path)
            elif fault.kind is Kind.KV_SLOW:
                self._happens(fault)
                time.sleep(fault.ms / 1e3)
        return self._read(store, path)

    def put(self, store: KvStore, name: str, data: bytes) -> bool:
        """Write a file, if there is room."""
        self._writes += 1
        for fault in self._faults:
            if fault.kind is Kind.KV_FULL and self._writes > fault.after:
                self._happens(fault)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if fault.kind is Kind.KV_SLOW:
                self._happens(fault)
                time.sleep(fault.ms / 1e3)
        return self._put(store, name, data)

    @staticmethod
    def _happens(fault: Fault) -> None:
        if fault not in happened_here:
            begin(fault)


def damage_store(faults: Sequence[Fault], rank: int) -> None:
    """Let the stores of this process have the faults of this rank, if there are any."""
    if mine := [fault for fault in faults if fault.rank == rank and fault.kind in KV]:
        disk = FaultyDisk(mine)
        KvStore._read = lambda self, path: disk.read(self, path)  # type: ignore[method-assign]
        KvStore._put = lambda self, name, data: disk.put(  # type: ignore[method-assign]
            self, name, data)
