"""Which changed options of a server affect open requests, and which cannot change at all.

Pure: compares values of options, as `Config.values` returns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeinfer.config import options

#: options on which no token depends: placement, timing and speculation
_SAME = frozenset("""
    offline draft_model hf_repo_draft draft_small threads_draft gpu_layers_draft mlock mmap
    huge_pages distribute pace_ms pace_row_ms cancel_path keep_binding split layers remeasure
    strict timeout heartbeat spares draft_ranks rebalance debug fault nodes
    policy proposer ablate draft_max tree_max draft_p_min path_min alternatives adapt p_split
    p_recovery p_decay tip branches partitions credit parallel cache_tokens prefix_cache
    speculation""".split())


def risky(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the options that differ and on which tokens of an open request may depend. Keys,
    limits and sampling affect later requests only."""
    later = options("serve", "sampling", "request")
    names = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    return sorted(names - _SAME - set(later))


#: options that are fixed for the life of the HTTP process
_KEPT = ("host", "port", "ssl_cert_file", "ssl_key_file", "otlp_endpoint", "journal",
         "journal_sync", "journal_keep", "journal_size")


def kept(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return an error text if options differ that belong to the HTTP process, which a new job
    does not replace; else ""."""
    names = [name for name in _KEPT if old.get(name) != new.get(name)]
    if not names:
        return ""
    flags = {name: options("serve")[name].flags[-1] for name in names}
    as_now = " ".join(f"{flags[name]} {old[name] or repr(old[name])}" for name in names)
    return (f"{', '.join(flags.values())} cannot change while the HTTP process keeps its clients: "
            f"give {as_now} as before, or `pipeinfer down` and `pipeinfer up` with other ones")


def is_wide(values: Mapping[str, Any]) -> bool:
    """Whether layers are cut into slices: another number of ranks may cut them differently."""
    return bool(values["grid"] or values["slices"])
