"""Terminal output: progress and errors; and the exit of a command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

import click
import psutil

from pipeinfer import host
from pipeinfer.cluster.shutdown import end_job
from pipeinfer.config import JobConfig
from pipeinfer.errors import ClusterError, PipeinferError, StageFailed
from pipeinfer.models.locate import fetch, may_fetch
from pipeinfer.waiting import unless_within

INTERRUPTED = 130
TERMINAL = "PIPEINFER_TERMINAL"  #: host:path of the terminal of a job's supervisor
_AGAIN = 0.05  #: seconds, in which a finaliser has ended
_SILENT = 5.0  #: seconds of waiting for a disk without a word


#: control characters except line ends and tabs
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return a text from a model or a server without what could drive a terminal: sequences that
    clear it, write into the clipboard, or hide what was written."""
    return _CONTROLS.sub("", text)


def reaches_terminal(out: TextIO) -> bool:
    """Return whether a terminal shows what is written to standard output, `out`.

    A launcher gives a rank a pipe or a terminal of the launcher's own, and joins what comes to its
    own output.
    """
    if host.launched():
        with contextlib.suppress(OSError, StopIteration):
            launcher = next(one.pid for one in psutil.Process().parents()
                            if not one.name().startswith("hydra_pmi"))
            return os.readlink(f"/proc/{launcher}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    return out.isatty()


class Stopped(BaseException):
    """The user wants to leave at once."""


def note(text: str) -> None:
    """Print something that the user should know, on standard error."""
    click.echo(f"pipeinfer: note: {plain(text)}", err=True)


def fail(error: PipeinferError) -> NoReturn:
    """Print an error, with what led to it, and end every rank."""
    if isinstance(error, ClusterError) and error.story:
        click.echo("\n".join(["### the last events of each lane", *error.story]), err=True)
    if isinstance(error, StageFailed) and error.remote_traceback:
        click.echo(f"### rank {error.rank} on {error.host}\n{error.remote_traceback}", err=True)
    click.echo(f"pipeinfer: error: {plain(str(error))}", err=True)
    leave(error.exit_code)


def leave(code: int) -> NoReturn:
    """Exit with `code`, and end the other ranks."""
    end_job(code)
    raise SystemExit(code)


def watch_signals() -> list[int]:
    """Record interrupts: the first one lets the current token complete, the second raises
    Stopped.

    mpirun turns Ctrl-C into SIGTERM and kills 0.25 s later; so SIGTERM raises Stopped at once, and
    the caller prints what it has.
    """
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        seen.append(number)
        if len(seen) > 1 or number == signal.SIGTERM:
            raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, on_signal)
    sys.unraisablehook = stop_again
    return seen


def stop_again(lost: sys.UnraisableHookArgs) -> None:
    """Send SIGTERM once more where Stopped was raised inside a finaliser, which drops it."""
    if lost.exc_type is not Stopped:
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGTERM))
    again.daemon = True
    again.start()


def fetch_models(job: JobConfig) -> None:
    """Rank 0: fetch the job's models before the ranks meet; a signal stops that at once.

    Raises Stopped, and what `locate.find` does.
    """
    if host.launched_rank() > 0:
        return
    for name in filter(None, (job.model.model, job.model.draft_model)):
        _await_disk(Path(name))
    if not may_fetch(job):
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Stopped

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        fetch(job)
    except Stopped:
        click.echo("\npipeinfer: stopped; the same command goes on from here", err=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await_disk(path: Path) -> None:
    """Return when this path can be read, or when it is found that it cannot.

    A signal ends neither a read nor a stat of a network disk whose server is gone, only a wait.
    """
    def read() -> None:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.read(1)

    reader = threading.Thread(target=read, daemon=True, name="await-disk")
    reader.start()
    with unless_within(_SILENT, lambda: note(f"still waiting for the disk of {path}")):
        while reader.is_alive():  # a join without a limit leaves no room for a signal's handler
            reader.join(0.2)


def talk_past_the_launcher() -> None:
    """Write to the terminal directly, if there is one: after an interrupt mpirun drops the
    output of its ranks."""
    if host.launched() and (terminal := own_terminal()) is not None:
        os.dup2(terminal, 2)


def note_forwarded_input(instead: str) -> None:
    """Print a note if standard input comes through Open MPI's launcher, which may not end then.

    instead: what to use.
    """
    if "PMIX_RANK" in os.environ and host.launched():
        click.echo("pipeinfer: note: mpirun of Open MPI 5.0 may hang after forwarding standard "
                   f"input; use {instead} instead", err=True)


def own_terminal() -> int | None:
    """Open the user's terminal without mpirun's pipes; None if there is none.

    It is the controlling terminal, or the one that launch/run names (its mpirun has a session of
    its own) when rank 0 is on the same host.
    """
    where, _, path = os.environ.get(TERMINAL, "").partition(":")
    for candidate in ("/dev/tty", path if where == socket.gethostname() else ""):
        if candidate.startswith("/dev/"):
            with contextlib.suppress(OSError):
                return os.open(candidate, os.O_WRONLY | os.O_NOCTTY)
    return None


def progress_stream() -> tuple[TextIO, bool]:
    """Return where progress is shown, and whether a line there can be replaced.

    mpirun gives its ranks pipes, so there the terminal itself is opened.
    """
    if not sys.stderr.isatty() and host.launched() and (terminal := own_terminal()) is not None:
        return os.fdopen(terminal, "w", encoding="utf-8", errors="replace"), host.moves_cursor()
    return sys.stderr, sys.stderr.isatty() and host.moves_cursor()


def show_over(text: str) -> None:
    """Replace the last line on standard error; "" at the end. Without a terminal nothing is
    written, except under mpirun, where a rank cannot detect a terminal."""
    if not host.moves_cursor() or not (sys.stderr.isatty() or host.launched()):
        return
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)
