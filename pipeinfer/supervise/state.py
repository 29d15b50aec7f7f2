"""The private folder of a supervisor: its state as `state.json`, its lock, logs, and command
socket.

`pipeinfer status`, `down`, `rescale` and `reload` send their commands there (`server.orders` has
their form). Only the user that owns the folder may read it or send commands: its mode is 0700, and
the kernel reports the user at the other end of the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import RequestError, UsageError
from pipeinfer.server.orders import Report, is_ours

VARIABLE = "PIPEINFER_STATE"  #: the folder of all supervisors of this user
JOINED = ".join"  #: its folder with one for each head that this machine has joined
_TRIES, _PAUSE = 10, 0.02  #: to lock a folder, and seconds between two of them
_SOCKET, _LOCK, _STATE = "control", "lock", "state.json"


class Folder:
    """The folder of the supervisor called `name`. below: folder of such folders."""

    def __init__(self, name: str, below: str = "") -> None:
        """Raises UsageError for a name that cannot be a folder's."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise UsageError(f"--name {name!r}: use letters, digits, dots and dashes, 64 at most")
        self.name, self.path = name, _base() / below / name
        self._lock = -1

    def make(self) -> None:
        """Create the folder and its `logs`. Raises UsageError if other users could write to it."""
        logs = self.path / "logs"
        try:
            for path in reversed((logs, *logs.parents)):  # mkdir's mode is not that of parents
                if not path.exists():
                    path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make {self.path}: {error.strerror}; name another folder with "
                             f"{VARIABLE}") from error
        self.check()

    def check(self) -> None:
        """Raise UsageError unless only this user may write to the folder."""
        for path in (self.path.parent, self.path):
            info = path.lstat()
            if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode) \
                    or info.st_mode & 0o022:
                raise UsageError(f"{path} must be a folder of this user that no other user may "
                                 f"write to: chmod 700 {path}, or name another one with {VARIABLE}")
        if self.path.stat().st_mode & 0o077:
            self.path.chmod(0o700)

    def lock(self) -> bool:
        """Lock the folder until this process ends; return whether that succeeded."""
        # the kernel frees the lock of a process that was killed; a file with its number would stay
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for _ in range(_TRIES):  # who looks whether it is locked (`alive`) has it for that moment
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(_PAUSE)
        os.close(self._lock)
        return False

    @property
    def alive(self) -> bool:
        """Whether a supervisor has locked the folder."""
        try:
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may look as well
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def write(self, state: dict[str, Any]) -> None:
        """Store the state. A full disk costs the report, not the job."""
        replacement = self.path / f"{_STATE}.new"
        with contextlib.suppress(OSError):
            number = os.open(replacement, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(number, "w", encoding="utf-8") as file:
                json.dump(state, file, indent=1)
            # readers see the whole of one state or the other
            os.replace(replacement, self.path / _STATE)

    def read(self) -> dict[str, Any]:
        """Return the state that was stored last, {} if none."""
        try:
            found = json.loads((self.path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # --- the socket ---------------------------------------------------------------------------

    def listen(self) -> socket.socket:
        """Return the socket for commands. The folder must be locked."""
        (self.path / _SOCKET).unlink(missing_ok=True)
        found = socket.socket(socket.AF_UNIX)
        with self._short() as name:
            found.bind(name)
        (self.path / _SOCKET).chmod(0o600)
        found.listen(8)
        return found

    def unlisten(self) -> None:
        """Remove the socket. If the disk has become read-only, its name stays."""
        with contextlib.suppress(OSError):
            (self.path / _SOCKET).unlink(missing_ok=True)

    def connect(self) -> socket.socket:
        """Return a connection to the supervisor.

        Raises UsageError if there is none, or if it belongs to another user.
        """
        if self.path.is_dir():
            self.check()
        found = socket.socket(socket.AF_UNIX)
        try:
            with self._short() as name:
                found.connect(name)
        except OSError as error:
            found.close()
            raise UsageError(nothing(self.name)) from error
        if not is_ours(found):
            found.close()
            raise UsageError(f"{self.path / _SOCKET} belongs to another user")
        return found

    @contextlib.contextmanager
    def _short(self) -> Iterator[str]:
        """Yield a path of the socket that is short enough for a socket address, wherever the
        folder is."""
        number = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{number}/{_SOCKET}"
        finally:
            os.close(number)


def when(seconds: float) -> str:
    """Return a time since 1970 as users read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def nothing(name: str) -> str:
    """Return the message that there is no supervisor of that name, and what to do."""
    more = "" if name == "default" else f" --name {name}"
    others = running()
    hint = f"; running: {', '.join(others)} (--name)" if others else ""
    return f"nothing is up here: start it with `pipeinfer up{more}`{hint}"


def running() -> list[str]:
    """Return the names of this user's living supervisors."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in _base().iterdir()
                      if path.is_dir() and Folder(path.name).alive)
    return []


def members() -> list[str]:
    """Return the names of the folders of heads of which this machine is a member now."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (_base() / JOINED).iterdir()
                      if path.is_dir() and Folder(path.name, JOINED).alive)
    return []


def _base() -> Path:
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home).absolute() / "pipeinfer" / "up"


class _UserCommand(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower):
    pass


class SocketStatus(_UserCommand, frozen=True):
    """Return the state."""


class Down(_UserCommand, frozen=True):
    """End the job and the supervisor. now: without waiting for running requests."""

    now: bool = False


class Rescale(_UserCommand, frozen=True):
    """Move the job to the hosts that answer.

    ranks: None for as many as before. wait: seconds for open requests to end, if they must.
    """

    ranks: int | None = None
    wait: float = 0.0


class Reload(_UserCommand, frozen=True):
    """Start the server again.

    words: its options, empty for the same. wait: as for `Rescale`.
    force: continue after `wait` with requests still open.
    """

    words: list[str] = []
    wait: float = 0.0
    force: bool = False


class LaunchDaemon(_UserCommand, frozen=True):
    """Start the launcher's daemon on a machine that has joined. host: its address."""

    host: str
    kind: str
    arguments: list[str]


class JoinedHosts(_UserCommand, frozen=True):
    """Return the machines that have joined, and the tokens.

    new: make a token first, which ends after `seconds`, 0 for never. revoke: the id of a token that
    admits nobody any more, "" for none.
    """

    new: bool = False
    seconds: float = 0.0
    revoke: str = ""


Command: TypeAlias = SocketStatus | Down | Rescale | Reload | LaunchDaemon | JoinedHosts


def call(folder: Folder, report: Report, timeout: float, command: Command) -> dict[str, Any]:
    """Send a command to the supervisor of `folder`; return the answer.

    report: called with each line of progress. timeout: seconds.
    Raises UsageError if there is no supervisor, RequestError if it refuses or does not answer.
    """
    with folder.connect() as link:
        link.settimeout(timeout)
        try:
            link.sendall(msgspec.json.encode(command) + b"\n")
            with link.makefile("rb") as lines:
                for line in lines:
                    match json.loads(line):
                        case {"say": str(text)}:
                            report(text)
                        case {"error": str(text)}:
                            raise RequestError(text)
                        case dict() as found:
                            return found
        except TimeoutError as error:
            raise RequestError(f"no answer within {timeout:g} s: see `pipeinfer status` and "
                               f"{folder.path / 'logs'}") from error
        except (OSError, ValueError) as error:
            raise RequestError(f"the connection was lost: {error}") from error
    with contextlib.suppress(OSError):
        if folder.alive:
            raise RequestError("no answer came")
    raise RequestError("it has ended before it answered")
