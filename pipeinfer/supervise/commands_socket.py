"""The commands by which `pipeinfer status`, `down`, `rescale` and `reload` control the supervisor;
`server.orders` has their form."""

from __future__ import annotations

import contextlib
import json
from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import RequestError
from pipeinfer.server.orders import Report
from pipeinfer.supervise.state import Folder


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
