"""Which changed options of a server affect open requests, and which cannot change at all.

Pure: compares values of options, as `Config.values` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeinfer.config import options


def risky(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the options that differ and on which tokens of an open request may depend. Keys,
    limits and sampling affect later requests only."""
    later = options("serve", "sampling", "request")
    same = {name for name, option in options().items() if not option.changes_tokens}
    names = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    return sorted(names - same - set(later))


def kept(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return an error text if options differ that belong to the HTTP process, which a new job
    does not replace; else ""."""
    differ = {name: option for name, option in options("serve").items()
              if option.fixed and old.get(name) != new.get(name)}
    if not differ:
        return ""
    as_now = " ".join(option.given(name, old[name]) for name, option in differ.items())
    called = ", ".join(option.called(name) for name, option in differ.items())
    return (f"{called} cannot change while the HTTP process keeps its clients: "
            f"give {as_now} as before, or `pipeinfer down` and `pipeinfer up` with other ones")


def is_wide(values: Mapping[str, Any]) -> bool:
    """Whether layers are cut into slices: another number of ranks may cut them differently."""
    return bool(values["grid"] or values["slices"])
