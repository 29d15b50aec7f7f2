"""Facts about this process's place: rank, host, cores, memory, CPU features.

Reads the launchers' environment variables and Linux's files; uses no MPI and no model.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import platform
import shutil
import signal
import socket
import tempfile
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
from msgspec import Struct

from pipeinfer import __version__
from pipeinfer.errors import UsageError

if TYPE_CHECKING:
    from pipeinfer.core.control import Facts

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_NUMA_NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  #: numbers of the kernel's call
_PREFERRED, _MASK_BITS = 1, 63
_CPU_INFO = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
_NETWORK = ("nfs", "cifs", "smb", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs",
            "fuse.sshfs", "fuse.glusterfs", "fuse.ceph")  #: file systems
_FABRICS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))  #: networks other than Ethernet
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_OF_A_CORE = 32 << 20  #: bytes
_SHARED = Path("/dev/shm")  #: where Open MPI shares memory
_SHARED_BYTES = 18 << 20  #: that it wants to be free for each rank: 16 MiB and some
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")
_DEVICES = Path("/dev")
_GPU_FILES = ("nvidia[0-9]*", "dri/renderD*")  #: one for each GPU of a vendor's driver
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
#: variables of a launcher with the number of ranks and this process's rank
_LAUNCHERS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"), _SLURM)
_SERVERS = ("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT")  #: what a rank of a Slurm step connects to
_INTERACTIVE_STEP = "4294967290"  #: SLURM_INTERACTIVE_STEP of slurm.h
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_SET_DEATH_SIGNAL = 1  #: of prctl
_FEATURES = ("avx", "avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")


HOST_NAME = "PIPEINFER_HOST_NAME"  #: by which the cluster calls this host, if not by its own name
MPI_PREFIX = "PIPEINFER_MPI_PREFIX"  #: where this host has MPI, if not at rank 0's path
SECRETS = "PIPEINFER_SECRETS"  #: host:path of the file with secrets, until rank 0 has read it
#: variables that hold keys or tokens: no launcher has them, nor any rank but the first
SECRET_NAMES = ("PIPEINFER_API_KEY", "PIPEINFER_JOIN_TOKEN", "HF_TOKEN",
                "HUGGING_FACE_HUB_TOKEN")


class Place(Struct):
    """The place of this process in the job.

    rank, size: in the job. comm: the MPI communicator, None in a job of one process.
    cores: that this rank may use. local_rank, local_size: among the ranks of its host.
    """

    rank: int
    size: int
    comm: Any
    cores: int
    local_rank: int
    local_size: int


class Launch(Struct, frozen=True):
    """What the environment says of this process's launcher. names: of its variables, () without a
    launcher."""

    size: int = 1
    rank: int = 0
    names: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The variables and their values, for messages; of Slurm also the step."""
        step = ""
        if self.names == _SLURM:
            number = (os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID"))
            step = f"Slurm step {'.'.join(filter(None, number))}: "
        return step + ", ".join(f"{name}={os.environ[name]}" for name in self.names)


def host_name() -> str:
    """Return the name by which the cluster calls this host."""
    return os.environ.get(HOST_NAME) or socket.gethostname()


def package_digest() -> str:
    """Return the SHA-256 of this package's source in Python, in hexadecimal."""
    found, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n{path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def package_version() -> str:
    """Return this package's version and, short, the digest of its source."""
    return f"{__version__} (source {package_digest()[:8]})"


def launch() -> Launch:
    """Return what the environment says of this process's launcher.

    A shell in a Slurm step is none of its ranks, though it has the step's variables.
    """
    for names in _LAUNCHERS:
        size, rank = (_first_int((name,), -1) for name in names)
        if 0 <= rank < size and not (names == _SLURM and (size == 1 or _in_slurm_shell())):
            return Launch(size, rank, names)
    return Launch()


def launched() -> bool:
    """Return whether a launcher of MPI jobs started this process, maybe as the only rank."""
    return bool(launch().names)


def launched_size() -> int:
    """Return how many ranks the launcher started, 1 without a launcher."""
    return launch().size


def launched_rank() -> int:
    """Return this process's rank by the launcher's environment, 0 without one."""
    return launch().rank


def _in_slurm_shell() -> bool:
    """Whether this is a process of `srun --pty` or of salloc's shell that can reach no other rank.
    """
    interactive = "SLURM_PTY_PORT" in os.environ or _INTERACTIVE_STEP in (
        os.environ.get("SLURM_STEP_ID"), os.environ.get("SLURM_STEPID"))
    return interactive and not any(name in os.environ for name in _SERVERS)


def take_secrets() -> None:
    """Rank 0: set the variables that were withheld from its launcher, and delete their file."""
    where, _, path = os.environ.pop(SECRETS, "").partition(":")
    if launched_rank() or where != socket.gethostname():
        return
    with contextlib.suppress(OSError):
        os.environ.update(json.loads(Path(path).read_bytes()))
        Path(path).unlink()


def moves_cursor() -> bool:
    """Whether TERM names a terminal that moves its cursor, so that a line can be replaced."""
    return os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def end_with_parent() -> None:
    """Let this process, and what it becomes by exec, get SIGTERM when its parent ends."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def widen_affinity(local_rank: int, local_size: int) -> int:
    """Bind this process to its share of all cores that the cgroup allows.

    local_rank, local_size: among the ranks of this host.
    With at least one core per rank each takes its own share; otherwise all share all. Returns the
    number of cores that a rank may use.
    """
    cores = sorted(_widen())
    each = min(len(cores), _quota()) // local_size
    if each >= 1 and local_size > 1:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[local_rank * each : (local_rank + 1) * each])
    return max(1, each)


def cores_here(local_size: int) -> int:
    """Return the cores of the present binding that a rank may use, without changing the binding."""
    bound = len(os.sched_getaffinity(0))
    share = max(1, min(os.cpu_count() or 1, _quota()) // local_size)
    return max(1, min(bound, share))


def bind_numa(which: str, place: Place, root: Path = _NUMA_NODES) -> None:
    """Bind this rank to the cores of one NUMA node; set `place.cores` to its share of them.

    which: a NUMA node's number, for all ranks of the host, or per-rank to distribute the host's
        ranks over its nodes; any other value changes nothing.
    Raises UsageError when the node does not exist.
    """
    if which != "per-rank" and not which.isdigit():
        return
    known = [one.number for one in numa_nodes(root)]
    if which.isdigit() and int(which) not in known:
        raise UsageError(
            f"{host_name()} has no NUMA node {which} (it has "
            f"{', '.join(map(str, known)) or 'none'}): correct numa in the nodes file")
    if not known:
        return
    step = 1 if which.isdigit() else len(known)
    turn, first = divmod(place.local_rank, step)
    node = int(which) if which.isdigit() else known[first]
    sharers = len(range(first, place.local_size, step))
    with contextlib.suppress(OSError, AttributeError):  # cores that the cgroup withholds
        os.sched_setaffinity(0, _cpu_list(root / f"node{node}" / "cpulist"))
    _prefer_memory(node)
    cores = sorted(os.sched_getaffinity(0))
    each = min(len(cores), _quota()) // sharers
    if each >= 1 and sharers > 1:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores[turn * each : (turn + 1) * each])
    place.cores = max(1, each)


def _prefer_memory(node: int) -> None:
    """Let this thread, and those that it starts, get memory of one NUMA node while that has some.
    Containers may forbid it: then pages lie where they are first touched, which is here as well."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is not None and node < _MASK_BITS:
        mask = ctypes.c_ulong(1 << node)
        ctypes.CDLL(None).syscall(number, _PREFERRED, ctypes.byref(mask), _MASK_BITS)


def choose_gpu(device: str, place: Place, root: Path = _DEVICES) -> None:
    """Make one GPU visible to this process, unless the environment has chosen some.

    device: `gpu:N`, or `per-rank`: the ranks of a host get its GPUs in turn. Others change nothing.
    """
    kind, _, number = device.partition(":")
    if device == "per-rank":
        count = gpus(root)
        kind, number = "gpu", str(place.local_rank % count) if count > 1 else ""
    if kind == "gpu" and number:
        for name in _GPU_VARIABLES:
            os.environ.setdefault(name, number)


def gpus(root: Path = _DEVICES) -> int:
    """Return how many GPUs of one vendor this host has a driver for."""
    return max(len(list(root.glob(pattern))) for pattern in _GPU_FILES)


def visible_gpus() -> str:
    """Return the numbers of the GPUs that the environment leaves to this process; "": all."""
    return next((os.environ[name] for name in _GPU_VARIABLES if name in os.environ), "")


def _cpu_list(path: Path) -> set[int]:
    """Return the cores of a kernel list such as 0-7,16-23."""
    cpus: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def local_place() -> tuple[int, int]:
    """(rank on this host, ranks on this host) by the launcher's environment."""
    if launched_size() == 1:
        return 0, 1
    return _first_int(_LOCAL_RANK, 0), max(1, _first_int(_LOCAL_SIZE, 1))


def on_one_host() -> bool:
    """Whether all ranks are on this host, by the launcher's environment."""
    return launched_size() == local_place()[1]


def choose_transports() -> None:
    """Before MPI starts: disable transports that Open MPI does not need, unless OMPI_MCA_btl is
    set.

    On one host this is TCP, whose ports are open on every interface. On one host, and without a
    network for it, this is ofi, which waits a second in MPI_Init before it gives up. Where shared
    memory is too small for all ranks of the host, as in containers, they share files instead.
    """
    if prefix := os.environ.get(MPI_PREFIX):
        os.environ["OPAL_PREFIX"] = prefix
    if launched_size() > 1:
        alone = on_one_host()
        if _free_bytes(_SHARED) < local_place()[1] * _SHARED_BYTES:
            os.environ.setdefault("OMPI_MCA_btl_sm_backing_directory", tempfile.gettempdir())
        useless = ["tcp"] if alone else []
        if alone or not any(path.exists() for path in _FABRICS):
            useless.append("ofi")
        if useless:
            os.environ.setdefault("OMPI_MCA_btl", "^" + ",".join(useless))


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


class NumaNode(NamedTuple):
    """A part of a host whose cores reach its memory faster than other memory.

    cores: how many
    memory: bytes
    distances: to all nodes, as the firmware has them; 10 to itself
    """

    number: int
    cores: int
    memory: int
    distances: tuple[int, ...]


def numa_nodes(root: Path = _NUMA_NODES) -> list[NumaNode]:
    """Return the NUMA nodes of this host that have cores, in order."""
    found = []
    for path in root.glob("node[0-9]*"):
        if cores := _cpu_list(path / "cpulist"):
            memory, distances = 0, ()
            with contextlib.suppress(OSError, ValueError, IndexError):
                memory = int((path / "meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
                distances = tuple(map(int, (path / "distance").read_text().split()))
            found.append(NumaNode(int(path.name[4:]), len(cores), memory, distances))
    return sorted(found)


def facts(cores: int, local_rank: int, local_size: int) -> Facts:
    """Return the facts that this rank sends to the head."""
    from pipeinfer.core.control import Facts  # its decoders take time; most commands need none

    return Facts(
        host_name(), os.getpid(), cores, min(_allowed(), _quota()), local_rank, local_size,
        min(psutil.virtual_memory().available, _memory_left()), cpu_features(),
        platform.machine(), platform.python_version())


def cpu_features() -> tuple[str, ...]:
    """Return the instruction sets that decide whether a native build runs here."""
    flags = _processor_flags()
    return tuple(name for name in _FEATURES if name in flags)


@cache
def last_level_cache() -> int:
    """Return the bytes of the largest cache that this process can fill: at most 32 MiB a core,
    because a virtual machine may report all that its host has. 32 MiB where the system does not
    say.
    """
    sizes = []
    for path in _CACHES.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return min(max(sizes, default=_CACHE_OF_A_CORE), _CACHE_OF_A_CORE * _allowed())


def on_network(path: Path) -> bool:
    """Return whether a file is on a file system of another host, as far as the system says."""
    real, found, kind = path.resolve(), -1, ""
    for disk in psutil.disk_partitions(all=True):
        root = Path(disk.mountpoint)
        if real.is_relative_to(root) and len(root.parts) >= found:
            found, kind = len(root.parts), disk.fstype
    return kind.startswith(_NETWORK)


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware. If not, a product in bfloat16 takes
    several times as long as in float32."""
    return bool(_processor_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def _processor_flags() -> set[str]:
    return set(_cpu_info("flags", "Features").split())


def processor_name() -> str:
    """Return what the system calls this processor; its architecture where it says nothing."""
    return _cpu_info("model name").partition(":")[2].strip() or platform.machine()


def _cpu_info(*names: str) -> str:
    """The first line of the first processor that begins with one of these names; "": none does."""
    try:
        text = _CPU_INFO.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith(names)), "")


def physical_memory() -> int:
    """Return the size of this machine's memory in bytes."""
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def free_memory(meminfo: Path = _MEMORY) -> int:
    """Return the bytes that more processes may take without evicting pages that a process has
    mapped, such as a stage's weights; 0 if unknown."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        found = {name: 1024 * int(rest.split()[0]) for name, _, rest in
                 (line.partition(":") for line in lines) if rest.split()}
        left = found["MemAvailable"] - found["Mapped"]
    except (OSError, ValueError, KeyError):
        return 0
    return max(0, min(left, _memory_left()))


def memory_parts() -> dict[str, int]:
    """Return this process's resident memory in bytes: all of it, and the part that no file
    backs."""
    info = psutil.Process().memory_info()
    return {"rss": int(info.rss), "anonymous": int(info.rss - getattr(info, "shared", 0))}


def _memory_left() -> int:
    """Return the bytes that the control groups of this process still allow.

    Inactive file pages count as used there, but are released when needed, so they are added.
    """
    left = 1 << 62
    for group in _groups("memory"):
        for limit, usage, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                used = int((group / usage).read_text())
                stat = dict(line.split() for line in (group / "memory.stat").read_text(
                    ).splitlines())
                used -= min(used, int(stat.get(cached, 0)))
                left = min(left, int((group / limit).read_text()) - used)
    return max(0, left)


def _quota() -> int:
    """Return the cores that the CPU quotas of this process's control groups allow, rounded up."""
    return max(1, math.ceil(quota()))


def quota() -> float:
    """Return the cores that the CPU quotas allow, 2**20 without a quota."""
    cores = float(1 << 20)
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            share, period = (group / "cpu.max").read_text().split()
            cores = min(cores, int(share) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((group / "cpu.cfs_quota_us").read_text())
            period_us = int((group / "cpu.cfs_period_us").read_text())
            if quota_us > 0:
                cores = min(cores, quota_us / period_us)
    return cores


def _groups(controller: str) -> list[Path]:
    """Return this process's control group and its ancestors, in versions 1 and 2.

    Slurm, systemd and containers set their limits at any of these levels.
    """
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {_CGROUPS, _CGROUPS / controller}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = _CGROUPS if not controllers else _CGROUPS / controller
        if not controllers or controller in controllers.split(","):
            inner = base / path.lstrip("/")
            found |= {inner, *(up for up in inner.parents if up.is_relative_to(base))}
    return sorted(found)


def _first_int(names: tuple[str, ...], default: int) -> int:
    for name in names:
        text = os.environ.get(name, "").partition("(")[0]  # Slurm writes "2(x4)"
        if text.isdigit():
            return int(text)
    return default


def _allowed() -> int:
    """Return how many cores this rank may use once its binding is widened: a launcher may have
    bound it to some of the host's."""
    bound = os.sched_getaffinity(0)
    found = len(_widen())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, bound)
    return found


def _widen() -> set[int]:
    """Let this thread run on every core that is not withheld; return these cores."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def use_cores(count: int, own: Set[int]) -> None:
    """Bind this thread, and those that it starts, to its own cores, or to all cores of the host
    if it may use more than those.

    count: cores that it may use. own: its own cores.
    """
    if count > len(own):
        _widen()
        return
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, own)


def threads_of(asked: int, place: Place) -> int:
    """Return the threads for a backend: `asked`, or one per core if 0; never more than the
    cores."""
    return min(asked or place.cores, place.cores)
