"""Faults on purpose: what `--hook fault=` asks of a rank, and what goes wrong while it loads.

    kill@2:decode=30            SIGKILL before the 30th run of generated tokens on rank 2
    stop@3:prefill=2            SIGSTOP before the 2nd chunk of a prompt
    kill@2:load=extracting      at the first news of a phase: extracting, receiving, loading,
                                measuring (load alone: whichever comes first)
    kill@4:recovery=1           when this rank learns of the 1st recovery
    error@1:decode=7:layer=3    an exception after so many layers of the rank's own (type=backend
                                or memory: BackendError, MemoryError instead of RuntimeError)
    clock@2:decode=5:s=-3600    the rank's clock jumps by so many seconds, and stays there
    memory@2:decode=5           allocates until the process's limit answers with MemoryError
    slow@2:ms=5                 every run takes rank 2 so much longer
    slow-link@2:ms=50           every message to rank 2 comes so much later
    cut-link@2:peer=3:after=40  of what ranks 2 and 3 send each other, all but the first 40 messages
                                are lost; both still hear the head
    lose-cancel@3:every=2       every second cancellation that comes to rank 3 is lost
    disk-full@2:load            ENOSPC while the shard is written
    corrupt-cache@2:load        a byte of the cached shard is flipped before it is taken
    kv-corrupt@2:every=2        a byte of every second prompt on the disk is flipped before a read
    kv-full@2:after=3           ENOSPC for each prompt that is written to the disk, but the first 3
    kv-slow@2:ms=200            every read and write of a prompt on the disk takes so much longer

Several are separated by commas. Each happens once in a process (slow, kv, links and lose-cancel
last), and says so on standard error. Every wrapper returns its argument untouched when no fault is
for this rank; those of the port and the backend are in `wrappers.py`. Knows progress and shard
files, no MPI, request, plan or server.
"""

from __future__ import annotations

import enum
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, structs

from pipeinfer.errors import UsageError

PHASES = ("extracting", "receiving", "loading", "measuring")

Report = Callable[[str, int, int], None]
Die = Callable[[int], None]


class Kind(enum.StrEnum):
    """The kinds of faults that `--hook fault=` can cause."""

    KILL = "kill"
    STOP = "stop"
    ERROR = "error"
    MEMORY = "memory"
    CLOCK = "clock"
    SLOW = "slow"
    SLOW_LINK = "slow-link"
    CUT_LINK = "cut-link"
    LOSE_CANCEL = "lose-cancel"
    DISK_FULL = "disk-full"
    CORRUPT_CACHE = "corrupt-cache"
    KV_CORRUPT = "kv-corrupt"
    KV_FULL = "kv-full"
    KV_SLOW = "kv-slow"


_MOMENTS = ("load", "prefill", "decode", "recovery")
_FIELDS = {
    Kind.KILL: _MOMENTS, Kind.STOP: _MOMENTS,
    Kind.ERROR: ("prefill", "decode", "layer", "type"), Kind.MEMORY: ("prefill", "decode"),
    Kind.CLOCK: ("prefill", "decode", "s"),
    Kind.SLOW: ("ms",), Kind.SLOW_LINK: ("ms",), Kind.CUT_LINK: ("peer", "after"),
    Kind.LOSE_CANCEL: ("every",),
    Kind.DISK_FULL: ("load",), Kind.CORRUPT_CACHE: ("load",),
    Kind.KV_CORRUPT: ("every",), Kind.KV_FULL: ("after",), Kind.KV_SLOW: ("ms",),
}
_TYPES = ("runtime", "backend", "memory")
SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP}
KV = (Kind.KV_CORRUPT, Kind.KV_FULL, Kind.KV_SLOW)
_LASTING = (Kind.SLOW, Kind.SLOW_LINK, Kind.CUT_LINK, Kind.LOSE_CANCEL, *KV)


