"""The file in which requests and their tokens outlive the HTTP process: `serve --journal FILE`.

It is text, one entry a line: eight hexadecimal digits (CRC-32 of what follows the space), a space,
a JSON object. The first entry names the format. Entries are appended; from time to time the
file is written again with the entries that are still needed, under another name, and renamed.
A damaged line is skipped: tokens that are lost with it are computed again, because they follow
from the request alone.

This module handles the file and requests, neither the engine nor HTTP. Only one thread may use it,
except `sync` and `render`, which may wait for the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import UsageError
from pipeinfer.server.errors import Failure
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.tools import ToolUse

VERSION = 1
_LOCK_SECONDS = 10.0  #: that another server, which is ending, may take to unlock the file
_log = logging.getLogger("pipeinfer.server")
#: token, speculated, log-probability, the likeliest tokens, its visible text (None: its own)
Row: TypeAlias = tuple[int, bool, float | None, tuple[tuple[int, float], ...], bytes | None]


class JournalHead(msgspec.Struct, tag_field="op", tag="pipeinfer-journal"):
    """The first entry."""

    version: int


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
    tools: ToolUse | None = None
    request: dict[str, Any] | None = None


class TokenRows(msgspec.Struct, tag_field="op", tag="tokens", frozen=True):
    """Output tokens of a choice from number `start` on. bits: of the engine that computed them."""

    id: str
    choice: int
    start: int
    rows: list[Row]
    bits: str = ""


class ChoiceEnded(msgspec.Struct, tag_field="op", tag="ended", frozen=True):
    """The end of a choice after so many tokens. seconds: from submission to the first token, and
    the last."""

    id: str
    choice: int
    at: float
    count: int
    reason: str
    stats: dict[str, Any]
    failure: Failure | None
    seconds: tuple[float | None, float | None]
    restarts: int = 0
    same_bits: bool = True


class Gone(msgspec.Struct, tag_field="op", tag="gone", frozen=True):
    """The request is deleted and cannot be requested any more."""

    id: str


Entry: TypeAlias = Begun | TokenRows | ChoiceEnded | Gone
_decode = msgspec.json.Decoder(JournalHead | Entry).decode


@dataclass(slots=True)
class Story:
    """The tokens and the end of a choice. written: how many of its tokens are in the file."""

    rows: list[Row] = field(default_factory=list)
    written: int = 0
    bits: str = ""
    end: ChoiceEnded | None = None


@dataclass(slots=True, eq=False)
class Record:
    """A request with its choices. size: its approximate bytes in the file."""

    begun: Begun
    stories: list[Story]
    size: int = 0

    @property
    def ended(self) -> float:
        """The time at which its last choice ended (seconds since 1970); 0 while one has not."""
        ends = [story.end.at if story.end else 0.0 for story in self.stories]
        return max(ends) if all(ends) else 0.0

    def entries(self) -> Iterator[Entry]:
        """Yield its entries for the file."""
        yield self.begun
        for choice, story in enumerate(self.stories):
            if story.rows:
                yield TokenRows(self.begun.id, choice, 0, story.rows, story.bits)
            if story.end is not None:
                yield story.end

    def copy(self) -> Record:
        """Return a copy that does not change while another thread writes it."""
        return Record(self.begun, [Story(list(s.rows), s.written, s.bits, s.end)
                                   for s in self.stories])


def check(path: str) -> Path:
    """Return the file's absolute path.

    Raises UsageError when it could not be written, or is not a journal.
    """
    whole = Path(path).resolve()
    with open(_open(whole), "rb") as file:
        begin = file.read(64)
    if begin and b'"pipeinfer-journal"' not in begin \
            and not _line(JournalHead(VERSION)).startswith(begin):
        raise _not_ours(whole)
    if not os.access(whole.parent, os.W_OK):
        raise UsageError(f"--journal {path}: its folder must be writable, too, because the file is "
                         "rewritten from time to time")
    return whole


class Journal:
    """The journal file. problem: why it cannot be written, "" if it can."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file. Raises UsageError if that fails."""
        self.path, self.problem, self.size = path, "", 0
        self._file = _lock(path)
        self._held: list[bytes] = []
        self._since: list[bytes] | None = None

    # --- reading ------------------------------------------------------------------------------

    def read(self) -> dict[str, Record]:
        """Return the requests in the file, by id.

        Raises UsageError if the file is not a journal. A damaged file is copied to `.damaged`.
        """
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        lines = data.split(b"\n")
        torn = lines.pop()
        head = _parse(lines[0]) if lines else None
        if lines and not isinstance(head, JournalHead):
            raise _not_ours(self.path)
        if isinstance(head, JournalHead) and head.version != VERSION:
            raise UsageError(f"--journal {self.path} has format {head.version}; this version of "
                             f"pipeinfer reads {VERSION}: name a new file")
        if not lines and torn and not _line(JournalHead(VERSION)).startswith(torn):
            raise _not_ours(self.path)
        records: dict[str, Record] = {}
        damaged = sum(not _take(records, line) for line in lines[1:])
        if damaged:
            self._keep_damaged(data, damaged)
        if torn or damaged or not lines:
            self.replace(self.render([r.copy() for r in records.values()]))
        else:
            self.size = len(data)
        return records

    def _keep_damaged(self, data: bytes, count: int) -> None:
        copy = self.path.with_name(self.path.name + ".damaged")
        with contextlib.suppress(OSError):
            copy.unlink(missing_ok=True)
            with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
        _log.warning("--journal %s: %d damaged lines are passed over (the file as it was: %s)",
                     self.path, count, copy)

    # --- writing ------------------------------------------------------------------------------

    def hold(self, record: Record, entry: Entry) -> None:
        """Queue an entry of a request for the next `flush`."""
        line = _line(entry)
        record.size += len(line)
        self._held.append(line)

    def flush(self) -> None:
        """Write all queued entries to the file; the system keeps them when this process dies. If
        that fails, none of them is in the file, and `problem` gives the reason."""
        data = b"".join(self._held)
        if self._since is not None:
            self._since += self._held
        self._held.clear()
        if not data or self.problem:
            return
        try:
            _write(self._file, data)
            self.size += len(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            self.failed(error)

    def sync(self) -> OSError | None:
        """Wait until the data is on the disk; return the error, if any."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            return error
        return None

    def failed(self, error: OSError) -> None:
        """Record that the file cannot be written, until `replace` has succeeded."""
        if not self.problem:
            _log.error("--journal %s cannot be written (%s): requests go on without it, and it is "
                       "tried again", self.path, error.strerror)
        self.problem = error.strerror or str(error)

    # --- rewriting ----------------------------------------------------------------------------

    def remember(self) -> None:
        """Collect the entries from now on, for `replace` to append to the file that `render`
        makes."""
        self._since = []

    def render(self, records: Iterable[Record]) -> tuple[int, int] | OSError:
        """Write a new file with these requests; return its descriptor and size, or the error."""
        replacement = self.path.with_name(self.path.name + ".new")
        made = -1
        try:
            replacement.unlink(missing_ok=True)
            made = os.open(replacement, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            size = _write(made, _line(JournalHead(VERSION)))
            for record in records:
                size += _write(made, b"".join(map(_line, record.entries())))
            os.fsync(made)
        except OSError as error:
            if made >= 0:
                os.close(made)
            with contextlib.suppress(OSError):
                replacement.unlink()
            return error
        return made, size

    def replace(self, made: tuple[int, int] | OSError) -> None:
        """Replace the file by the one that `render` has made; after an error it stays."""
        since, self._since = self._since or [], None
        if isinstance(made, OSError):
            self.failed(made)
            return
        replacement = self.path.with_name(self.path.name + ".new")
        try:
            size = made[1] + _write(made[0], b"".join(since))
            fcntl.flock(made[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(replacement, self.path)
        except OSError as error:
            os.close(made[0])
            self.failed(error)
            return
        os.close(self._file)
        self._file, self.size = made[0], size
        if self.problem:
            _log.warning("--journal %s can be written again", self.path)
        self.problem = ""

    def close(self) -> None:
        """Write the queued entries and close the file."""
        self.flush()
        self.sync()
        os.close(self._file)


def _open(path: Path) -> int:
    try:
        found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--journal {path} cannot be written: {error.strerror}") from error
    status = os.fstat(found)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
        return found
    os.close(found)
    raise UsageError(f"--journal {path} must be a file of this user that no other user may read, "
                     f"because it holds prompts: chmod 600 {path}, or name a new file")


def _not_ours(path: Path) -> UsageError:
    return UsageError(f"--journal {path} is not a journal of pipeinfer: name a new file, or one "
                      "that serve has written")


def _lock(path: Path) -> int:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        found = _open(path)
        with contextlib.suppress(OSError):
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(found), os.stat(path)):  # not one that was replaced
                return found
        os.close(found)
        if time.monotonic() > deadline:
            raise UsageError(f"--journal {path} is in use by another server: give each a file of "
                             "its own")
        time.sleep(0.05)


def _line(entry: JournalHead | Entry) -> bytes:
    body = msgspec.json.encode(entry)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> JournalHead | Entry | None:
    """Return the entry of a line, None for a damaged one."""
    body = line[9:]
    try:
        return _decode(body) if int(line[:8], 16) == zlib.crc32(body) else None
    except (ValueError, msgspec.MsgspecError):
        return None


def _take(records: dict[str, Record], line: bytes) -> bool:
    """Apply a line to the requests; return whether it is valid."""
    entry = _parse(line)
    match entry:
        case Begun(id=name, asked=asked):
            records[name] = Record(entry, [Story() for _ in range(asked.count)])
        case Gone(id=name):
            records.pop(name, None)
        case TokenRows() | ChoiceEnded() if (record := records.get(entry.id)) is not None:
            if not 0 <= entry.choice < len(record.stories):
                return False
            story = record.stories[entry.choice]
            if isinstance(entry, ChoiceEnded):
                story.end = entry if entry.count == len(story.rows) else None
            elif entry.start <= len(story.rows):
                story.rows[entry.start:] = entry.rows
                story.written, story.bits = len(story.rows), entry.bits
        case TokenRows() | ChoiceEnded():
            return True  # of a request whose own line is damaged, or that has gone
        case _:
            return False
    if entry.id in records:
        records[entry.id].size += len(line) + 1
    return True


def _write(file: int, data: bytes) -> int:
    """Write all data; return its length. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view):]
    return len(data)
