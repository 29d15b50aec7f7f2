"""What the launch scripts hand over to:

    python -m pipeinfer.supervise [--hosts HOSTFILE NP KIND OUT] [--remove FILE]... -- WORDS...

Runs WORDS, a launcher's command line, with PIPEINFER_RESTARTS=N up to N times more when it fails;
@NP@ among them is the number of ranks, and the hosts of OUT, a hostfile of KIND, are those of
HOSTFILE that answer. FILE is the script's and is removed at the end. PIPEINFER_JOB is the number
of the job. Output is left as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from pipeinfer.cli import inherited
from pipeinfer.cluster.cleanup import VARIABLE
from pipeinfer.errors import UsageError
from pipeinfer.supervise.hosts import Roster
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.launcher import name_terminal
from pipeinfer.supervise.standard_input import passed_on
from pipeinfer.supervise.supervisor import JobSource, Supervisor


class _Words(JobSource):
    """The command line of a script."""

    def __init__(self, name: str, words: list[str], environ: dict[str, str],
                 roster: Roster | None) -> None:
        self.name, self._words, self._environ, self._roster = name, words, environ, roster

    @property
    def hostfile(self) -> str:
        return str(self._roster.out) if self._roster else ""

    def job(self) -> SupervisedJob:
        ranks = str(self._roster.place.ranks) if self._roster else "@NP@"
        return SupervisedJob([ranks if word == "@NP@" else word for word in self._words],
                             self._environ)

    def ask_hosts(self) -> list[str]:
        return [] if self._roster is None else self._roster.ask()


def say(text: str) -> None:
    """A line for the user."""
    sys.stderr.write(f"pipeinfer: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run a command under the supervisor of the launch scripts."""
    inherited.settle()
    parser = argparse.ArgumentParser("python -m pipeinfer.supervise", allow_abbrev=False)
    parser.add_argument("--hosts", nargs=4, metavar=("HOSTFILE", "NP", "KIND", "OUT"))
    parser.add_argument("--job", required=True)
    parser.add_argument("--remove", action="append", default=[], type=Path)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args()
    restarts = os.environ.get("PIPEINFER_RESTARTS") or "0"
    if not (restarts.isascii() and restarts.isdigit()):
        say(f"PIPEINFER_RESTARTS={restarts} is not a whole number")
        return UsageError.exit_code
    environ = dict(os.environ) | {VARIABLE: given.job}
    name_terminal(environ)
    roster = None
    if given.hosts:
        hostfile, ranks, kind, out = given.hosts
        roster = Roster(hostfile, kind, Path(out), int(ranks))
    door = HttpDoor(environ, say) if int(restarts) and "serve" in given.words else None
    chats = "chat" in given.words
    source = _Words(given.job, given.words, environ, roster)
    try:
        with passed_on(environ) if chats else contextlib.nullcontext():
            return asyncio.run(Supervisor(
                source, int(restarts), door, say,
                last=(signal.SIGHUP, signal.SIGTERM) if chats else ()).run())
    except ChildProcessError as error:
        say(str(error))
        return 127
    finally:
        for path in given.remove:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
