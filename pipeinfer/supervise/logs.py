"""Logs of the ranks, one file per rank, of limited size, split from the launcher's tagged
output.

Open MPI's `--output tag` writes `[1,0]<stdout>: text`, MPICH's `-prepend-rank` `[0] text`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

_TAG = re.compile(r"\[(?:\d+,)?(\d+)\](?:<std(?:out|err)>:?)? ?")
#: what Open MPI prints in eight lines when a daemon is gone
_DAEMON = re.compile(
    r"-{40,}|[\s\0]*|PRTE has lost communication with a remote daemon\.|  HNP daemon +: .*|This is "
    r"usually due to either a failure of the TCP network|connection to the node, or possibly an "
    r"internal failure of|the daemon itself\. We cannot recover from this failure, and|therefore "
    r"will terminate the job\.|  Remote daemon: .* on node (?P<node>\S+)")
_MOST_LINE = 1 << 16  #: characters of a line; the rest of it is the next one
MOST_BYTES, COPIES = 8 << 20, 3
ERROR, _STARTS = "pipeinfer: error: ", 4


class _Private(RotatingFileHandler):
    """Files that only this user reads."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", errors="replace",
                    opener=lambda path, flags: os.open(path, flags, 0o600))

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs the line, not the job."""
        del record


class Logs:
    """`rank-N.log`, `launcher.log` and `up.log` in a folder.

    show: called with every line and the number of its rank (None: the launcher's).
    """

    def __init__(self, folder: Path, show: Callable[[int | None, str], None]) -> None:
        self.folder, self._show = folder, show
        self._files: dict[str, logging.Handler] = {}
        self._errors: dict[int, str] = {}

    def line(self, start: int, rank: int | None, text: str) -> None:
        """Log a line of a rank. start: number of the job."""
        if text.startswith(ERROR):
            self._errors.setdefault(start, text.removeprefix(ERROR))
            if len(self._errors) > _STARTS:
                del self._errors[min(self._errors)]
        self.write("launcher" if rank is None else f"rank-{rank}", f"#{start} {text}")
        found = _DAEMON.fullmatch(text) if rank is None else None
        if found and found["node"]:
            text = (f"pipeinfer: the launcher has lost machine {found['node']}, so its job ends: "
                    "see there whether it runs and is connected")
        if not found or found["node"]:
            self._show(rank, text)

    def error(self, start: int) -> str:
        """Return the first error that a rank of that job has printed; "" if none, and for jobs
        of long ago."""
        return self._errors.get(start, "")

    def write(self, name: str, text: str) -> None:
        """Append a line to the log `name`."""
        if name not in self._files:
            try:
                file = _Private(self.folder / f"{name}.log", maxBytes=MOST_BYTES,
                                backupCount=COPIES)
            except OSError:
                return
            file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            self._files[name] = file
        self._files[name].handle(logging.LogRecord(name, logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class Splitter:
    """Splits a stream's bytes into lines. line: called with each line and its rank."""

    def __init__(self, line: Callable[[int | None, str], None]) -> None:
        self._line = line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Handle bytes of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)

    def close(self) -> None:
        if self._rest:
            self._pass_on(self._rest)
        self._rest = b""

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        found = _TAG.match(text)
        self._line(int(found[1]) if found else None, text[found.end():] if found else text)