class Fault(Struct, frozen=True):
    """One fault on one rank; `str` gives back what `parse_faults` reads.

    kind: what goes wrong
    rank: the rank that it happens to
    moment: load, prefill, decode, recovery or "" (all the time)
    count: which decode, chunk or recovery, from 1
    phase: of loading; "" for any
    layer: how many of the rank's own layers are done; -1: none has begun
    type: of the exception that is raised
    ms: delay in milliseconds
    s: by which a clock jumps, in seconds
    every: every how many cancellations, or prompts that are read, one is affected
    peer: the rank at the other end of a link
    after: how many messages still get there, or prompts are still written
    """

    kind: Kind
    rank: int
    moment: str = ""
    count: int = 1
    phase: str = ""
    layer: int = -1
    type: str = "runtime"
    ms: float = 50.0
    s: float = 3600.0
    every: int = 2
    peer: int = -1
    after: int = 0

    def __str__(self) -> str:
        text = f"{self.kind}@{self.rank}"
        if self.moment:
            value = self.phase if self.moment == "load" else self.count
            text += f":{self.moment}" + (f"={value}" if value else "")
        if self.layer >= 0:
            text += f":layer={self.layer}"
        if self.type != "runtime":
            text += f":type={self.type}"
        if self.kind in (Kind.SLOW, Kind.SLOW_LINK, Kind.KV_SLOW):
            text += f":ms={self.ms:g}"
        if self.kind is Kind.CLOCK:
            text += f":s={self.s:g}"
        if self.kind is Kind.CUT_LINK:
            text += f":peer={self.peer}:after={self.after}"
        if self.kind is Kind.KV_FULL:
            text += f":after={self.after}"
        if self.kind in (Kind.LOSE_CANCEL, Kind.KV_CORRUPT):
            text += f":every={self.every}"
        return text


# --- reading ----------------------------------------------------------------------------------


def parse_faults(texts: str | Sequence[str]) -> tuple[Fault, ...]:
    """Faults from values of `--hook fault=`, several in one separated by commas.

    A comma may also stand between the fields of one fault. Raises UsageError that says what is
    allowed.
    """
    pieces = [piece.strip() for text in ([texts] if isinstance(texts, str) else texts)
              for piece in text.split(",") if piece.strip()]
    specs: list[str] = []
    for piece in pieces:
        if "@" in piece or not specs:
            specs.append(piece)
        else:
            specs[-1] += f":{piece}"
    return tuple(_parse(spec) for spec in specs)


def _parse(spec: str) -> Fault:
    head, *fields = spec.split(":")
    name, _, rank = head.partition("@")
    if name not in tuple(Kind) or not rank.isdecimal():
        raise UsageError(f"--hook fault={spec}: write KIND@RANK, such as kill@2:decode=30; kinds "
                         f"are {', '.join(Kind)}")
    kind = Kind(name)
    fault = Fault(kind, int(rank))
    for field in fields:
        key, _, value = field.partition("=")
        if key not in _FIELDS[kind]:
            raise UsageError(f"--hook fault={spec}: {kind} accepts {', '.join(_FIELDS[kind])}, not "
                             f"{field!r}")
        if key in _MOMENTS and fault.moment:
            raise UsageError(f"--hook fault={spec}: {fault.moment} and {key} exclude each other")
        fault = _with(fault, key, value, spec)
    if kind is Kind.CUT_LINK and (fault.peer < 1 or fault.peer == fault.rank or not fault.rank):
        raise UsageError(f"--hook fault={spec}: name two ranks that are not rank 0, such as "
                         "cut-link@1:peer=2")
    if not fault.moment and kind not in _LASTING:
        first = "load" if kind in (Kind.DISK_FULL, Kind.CORRUPT_CACHE) else "decode"
        fault = structs.replace(fault, moment=first)
    return fault


