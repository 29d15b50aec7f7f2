"""What a command of one rank writes or refuses, without a process of its own: how a process starts
and ends is shown where real jobs do (tests/mpi/test_jobs.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from click.testing import CliRunner

from pipeinfer.errors import PipeinferError

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def process_kept() -> Iterator[None]:
    """A command that is run here sets handlers and variables, as if this process were its own."""
    before, environ = {number: signal.getsignal(number) for number in _WATCHED}, dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in before.items():
            signal.signal(number, handler)


def refusal(command: click.Command, words: Sequence[str]) -> tuple[int, str]:
    """The exit code and the line with which `command` would end; an AssertionError where it does
    anything else, such as to blame the job and not what it was given."""
    with process_kept():
        done = CliRunner().invoke(command, list(words))
    if isinstance(done.exception, PipeinferError):
        code, line = done.exception.exit_code, str(done.exception)
        assert code in (2, 3, 4, 5), line
        assert "\n" not in line
        return code, line
    assert isinstance(done.exception, SystemExit), (done.exception, done.output)
    assert done.exit_code != 0, done.output
    return done.exit_code, done.stderr


def assert_refused(command: click.Command, words: Sequence[str], code: int, says: str) -> None:
    """Check that `command` would end with this exit code, and a line that holds these words."""
    found, line = refusal(command, words)
    assert found == code, line
    assert says in line


def output(command: click.Command, words: Sequence[str]) -> str:
    """What `command` writes to its standard output."""
    with process_kept():
        done = CliRunner().invoke(command, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout
