"""Hostfiles, and the TOML file next to one with the settings of each host.

    hostfiles/xeon         xeon1 slots=1           Open MPI's format
    hostfiles/xeon.toml    [node."xeon*"]          settings by host name or pattern
                           threads = 16
                           [rank.3]                settings of one rank
                           proposer = "prompt-lookup"

This module only reads the files: it contacts no host and uses no MPI. Names of profiles and links
are checked where they are used.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct, field, structs

from pipeinfer import host
from pipeinfer.config import ClusterConfig, JobConfig, Resolved
from pipeinfer.core.control import Bell
from pipeinfer.errors import UsageError
from pipeinfer.files import parse_bytes, read_toml
from pipeinfer.host import Place

_MAX_SLOTS = 1 << 16
_KEYS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}
#: settings that stand in for options of the same name
_OPTIONS = ("threads", "threads_draft", "gpu_layers", "gpu_layers_draft", "numa", "backend")
OWN_HOST = "host"
_ALL_LAYERS = 100_000
_NUMA = ("distribute", "isolate", "numactl", "per-rank", "off")
_NO_CONTROLS = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"
Role: TypeAlias = Literal["auto", "head", "stage", "draft", "spare"]
Backend: TypeAlias = Literal["", "auto", "llamacpp", "torch"]
Numa: TypeAlias = Annotated[str, Meta(pattern=rf"\A({'|'.join(_NUMA)}|[0-9]*)\Z")]
Mac: TypeAlias = Annotated[str, Meta(pattern=r"\A([0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5})?\Z")]
Device: TypeAlias = Annotated[str, Meta(pattern=r"\A(cpu|per-rank|gpu(:[0-9]+)?)?\Z")]
Name: TypeAlias = Annotated[str, Meta(pattern=_NO_CONTROLS, max_length=4096)]
ShortName: TypeAlias = Annotated[str, Meta(pattern=_NO_CONTROLS, max_length=64)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=_ALL_LAYERS)]
Table: TypeAlias = dict[str, Any]


class HostEntry(Struct, frozen=True):
    """A line of a hostfile: host, number of ranks, line number and user."""

    host: str
    slots: int
    line: int
    user: str = ""


class NodeSettings(Struct, frozen=True):
    """Settings of one host. Empty texts, zero threads and None mean "not set".

    profile: name of a node profile
    device: cpu, gpu, gpu:2 for the third GPU, or per-rank: the ranks of a host get its GPUs in turn
    threads: of a stage
    threads_draft: of the draft
    numa: one of llama.cpp's strategies, the number of a NUMA node to stay on, per-rank (the
        host's first rank on node 0, its second on node 1), or off (where the kernel likes)
    role: head, stage, draft (its ranks propose tokens) or spare
    proposer: of --proposer's names, which its ranks run instead of holding layers
    draft: model that they run as a draft
    memory: bytes that the job may fill on this host
    gpu_memory: bytes that the job may fill on the GPUs of one of its ranks
    layers: how many layers its stage holds
    gpu_layers: layers of a stage on its GPU
    gpu_layers_draft: layers of the draft on the GPU
    backend: llamacpp or torch
    mac: address of its network card: a host that does not answer is woken by a packet to it
    group: its ranks form wide stages with those of hosts in the same group only (hosts without one
        with each other); OWN_HOST: only with each other
    """

    profile: Name = ""
    device: Device = ""
    threads: Count = 0
    threads_draft: Count = 0
    numa: Numa = ""
    role: Role = "auto"
    proposer: Name = ""
    draft: Name = ""
    memory: int | None = None
    gpu_memory: int | None = None
    layers: Count | None = None
    gpu_layers: Count | None = None
    gpu_layers_draft: Count | None = None
    backend: Backend = ""
    mac: Mac = ""
    group: ShortName = ""

    @property
    def drafts(self) -> bool:
        """Whether its ranks propose tokens instead of holding layers."""
        return self.role == "draft" or bool(self.proposer or self.draft)

    @property
    def waits(self) -> bool:
        """Whether its ranks hold no layers when the job starts."""
        return self.role == "spare" or self.drafts

    @property
    def bound(self) -> bool:
        """Whether the settings give the number of a stage's threads, or where they run."""
        return bool(self.threads or self.numa)

    @property
    def on_gpu(self) -> bool:
        """Whether a stage computes on a GPU."""
        return bool(self.gpu_layers) or self.device not in ("", "cpu")

    def options(self, given: Iterable[str] = ()) -> dict[str, Any]:
        """Return the option values of these settings, without those named in `given`.

        `device = "cpu"` means no layer on a GPU, a gpu device all of them, unless gpu_layers is
        given; torch takes the one GPU that the process sees. The number of a NUMA node is no
        option of llama.cpp and is left out.
        """
        values: dict[str, Any] = {}
        if self.device:
            values["gpu_layers"] = 0 if self.device == "cpu" else _ALL_LAYERS
            values["device"] = "cpu" if self.device == "cpu" else "cuda"
        for name in _OPTIONS:
            value = getattr(self, name)
            if value not in ("", None) and not (name.startswith("threads") and value == 0):
                values[name] = value
        if self.numa in ("per-rank", "off") or self.numa.isdigit():
            del values["numa"]
        return {name: value for name, value in values.items() if name not in given}


class RankInfo(Struct, frozen=True):
    """A rank of the job as rank 0 sees it.

    rank: its number
    host: name of its host
    memory: bytes that it may fill
    cores: its own
    cores_host: those of its whole host
    settings: of its host
    asked_backend: value of its --backend
    torch_missing: packages that the torch backend would need there
    bell: where it is woken, see `control.Bell`
    kernels: what its llama.cpp was compiled for
    dead: whether it was lost while the job started
    room: name of the memory that it fills; "": that of its host
    device: bytes that it may fill on its GPUs
    """

    rank: int
    host: str
    memory: float = 0.0
    cores: int = 1
    cores_host: int = 1
    settings: NodeSettings = NodeSettings()
    asked_backend: str = "auto"
    torch_missing: tuple[str, ...] = ()
    bell: Bell = field(default_factory=Bell)
    dead: bool = False
    kernels: str = ""
    room: str = ""
    device: float = math.inf

    def gpu_layers(self, config: JobConfig) -> int:
        """Return how many layers of a llama.cpp stage on this rank are on its GPU."""
        own = self.settings.options(config.given)
        return int(own.get("gpu_layers", config.model.gpu_layers))

    def drafts_on_gpu(self, config: JobConfig) -> bool:
        """Return whether layers of a draft on this rank are on its GPU."""
        own = self.settings.options(config.given)
        return bool(own.get("gpu_layers_draft", config.model.gpu_layers_draft))


class Nodes(Struct, frozen=True):
    """A nodes file.

    layers: the whole job's split, by stage
    link: a link profile's name
    tables: settings by host name or pattern
    ranks: settings by rank
    """

    path: str
    layers: tuple[int, ...] | None = None
    link: str = ""
    defaults: NodeSettings = NodeSettings()
    tables: tuple[tuple[str, dict[str, Any]], ...] = ()
    ranks: dict[int, dict[str, Any]] = {}

    def of(self, host: str, rank: int | None = None) -> NodeSettings:
        """Return the settings of `host`: defaults, then patterns in the file's order, then its
        own name, then those of `rank` there.

        A table for `xeon1` also fits the host `xeon1.lab.example`.
        Raises UsageError where ranks shall propose tokens and have another role.
        """
        names = (host, host.partition(".")[0])
        fitting = [(name in names, table) for name, table in self.tables
                   if any(fnmatch.fnmatchcase(n, name) for n in names)]
        merged: dict[str, Any] = {}
        for _, table in sorted(fitting, key=lambda pair: pair[0]):
            merged |= table
        if rank is not None:
            merged |= self.ranks.get(rank, {})
        found = structs.replace(self.defaults, **merged)
        if found.drafts and found.role not in ("auto", "draft"):
            key = "proposer" if found.proposer else "draft"
            where = host if rank is None else f"rank {rank} on {host}"
            raise UsageError(f"nodes file {self.path}: {where} has role = \"{found.role}\" and "
                             f"{key}, which makes it propose tokens instead: remove one of them")
        return found


