"""The file in which requests and their tokens outlive the HTTP process: `serve --journal FILE`.

It is an SQLite database with one row per entry, in the order in which they were written. Tokens of
the last second, which a crash may lose, are computed again, because they follow from the request
alone. This module handles the file and requests, neither the engine nor HTTP.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import stat
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import UsageError
from pipeinfer.server.choice import Row
from pipeinfer.server.errors import Failure
from pipeinfer.server.requests import EngineRequest

VERSION = 2
_OURS = 0x70697065  #: application id, in the header of the file
_LOCK_SECONDS = 10.0  #: that another server, which is ending, may take to unlock the file
_log = logging.getLogger("pipeinfer.server")


class Begun(msgspec.Struct, tag_field="op", tag="begun", frozen=True):
    """A request.

    kind: of the API. owner: digest of the API key that may request the answer.
    key: the client's Idempotency-Key. body: digest of the client's request.
    model: identity of the model file. bits: of the engine at that time.
    """

    id: str
    at: int
    kind: str
    owner: str
    key: str
    body: str
    model: str
    bits: str
    asked: EngineRequest
    request: dict[str, Any] | None = None


class TokenRows(msgspec.Struct, tag_field="op", tag="tokens", frozen=True):
    """The next output tokens of a choice. bits: of the engine that computed them."""

    choice: int
    rows: list[Row]
    bits: str = ""


class ChoiceEnded(msgspec.Struct, tag_field="op", tag="ended", frozen=True):
    """The end of a choice. seconds: from submission to the first token, and the last."""

    choice: int
    at: float
    reason: str
    stats: dict[str, Any]
    failure: Failure | None
    seconds: tuple[float | None, float | None]
    restarts: int = 0
    same_bits: bool = True


Entry: TypeAlias = Begun | TokenRows | ChoiceEnded
_decode = msgspec.json.Decoder(Entry).decode


def encode(entry: Entry) -> bytes:
    """Return the bytes of an entry."""
    try:
        return msgspec.json.encode(entry)
    except UnicodeEncodeError:  # a text has half a surrogate pair
        text = json.dumps(msgspec.to_builtins(entry), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def check(path: str) -> Path:
    """Return the file's absolute path.

    Raises UsageError when it could not be written, or is not a journal.
    """
    whole = Path(path).resolve()
    try:
        file = os.open(whole, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--journal {path} cannot be written: {error.strerror}") from error
    with open(file, "rb") as opened:
        status, head = os.fstat(file), opened.read(100)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UsageError(f"--journal {path} must be a file of this user that no other user may "
                         f"read, because it holds prompts: chmod 600 {path}, or name a new file")
    if head and (not head.startswith(b"SQLite format 3\0")
                 or head[68:72] != _OURS.to_bytes(4, "big")):
        raise UsageError(f"--journal {path} is not a journal of this version of pipeinfer: name a "
                         "new file")
    if not os.access(whole.parent, os.W_OK):
        raise UsageError(f"--journal {path}: its folder must be writable, too")
    return whole


class Journal:
    """The journal file. problem: why it cannot be written, "" if it can. size: in bytes."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file. Raises UsageError if that fails."""
        self.path, self.problem, self.size = check(str(path)), "", 0
        self._queue: deque[tuple[str, bytes | None]] = deque()  # None: delete its entries
        # a new request and the periodic flush write from threads of their own
        self._lock = threading.Lock()
        with self._usable():
            self._file = sqlite3.connect(path, timeout=_LOCK_SECONDS, check_same_thread=False,
                                         isolation_level=None)
            for line in ("locking_mode = exclusive", f"application_id = {_OURS}",
                         f"user_version = {VERSION}", "journal_mode = wal",
                         "synchronous = normal", "wal_autocheckpoint = 0"):
                self._file.execute(f"PRAGMA {line}")
            self._file.execute("CREATE TABLE IF NOT EXISTS entries (id TEXT, entry BLOB)")
            self._file.execute("CREATE INDEX IF NOT EXISTS by_id ON entries (id)")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            why = "is in use by another server: give each a file of its own" \
                if "locked" in str(error) else f"cannot be used ({error}): name a new file"
            raise UsageError(f"--journal {self.path} {why}") from error

    def read(self) -> dict[str, list[Entry]]:
        """Return the entries of each request in the file, by its id. Raises UsageError."""
        found: dict[str, list[Entry]] = {}
        with self._usable():
            for name, entry in self._file.execute("SELECT id, entry FROM entries ORDER BY rowid"):
                with contextlib.suppress(msgspec.MsgspecError):  # its tokens are computed again
                    found.setdefault(name, []).append(_decode(entry))
        return found

    def add(self, name: str, entry: Entry) -> int:
        """Queue an entry of a request for the next `write`; return its bytes."""
        data = encode(entry)
        self._queue.append((name, data))
        return len(data)

    def drop(self, name: str) -> None:
        """Delete a request at the next `write`."""
        self._queue.append((name, None))

    def write(self, sync: bool = False) -> None:
        """Write what is queued; the system keeps it when this process dies. Threads may call this.

        sync: wait until it is on the disk. If that fails, `problem` gives the reason, and the queue
        is written by a later call.
        """
        with self._lock:
            done: list[tuple[str, bytes | None]] = []
            try:
                self._file.execute("BEGIN")
                while self._queue:
                    done.append(self._queue.popleft())
                    name, entry = done[-1]
                    if entry is None:
                        self._file.execute("DELETE FROM entries WHERE id = ?", (name,))
                    else:
                        self._file.execute("INSERT INTO entries VALUES (?, ?)", (name, entry))
                self._file.execute("COMMIT")
                if sync:
                    self._file.execute("PRAGMA wal_checkpoint(truncate)")
                pages, free, size = (self._file.execute(f"PRAGMA {name}").fetchone()[0]
                                     for name in ("page_count", "freelist_count", "page_size"))
                self.size = (pages - free) * size
                if self.problem:
                    _log.warning("--journal %s can be written again", self.path)
                self.problem = ""
            except sqlite3.Error as error:
                # a later call writes them in the same order
                self._queue.extendleft(reversed(done))
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")
                if not self.problem:
                    _log.error("--journal %s cannot be written (%s): requests go on without it, "
                               "and it is tried again", self.path, error)
                self.problem = str(error)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self.write(sync=True)
        self._file.close()
