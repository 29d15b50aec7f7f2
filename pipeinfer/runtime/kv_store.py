"""Cells of prompts on a host's disk: one file for each piece and range of layers.

    FOLDER/ab/abcdef....START-STOP     magic, digest, length, then `saved_cells.to_bytes`

A thread that owns no context writes: temporary name, fsync, rename. So a reader sees a whole file
or none, after a power cut as well, and several ranks of a host share a folder. What is missing,
short, altered or of another split that cannot be joined is a miss; a damaged file is removed. The
store never fails a run: a full disk ends the writing, with one note.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from pipeinfer.backends.llamacpp.saved_cells import SavedCells, from_bytes, to_bytes
from pipeinfer.core.messages import Piece
from pipeinfer.errors import BackendError
from pipeinfer.scheduler.stored import Layers, cover, entry

if TYPE_CHECKING:
    from pipeinfer.backends.llamacpp.saving import CellSaver

_HEAD = struct.Struct("<4s16sQ")
_MAGIC = b"PKV1"
_NAME = re.compile(r"([0-9a-f]{32})\.(\d+)-(\d+)")
_PARTIAL = ".partial-"
_STALE = 600.0  #: seconds after which a temporary file belongs to no writer any more
_DAY = 86400.0
_FREE = 1 << 30  #: bytes that stay free on the disk
_WAITING = 256 << 20  #: bytes that may wait to be written; more are dropped
_KEPT = 0.9  #: share of the limit that is left after the oldest files are removed


class StoreCounts(Struct):
    """What a store has done: pieces written, read, missing or damaged, and not written for want of
    time or room; bytes written; bytes in the folder when it was last looked through."""

    written: int = 0
    read: int = 0
    missed: int = 0
    dropped: int = 0
    written_bytes: int = 0
    held_bytes: int = 0


def pieces_in(folder: Path, *, temporary: bool = False) -> list[Path]:
    """Return the files of pieces in a store's folder. temporary: those that are being written,
    too."""
    return [path for path in folder.glob("[0-9a-f][0-9a-f]/*")
            if _NAME.fullmatch(path.name) or temporary]


class KvStore:
    """The store in one folder.

    folder: made if it is missing, for its owner only
    limit: bytes, above which the files that were used longest ago are removed
    days: after which a file that was not used is removed
    Raises OSError for a folder that cannot be made or used, and BackendError for one of others.
    """

    def __init__(self, folder: Path, limit: int, days: float) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise BackendError(f"{folder}: prompts can be read from it, so it has to be a folder "
                               f"of your own that nobody else may enter: chmod 700 {folder}")
        self.counts = StoreCounts()
        #: called for a piece that is not whole here, and with a file that was written
        self.fetch: Callable[[bytes, Layers], None] = lambda _, __: None
        self.copied: Callable[[str, bytes], None] = lambda _, __: None
        self._folder, self._limit, self._days = folder, limit, days
        self._todo: deque[tuple[str, list[tuple[CellSaver, Any, bool]], int]] = deque()
        self._waiting = self._unseen = 0
        self._news, self._closed, self._full = threading.Condition(), False, False
        self._tidy()
        self._writer = threading.Thread(target=self._write_all, daemon=True, name="kv-store")
        self._writer.start()

    def listing(self) -> bytes:
        """Return the files, see `stored.held_by`."""
        return b"".join(entry(bytes.fromhex(path.name[:32]), *_layers_of(path.name))
                        for path in pieces_in(self._folder))

    def save(self, key: bytes, layers: Layers, parts: list[tuple[CellSaver, Any, bool]]) -> None:
        """Write a piece behind; returns at once.

        parts: for each part of the stage its saver, its blob, and whether this has states only
        """
        size = sum(len(blob) for _, blob, _ in parts)
        with self._news:
            if self._closed or self._waiting + size > _WAITING:
                self.counts.dropped += 1
                return
            self._waiting += size
            self._todo.append((_name(key, layers), parts, size))
            self._news.notify()

    def read(self, key: bytes, layers: Layers) -> SavedCells | None:
        """Return a piece for `layers`, possibly from files of several ranges; None if some are
        missing."""
        if not self.covers(key, layers):
            self.fetch(key, layers)
        own = cover(self._ranges(key), layers)
        try:
            pieces = [self._read(self._path(_name(key, one))) for one in own or ()]
            return SavedCells.joined(pieces) if pieces else None
        except (OSError, ValueError, BackendError):
            return None

    def covers(self, key: bytes, layers: Layers) -> bool:
        """Return whether this host has a piece for all of `layers`."""
        return cover(self._ranges(key), layers) is not None

    def files_of(self, key: bytes, layers: Layers) -> list[tuple[str, bytes]]:
        """Return names and bytes of the files of a piece that have some of `layers`."""
        found = []
        for one in self._ranges(key):
            if one[0] < layers[1] and layers[0] < one[1]:
                with contextlib.suppress(OSError):
                    found.append((_name(key, one), self._path(_name(key, one)).read_bytes()))
        return found

    def accept(self, name: str, data: bytes) -> None:
        """Store a file of another host; one that is damaged, or for which there is no room, is
        dropped."""
        if _NAME.fullmatch(name) and data[:_HEAD.size] == _head(memoryview(data)[_HEAD.size:]):
            with contextlib.suppress(OSError):
                self._put(name, data)

    def hit(self, *, missed: bool) -> None:
        """Count a piece that was read, or was not there."""
        self.counts.read += not missed
        self.counts.missed += missed

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written; return whether it is, after at most `seconds`."""
        with self._news:
            return self._news.wait_for(lambda: not self._waiting, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, for at most `seconds`, and end the thread."""
        self.flush(seconds)
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._writer.join(seconds)

    # --- files ------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _files(self) -> list[Path]:
        return pieces_in(self._folder, temporary=True)

    def _ranges(self, key: bytes) -> list[Layers]:
        start, ranges = key.hex(), []
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder / start[:2]):
                if name.startswith(start) and (found := _NAME.fullmatch(name)):
                    ranges.append((int(found[2]), int(found[3])))
        return ranges

    def _read(self, path: Path) -> SavedCells:
        data = path.read_bytes()
        body = memoryview(data)[_HEAD.size:]
        if data[:_HEAD.size] != _head(body):
            path.unlink(missing_ok=True)
            raise ValueError(f"{path} is damaged")
        with contextlib.suppress(OSError):  # used now; another rank may have removed it
            os.utime(path)
        return from_bytes(body)

    # --- the writer -------------------------------------------------------------------------------

    def _write_all(self) -> None:
        # behind the threads that compute: they wait for each other after every layer
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:  # until `close`; it sleeps while nothing is to be written
            with self._news:
                self._news.wait_for(lambda: self._todo or self._closed)
                if not self._todo:
                    return
                name, parts, size = self._todo.popleft()
            try:
                self._write(name, parts)
            except OSError as error:
                self._stop(error.strerror or str(error))
            finally:
                with self._news:
                    self._waiting -= size
                    self._news.notify_all()

    def _write(self, name: str, parts: list[tuple[CellSaver, Any, bool]]) -> None:
        key, layers = bytes.fromhex(name[:32]), _layers_of(name)
        if self.covers(key, layers):
            return  # another rank, or another split, has it
        body = to_bytes(SavedCells.joined(
            saver.layout.parse(blob, states_only=only) for saver, blob, only in parts))
        data = _head(memoryview(body)) + body
        if self._put(name, data):
            self.counts.written += 1
            self.counts.written_bytes += len(data)
            self.copied(name, data)

    def _put(self, name: str, data: bytes) -> bool:
        """Write a file unless the disk is nearly full; return whether it was written."""
        path = self._path(name)
        if shutil.disk_usage(self._folder).free < _FREE:
            self._stop("less than 1 GiB is free")
            return False
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # a file that is half written has another name, and is not in the way after a power cut
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_PARTIAL, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        self._full = False
        self._unseen += len(data)
        if self.counts.held_bytes + self._unseen > self._limit:
            self._tidy()
        return True

    def _stop(self, why: str) -> None:
        self.counts.dropped += 1
        if not self._full:
            self._full = True
            sys.stderr.write(f"pipeinfer: note: prompts are not written to {self._folder} at the "
                             f"moment: {why}\n")

    def _tidy(self) -> None:
        """Remove files that were not used for long, and the oldest above the limit."""
        now, kept = time.time(), []
        for path in self._files():
            with contextlib.suppress(OSError):  # another rank may have removed it
                found = path.stat()
                longest = _STALE if path.name.startswith(_PARTIAL) else self._days * _DAY
                if now - found.st_mtime > longest:
                    path.unlink()
                else:
                    kept.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in kept)
        if total > self._limit:
            for _, size, path in sorted(kept):
                path.unlink(missing_ok=True)
                total -= size
                if total <= _KEPT * self._limit:
                    break
        self.counts.held_bytes, self._unseen = total, 0


class StagePieces:
    """The pieces of one stage in a store. savers: of its parts, in the order of their layers."""

    def __init__(self, store: KvStore, savers: Sequence[CellSaver]) -> None:
        self._store, self._savers = store, savers
        self._layers = savers[0].layout.layers[0], savers[-1].layout.layers[1]

    @property
    def counts(self) -> StoreCounts:
        """What the store has done."""
        return self._store.counts

    def save(self, pieces: Sequence[Piece]) -> None:
        """Take pieces out of the cache now, and write them behind."""
        for piece in pieces:
            self._store.save(piece.key, self._layers, [
                (one, one.save_state(piece.seq_id), one.by_range) if piece.state else
                (one, one.save(piece.seq_id, piece.start, piece.stop), False)
                for one in self._savers])

    def load(self, pieces: Sequence[Piece]) -> int:
        """Put pieces back, in order; return how many of them, up to the first that is missing.

        Of one that some parts could not take, nothing is to be read: the caller removes its range.
        """
        for done, piece in enumerate(pieces):
            good = self._load(piece)
            self._store.hit(missed=not good)
            if not good:
                return done
        return len(pieces)

    def _load(self, piece: Piece) -> bool:
        saved = self._store.read(piece.key, self._layers)
        for one in self._savers:
            blob = None if saved is None else one.layout.build(
                saved, states_only=piece.state and one.by_range)
            if blob is None:
                return False
            taken = one.put_state(piece.seq_id, blob) if piece.state else one.put(
                piece.seq_id, piece.start, piece.stop, blob)
            if not taken:
                return False
        return True


def _name(key: bytes, layers: Layers) -> str:
    return f"{key.hex()}.{layers[0]}-{layers[1]}"


def _layers_of(name: str) -> Layers:
    start, _, stop = name[33:].partition("-")
    return int(start), int(stop)


def _head(body: memoryview) -> bytes:
    return _HEAD.pack(_MAGIC, blake2b(body, digest_size=16).digest(), len(body))