# --- hostfiles --------------------------------------------------------------------------------


def read_hostfile(path: str | Path) -> tuple[HostEntry, ...]:
    """Return the hosts of a file in Open MPI's format (`host slots=4`) or hydra's (`host:4`,
    `[fd00::2]:4 user=ann`), in order.

    A host without a number has one slot. Raises UsageError with file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read hostfile {path}: {_reason(error)}") from error
    entries: list[HostEntry] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        entry = _host_entry(words, number, f"{path}:{number}")
        if entry.host in lines:
            raise UsageError(
                f"{path}:{number}: {entry.host} is listed twice (first on line "
                f"{lines[entry.host]}): keep one line and give it slots=N for N ranks")
        lines[entry.host] = number
        entries.append(entry)
    if not entries:
        raise UsageError(f"hostfile {path} names no host: write one per line, like `node1 slots=1`")
    return tuple(entries)


def _host_entry(words: list[str], line: int, where: str) -> HostEntry:
    name, user = words[0], ""
    slots: dict[str, int] = {}
    if "=" in name:
        raise UsageError(f"{where}: {name!r} is not a host name: write `node1 slots=4`")
    if "@" in name:
        user, _, name = name.partition("@")
    if found := re.fullmatch(r"(?:\[([^]]+)\]|([^:[]*))(?::([^:]*))?", name):
        name, count = found[1] or found[2], found[3]
        if count is not None:
            slots["slots"] = _slots(count, where)
    if not re.fullmatch(r"[A-Za-z0-9_.:-]+", name) or name.startswith("-"):
        raise UsageError(f"{where}: {name!r} is not a valid host name")
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key == "user" and value:
            user = value
            continue
        known = _KEYS.get(key)
        if known is None or not equals:
            raise UsageError(f"{where}: unknown key {key!r}{near(key, _KEYS)} (known: slots=N, "
                             "max_slots=N)")
        slots[known] = _slots(value, where)
    count_asked = slots.get("slots", min(1, slots.get("max_slots", 1)))
    if count_asked > slots.get("max_slots", count_asked):
        raise UsageError(f"{where}: slots={count_asked} exceeds max_slots={slots['max_slots']}")
    return HostEntry(name, count_asked, line, user)


def _slots(text: str, where: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_SLOTS:
        raise UsageError(f"{where}: {text!r} slots: give a number of ranks of at least 1")
    return int(text)


def ranks_of(entries: Sequence[HostEntry], n_ranks: int, path: str | Path) -> tuple[str, ...]:
    """Return the host of each rank: slot by slot, as mpirun assigns them.

    path: of the hostfile, for messages.
    Raises UsageError when the hosts have fewer slots than `n_ranks`.
    """
    hosts = [entry.host for entry in entries for _ in range(entry.slots)]
    if n_ranks > len(hosts):
        raise UsageError(
            f"{n_ranks} ranks were asked for, but the {len(entries)} hosts of {path} have "
            f"{len(hosts)} slots: use at most {len(hosts)} ranks, add hosts or raise slots=N")
    return tuple(hosts[:n_ranks])


# --- nodes files ------------------------------------------------------------------------------


def nodes_file_beside(hostfile: str | Path) -> Path | None:
    """Return the nodes file of a hostfile: its name and `.toml`; None if it does not exist."""
    path = Path(hostfile)
    beside = path.with_name(path.name + ".toml")
    return beside if beside.is_file() else None


class _NodesFile(Struct, forbid_unknown_fields=True):
    layers: Annotated[list[Count], Meta(min_length=1)] | None = None
    link: str = ""
    defaults: Table = {}
    node: dict[Name, Table] = {}
    rank: dict[Annotated[int, Meta(ge=0, le=_MAX_SLOTS)], Table] = {}


def read_nodes(path: str | Path) -> Nodes:
    """Return the nodes file `path`. Raises UsageError with the file, the table and the key."""
    where = f"nodes file {path}"
    try:
        found = msgspec.convert(read_toml(path, "nodes file"), _NodesFile, str_keys=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_line_of(error)}; it has layers, link, [defaults], "
                         "[node.\"NAME\"] and [rank.NUMBER]") from error
    return Nodes(str(path), None if found.layers is None else tuple(found.layers), found.link,
                 NodeSettings(**_settings(found.defaults, f"{where}, [defaults]")),
                 tuple((name, _settings(table, f"{where}, [node.\"{name}\"]"))
                       for name, table in found.node.items()),
                 {rank: _settings(table, f"{where}, [rank.{rank}]")
                  for rank, table in found.rank.items()})


_TYPES = get_type_hints(NodeSettings, include_extras=True)


def _settings(table: Table, where: str) -> Table:
    """Return the checked values of a table."""
    values: Table = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in _TYPES:
            raise UsageError(f"{where} has an unknown key {key!r}{near(name, _TYPES)}")
        if name in ("memory", "gpu_memory"):
            value = parse_bytes(value, f"{where}: {key}")
        elif name == "numa" and type(value) is int:
            value = str(value)
        try:
            values[name] = msgspec.convert(value, _TYPES[name])
        except msgspec.ValidationError as error:
            known = [*_NUMA, *get_args(Role), *get_args(Backend)]
            raise UsageError(f"{where}: {key} is {repr(value)[:80]}{near(value, known)}: "
                             f"{_line_of(error)}") from error
    return values


def _line_of(error: msgspec.ValidationError) -> str:
    """Return the error's text on one line: it quotes keys of the file as they are."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in str(error))


