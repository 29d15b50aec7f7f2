"""The shard cache: a directory with shards, their checksums, and stored measurements, and its size.

`NAME.sum` has the BLAKE2b of the bytes of shard `NAME`, computed while they were written, and the
file's size, times and inode at the last comparison. A shard is used only if these are unchanged, or
if its bytes were read and compared again; PIPEINFER_VERIFY=always reads them each time. Only its
user may write to the directory.

Every plan makes shards of its own, so a directory without a limit only grows. After each new shard,
the shards of its model are cut to MOST_COPIES times the model's size, and all shards to
$PIPEINFER_CACHE_SIZE where that is set. The least recently used go first; files that a process has
mapped, or that were used in the last minutes, stay. A removed shard is made again when it is
needed. Independent of models.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from pipeinfer.errors import ModelError, UsageError
from pipeinfer.files import parse_bytes

FRESH_SECONDS = 600.0  #: time after its use in which a shard may be about to be mapped
MOST_COPIES = 3.0  #: the space for shards of one model, in times the model's size
LIMIT = "PIPEINFER_CACHE_SIZE"


class KeptFile(Struct, frozen=True):
    """A shard in the cache.

    model: beginning of the names of this model's shards
    size: bytes, its checksum's included
    used: time of the last use, in seconds since the epoch
    """

    path: Path
    model: str
    size: int
    used: float

    def remove(self) -> bool:
        """Delete it and its checksum; return whether this call did, and no other process."""
        try:
            self.path.unlink()
        except OSError:
            return False  # another process was quicker
        with contextlib.suppress(OSError):
            sum_of(self.path).unlink()
        return True


def kept(directory: Path) -> list[KeptFile]:
    """Return the shards in the cache, the least recently used first."""
    found = []
    for path in directory.glob("*.gguf"):
        with contextlib.suppress(OSError):  # another process has removed it
            size = path.stat().st_size
            with contextlib.suppress(OSError):
                size += sum_of(path).stat().st_size
            found.append(KeptFile(path, model_of(path.name), size, used(path)))
    return sorted(found, key=lambda one: one.used)


def used(path: Path) -> float:
    """Return the time of a shard's last use. Raises OSError if it does not exist."""
    when = path.stat().st_mtime
    with contextlib.suppress(OSError):
        when = max(when, sum_of(path).stat().st_mtime)
    return when


def model_of(name: str) -> str:
    """Return the part of a shard's name that all shards of its model share."""
    return name.partition("-")[0]


def make_room(path: Path, model_bytes: int) -> list[Path]:
    """Bring the cache below its limits after the shard `path` was added; return what was removed.

    model_bytes: size of the whole model; 0: unknown, then only $PIPEINFER_CACHE_SIZE counts
    Raises ModelError for a limit that cannot be parsed.
    """
    everything = kept(path.parent)
    own = [one for one in everything if one.model == model_of(path.name)]
    bounds = [(own, int(MOST_COPIES * model_bytes))] if model_bytes else []
    if (most := limit()) is not None:
        bounds.append((everything, most))
    removed: list[Path] = []
    for files, bound in bounds:
        left = [one for one in files if one.path not in removed]
        removed += [one.path for one in shrink(left, bound, (path,), FRESH_SECONDS)]
    return removed


def shrink(files: Iterable[KeptFile], bound: int, keep: Collection[Path] = (), fresh: float = 0.0
           ) -> list[KeptFile]:
    """Remove files, the first ones first, until they take at most `bound` bytes.

    keep: files that stay
    fresh: files used less than so many seconds ago stay, too
    Files that a process has mapped stay. Returns what was removed.
    """
    files = list(files)
    size = sum(one.size for one in files)
    if size <= bound:
        return []
    held, removed = mapped(), []
    for one in files:
        if size <= bound:
            break
        if one.path in keep or in_use(one.path, held):
            continue
        with alone(one.path.parent):  # so that no process starts to use it meanwhile
            gone = _unused(one.path, fresh) and one.remove()
        if gone:
            size -= one.size
            removed.append(one)
    return removed


def _unused(path: Path, seconds: float) -> bool:
    try:
        return used(path) <= time.time() - seconds
    except OSError:
        return False


