"""Prompts on the disks of a job's hosts: where they are kept, under which names, and where not."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Mapping
from hashlib import blake2b
from pathlib import Path

from pipeinfer.config import JobConfig
from pipeinfer.config.job import AUTO, ClusterConfig
from pipeinfer.core.control import Peers, Ready
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import KEY_BYTES
from pipeinfer.errors import BackendError, UsageError
from pipeinfer.files import parse_bytes
from pipeinfer.llama.library import llama_identity
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer.models.layers import has_ranges, has_windows, keeps_state
from pipeinfer.models.shard_cache import cache_directory
from pipeinfer.runtime.kv_store import KvStore
from pipeinfer.scheduler.stored import Stored, held_by
from pipeinfer.strategies import registry

_SECRET = "secret"  #: file in rank 0's folder
_EXACT = {"auto", "q8_0", "bf16"}  #: types of values whose rows do not depend on where cells lie


def folder_of(kv_disk: str) -> Path:
    """Return the folder of this host, by --kv-disk. Raises ModelError for a cache folder that
    cannot be used."""
    return cache_directory() / "kv" if kv_disk == AUTO else Path(kv_disk).expanduser()


def open_store(config: ClusterConfig) -> KvStore:
    """Return the store of this host. Raises OSError, BackendError and UsageError."""
    size = parse_bytes(config.kv_disk_size, "--kv-disk-size")
    return KvStore(folder_of(config.kv_disk), size, config.kv_disk_days)


def no_disk(config: JobConfig, *, gaps: bool, chains: bool = False, cut: bool = False) -> str:
    """Return why a job keeps no prompts on disks; "" if it does, or if it is not to.

    gaps, chains: as of `Job`. cut: whether stages have several members
    """
    model = config.model
    if not config.cluster.kv_disk:
        return "no --kv-disk"
    reasons = {
        "stages of several members": cut or config.cluster.grid,
        "layers on a GPU": model.gpu_layers or chains,
        "a decomposer": gaps or config.speculation.decomposer,
        "an adapter (--bita)": registry.adapter(config.speculation),
        "--exact off": model.exact == "off",
        "--set like_llama_cpp": model.like_llama_cpp,
        "-fa off": model.flash_attn == "off",
        "these cache types, whose sums depend on where cells lie": model.cache_type_v not in _EXACT,
    }
    return next((name for name, found in reasons.items() if found), "")


def arithmetic_of(kind: str) -> str:
    """Return a digest of what bits depend on in this process. kind: of backend"""
    return blake2b(repr((kind, llama_identity())).encode(), digest_size=8).hexdigest()


def stored_by(config: ClusterConfig, bits: str, ready: Collection[Ready],
              model: ModelFile | ModelDir) -> Stored:
    """Return what the disks of all stages hold.

    bits: of the session. ready: of its stages
    Raises UsageError for a folder of this host that cannot be used.
    """
    classes = {one.arithmetic for one in ready}
    # where hosts differ, bits belong to this split of the layers
    split = sorted(classes) if len(classes) == 1 else sorted(
        (one.layers, one.arithmetic) for one in ready)
    root = blake2b(repr((bits, split)).encode(), key=_secret(config), digest_size=KEY_BYTES)
    answers = not (keeps_state(model) or (isinstance(model, ModelFile) and has_windows(model)))
    held = held_by([one.stored or b"" for one in ready], model.n_layers)
    return Stored(root.digest(), has_ranges(model), held, answers)


def peers_of(grid: Grid, ready: Mapping[int, Ready]) -> Peers:
    """Return how the hosts of the stages reach each other's stores. ready: by node"""
    return Peers(secrets.token_hex(32), tuple(ready[node].peers for node in grid.leaders))


def _secret(config: ClusterConfig) -> bytes:
    """The installation's secret, so that names of files confirm no guess of a prompt."""
    try:
        folder = folder_of(config.kv_disk)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _SECRET
        with contextlib.suppress(FileExistsError):
            fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fresh, "wb") as file:
                file.write(secrets.token_bytes(32))
        return path.read_bytes()[:32] or b"\0"
    except (OSError, BackendError) as error:
        raise UsageError(f"--kv-disk {config.kv_disk}: {error}") from error
