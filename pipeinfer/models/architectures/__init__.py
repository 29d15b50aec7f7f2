"""All architectures that pipeinfer has declarations of: `table` has them all.

Every part that depends on an architecture reads its declaration here; no other part contains
architectures' names. `layers` contains the functions of a model that follow from it. An
entry that can be cut rests on tests/backends/test_split_parity.py, which cuts such models at every
layer, bit-equal. Runs nothing.
"""

from __future__ import annotations

from pipeinfer.models.architectures.declaration import Architecture
from pipeinfer.models.architectures.table import ARCHITECTURES

__all__ = ["TABLE", "Architecture", "declared"]

_UNKNOWN = Architecture((), splits=False, checked=False)
TABLE: dict[str, Architecture] = {
    name: one for one in ARCHITECTURES for name in one.names}


def declared(name: str) -> Architecture:
    """Return an architecture's declaration; for an unknown one that of nothing known."""
    return TABLE.get(name, _UNKNOWN)