def limit() -> int | None:
    """Return $PIPEINFER_CACHE_SIZE in bytes; None without it. Raises ModelError."""
    text = os.environ.get(LIMIT, "")
    if not text:
        return None
    try:
        return parse_bytes(text, LIMIT)
    except UsageError as error:
        raise ModelError(str(error)) from None


def mapped() -> set[tuple[str, int]]:
    """Return name and inode of every GGUF file that a process of this user has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError), maps.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if ".gguf" in line:
                    parts = line.split(maxsplit=5)
                    found.add((os.path.basename(parts[5].strip()), int(parts[4])))
    return found


def in_use(path: Path, held: Collection[tuple[str, int]]) -> bool:
    """Return whether the file is among those `held`, which `mapped` returned."""
    with contextlib.suppress(OSError):
        return (path.name, path.stat().st_ino) in held
    return False


DIGEST_BYTES = 32
_BLOCK = 4 << 20
_MOST_NOTE = 1 << 20
_VERIFY = "PIPEINFER_VERIFY"
_UNLOCKED_SECONDS = 60.0  #: age at which a temporary file without a lock is stale
_PATIENCE = 120.0  #: seconds after which a value that another process finds out is found out here
_STALE_SECONDS = 24 * 3600.0  #: the same on file systems without locks
_log = logging.getLogger("pipeinfer.cache")

Progress: TypeAlias = Callable[[int, int], None]


class Source(Protocol):
    """The bytes of a file that is stored here or sent, generated when they are needed.

    name: of the file, unique for its bytes
    header: its first bytes
    total: its size in bytes
    """

    name: str
    header: bytes
    total: int

    def blocks(self) -> Iterator[bytes]:
        """Yield all bytes in order, the header first. Raises ModelError if they cannot be read."""


def new_hash() -> hashlib.blake2b:
    """Return a new hash object of the kind that shards are hashed with."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the shard cache's directory; make it if it is missing, readable for its owner only.

    It is the argument, `$PIPEINFER_CACHE`, `$XDG_CACHE_HOME/pipeinfer`, or `~/.cache/pipeinfer`.
    Raises ModelError when it cannot be made, belongs to another user, or other users may write
    there: they could replace a shard by other weights.
    """
    if cache_dir is not None:
        path = Path(cache_dir)
    elif os.environ.get("PIPEINFER_CACHE"):
        path = Path(os.environ["PIPEINFER_CACHE"])
    elif os.environ.get("XDG_CACHE_HOME"):
        path = Path(os.environ["XDG_CACHE_HOME"]) / "pipeinfer"
    else:
        path = Path.home() / ".cache" / "pipeinfer"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = (os.stat(path, follow_symlinks=False), os.stat(path))
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be created ({error.strerror}); set PIPEINFER_CACHE to a directory "
            "with space for the shards"
        ) from None
    _check_private(path, *facts)
    return path


def _check_private(path: Path, itself: os.stat_result, target: os.stat_result) -> None:
    user = os.geteuid()
    for found in (itself, target):
        if found.st_uid != user:
            raise ModelError(f"{path}: belongs to user {found.st_uid}, but this process runs as "
                             f"{user}; set PIPEINFER_CACHE to a directory of your own")
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ModelError(f"{path}: others may write there, so its shards cannot be trusted; "
                         f"chmod go-w {path}, or set PIPEINFER_CACHE to another directory")


# --- shards ---------------------------------------------------------------------------------------


def store(source: Source, directory: Path, progress: Progress | None = None) -> Path:
    """Return the file with these bytes in `directory`; write it now unless it is there.

    source: the bytes
    directory: of the cache
    progress: called with (bytes done, bytes in all)
    An existing file is used if its header is the one that would be written and its checksum is
    right; a damaged one is written again. Writing goes to a temporary file in the same directory
    that is renamed when it is safely on disk. So several processes or hosts may write the same file
    at once, and a reader sees a whole file or none.

    Raises ModelError when the disk is full or the source cannot be read; no temporary file stays
    behind.
    """
    target = directory / source.name
    used_now(target)
    _remove_stale(directory)
    if _is_complete(target, source) and is_sound(target):
        if progress:
            progress(source.total, source.total)
        return target
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=f"{source.name}.", dir=directory)
        done, digest = 0, new_hash()
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for block in source.blocks():
                file.write(block)
                digest.update(block)
                done += len(block)
                if progress:
                    progress(done, source.total)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = ""
        seal(target, digest.digest())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else (error.strerror or str(error))
        raise ModelError(
            f"{directory}: cannot write a shard of {source.total / 1e6:.0f} MB ({why}); free some "
            "space, or set PIPEINFER_CACHE to another directory"
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
    return target


def _is_complete(path: Path, source: Source) -> bool:
    try:
        with path.open("rb") as file:
            return (os.fstat(file.fileno()).st_size == source.total
                    and file.read(len(source.header)) == source.header)
    except OSError:
        return False


def _remove_stale(directory: Path) -> None:
    """Delete temporary files of dead writers: a lock ends with its process, on every host."""
    now = time.time()
    for path in directory.glob("*.tmp"):
        try:
            age = now - path.stat().st_mtime
            if age > _UNLOCKED_SECONDS:
                with path.open("r+b") as file:
                    if age < _STALE_SECONDS:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
        except OSError:
            pass  # it is being written, another process was quicker, or it is not ours


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Exclude other processes that use this function; no effect where files cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def used_now(path: Path) -> None:
    """Record that a shard is about to be used, so that `make_room` does not remove it.

    The caller must check after this call whether the file exists.
    """
    with alone(path.parent), contextlib.suppress(OSError):
        os.utime(sum_of(path))


def seal(path: Path, digest: bytes) -> None:
    """Write the checksum file of a shard that was just written."""
    with contextlib.suppress(OSError):  # without it the shard is only written again
        _write(sum_of(path), json.dumps({"blake2b": digest.hex(), "file": _identity(path)}))


def is_sound(path: Path) -> bool:
    """Return whether the file has the bytes that were sealed; log a warning where it is damaged."""
    try:
        identity = _identity(path)
        note = json.loads(sum_of(path).read_text(encoding="utf-8")[:_MOST_NOTE])
        digest, known = note["blake2b"], note["file"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if known == identity and os.environ.get(_VERIFY) != "always":
        return True
    try:
        found = digest_of(path)
    except OSError as error:
        _log.warning("pipeinfer: note: %s cannot be read (%s) and is written again", path,
                     error.strerror)
        return False
    if found.hex() != digest:
        with contextlib.suppress(OSError):
            sum_of(path).unlink()
        _log.warning("pipeinfer: note: %s is damaged (its checksum differs) and is written again",
                     path)
        return False
    if _identity(path) == identity:
        seal(path, found)
    return True


def digest_of(path: Path) -> bytes:
    """Return the BLAKE2b of a file. Raises OSError."""
    found = new_hash()
    with path.open("rb") as file:
        while piece := file.read(_BLOCK):
            found.update(piece)
    return found.digest()


def open_private(path: Path) -> int:
    """Open `path` to read and append, made for its owner only and never through a link.

    Returns a descriptor. Raises OSError.
    """
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def sum_of(path: Path) -> Path:
    """Return the path of a shard's checksum file."""
    return path.with_name(path.name + ".sum")


def _identity(path: Path) -> list[int]:
    facts = os.stat(path)
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


# --- notes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def turn(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Exclude other processes of this host that use the same path, such as that of a value which
    they find out.

    waiting: called now and then. After _PATIENCE seconds, or where files cannot be locked, proceed
    anyway.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = os.open(path.with_name(f".{path.name}.lock"),
                             os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                waiting()
                time.sleep(0.1)
        yield


def remember(path: Path, value: Any) -> None:
    """Write a small JSON value and its checksum. Errors are ignored: the next start only takes
    longer.
    """
    with contextlib.suppress(OSError):
        _write(path, json.dumps({"value": value, "check": _check(value)}))


def recall(path: Path) -> Any:
    """Return the value that `remember` wrote; None when there is none or it is damaged."""
    try:
        note = json.loads(path.read_text(encoding="utf-8")[:_MOST_NOTE])
        return note["value"] if note["check"] == _check(note["value"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _check(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write(path: Path, text: str) -> None:
    """Write a file atomically, for its owner only. Raises OSError."""
    handle, name = tempfile.mkstemp(suffix=".tmp", prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