def _with(fault: Fault, key: str, value: str, spec: str) -> Fault:
    if key == "load":
        if value and value not in PHASES:
            raise UsageError(f"--hook fault={spec}: load must be one of {', '.join(PHASES)}")
        return structs.replace(fault, moment=key, phase=value)
    if key == "type":
        if value not in _TYPES:
            raise UsageError(f"--hook fault={spec}: type must be one of {', '.join(_TYPES)}")
        return structs.replace(fault, type=value)
    if key in ("prefill", "decode", "recovery"):
        return structs.replace(fault, moment=key,
                                   count=_whole(value, 1, key, spec) if value else 1)
    if key == "layer":
        return structs.replace(fault, layer=_whole(value, 0, key, spec))
    if key in ("peer", "after"):
        value_of = _whole(value, int(key == "peer"), key, spec)
        return structs.replace(fault, peer=value_of) if key == "peer" else \
            structs.replace(fault, after=value_of)
    if key == "every":
        return structs.replace(fault, every=_whole(value, 1, key, spec))
    if key == "s":
        return structs.replace(fault, s=_seconds(value, spec))
    try:
        ms = float(value)
    except ValueError:
        ms = -1.0
    if not 0 < ms < 1e6:
        raise UsageError(f"--hook fault={spec}: ms must be a number of milliseconds, such as ms=50")
    return structs.replace(fault, ms=ms)


def _seconds(value: str, spec: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < abs(found) <= 1e9:
        raise UsageError(f"--hook fault={spec}: s must be a number of seconds other than 0, such "
                         "as s=-3600")
    return found


def _whole(value: str, least: int, key: str, spec: str) -> int:
    if not value.isdecimal() or not least <= int(value) < 10**9:
        raise UsageError(f"--hook fault={spec}: {key} must be a whole number of at least {least}")
    return int(value)


# --- happening --------------------------------------------------------------------------------

happened_here: set[Fault] = set()  #: in this process: a survivor wraps its new backend again


def begin(fault: Fault) -> None:
    """Note the fault, and say so on standard error."""
    happened_here.add(fault)
    sys.stderr.write(f"pipeinfer: fault: {fault}\n")
    sys.stderr.flush()


def shift_clock(seconds: float) -> None:
    """The clock of this process jumps, as when somebody sets the host's: what is measured by it
    is wrong from then on."""
    inner = time.time
    time.time = lambda: inner() + seconds


def signal_self(number: int) -> None:
    """How a process dies or stops."""
    os.kill(os.getpid(), number)


def faults_of(faults: Sequence[Fault], rank: int, kinds: Sequence[Kind],
              moments: Sequence[str]) -> list[Fault]:
    """A rank's faults of some kinds and moments that have not taken place yet."""
    return [f for f in faults if f.rank == rank and f.kind in kinds and f.moment in moments
            and f not in happened_here]


# --- loading and recovering --------------------------------------------------------------------


def faulty_recovery(faults: Sequence[Fault], rank: int, die: Die = signal_self
                    ) -> Callable[[], None]:
    """What rank `rank` calls whenever it learns of a recovery, before it does anything else."""
    mine, seen = faults_of(faults, rank, tuple(SIGNALS), ("recovery",)), 0

    def hear() -> None:
        nonlocal seen
        seen += 1
        for fault in mine:
            if fault.count == seen:
                begin(fault)
                die(SIGNALS[fault.kind])

    return hear


def faulty_progress(report: Report, faults: Sequence[Fault], rank: int, die: Die = signal_self
                    ) -> Report:
    """`report(phase, done, total)` of a loading stage that dies, stops or finds the disk full.

    The result raises OSError(ENOSPC) for disk-full, in the middle of writing only: a shard that
    the cache has needs no disk.
    """
    mine = faults_of(faults, rank, (*SIGNALS, Kind.DISK_FULL), ("load",))
    if not mine:
        return report

    def faulty(phase: str, done: int, total: int) -> None:
        report(phase, done, total)
        for fault in [f for f in mine if f not in happened_here and f.phase in ("", phase)]:
            if fault.kind is not Kind.DISK_FULL:
                begin(fault)
                die(SIGNALS[fault.kind])
            elif phase in ("extracting", "receiving") and done < total:
                begin(fault)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return faulty


def faulty_cache(shard: Path, faults: Sequence[Fault], rank: int) -> None:
    """Flip a byte of the cached file `shard`, if it is there and a fault asks for that."""
    for fault in faults_of(faults, rank, (Kind.CORRUPT_CACHE,), ("load",)):
        if shard.exists():
            begin(fault)
            flip_byte(shard)


def flip_byte(path: Path) -> None:
    """Damage a file without changing its size or times: three quarters into it, which in a shard
    is a weight and not the header."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(3 * info.st_size // 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x55]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