# --- use --------------------------------------------------------------------------------------


def load(config: ClusterConfig) -> Nodes | None:
    """Return the nodes file that the config names, None if it names none."""
    return read_nodes(config.nodes) if config.nodes else None


def apply(resolved: Resolved, host: str) -> Resolved:
    """Return the config with the nodes file's settings of `host`; command-line options win."""
    nodes = load(resolved.config.job.cluster)
    if nodes is None:
        return resolved
    values = nodes.of(host, 0).options(resolved.config.job.given)
    origin = dict.fromkeys(values, f"nodes file {nodes.path}")
    return Resolved(resolved.config.replace(**values), {**resolved.origin, **origin},
                    resolved.own)


def group_of(info: RankInfo) -> str:
    """Return the name of a rank's group. All ranks of one wide stage are of the same group."""
    own = info.settings.group
    return f"{own} {info.host}" if own == OWN_HOST else own


def check_head(nodes: Nodes, hosts: Sequence[str]) -> None:
    """Raise UsageError if the nodes file puts the head on another host. hosts: one name per
    rank."""
    for rank, name in enumerate(hosts):
        if nodes.of(name, rank).role == "head" and name != hosts[0]:
            raise UsageError(
                f"{nodes.path} makes {name} the head, but rank 0 runs on {hosts[0]} (rank {rank} "
                f"on {name}): put {name} on the hostfile's first line, or change its role")


def near(word: Any, known: Iterable[str]) -> str:
    """Return the end of an error message that names the known word next to this one; "" if none is
    like it."""
    close = difflib.get_close_matches(str(word), [k for k in known if k], 1)
    return f"; did you mean {close[0]}?" if close else ""


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def settle(config: JobConfig, place: Place, node: NodeSettings) -> JobConfig:
    """Apply the nodes file's settings of this host: option values, its GPU, its NUMA node."""
    several = config.model.gpu_layers and place.local_size > 1
    host.choose_gpu(node.device or ("per-rank" if several else ""), place)
    own = node.options(config.given)
    if not config.cluster.keep_binding:
        # several ranks would use each other's memory otherwise, at half the speed
        spread = place.local_size >= len(host.numa_nodes()) > 1 and not config.model.numa
        host.bind_numa(node.numa or ("per-rank" if spread else ""), place)
    return config.replace(**own)
