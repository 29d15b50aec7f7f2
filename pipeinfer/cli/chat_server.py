"""The server of a `pipeinfer chat` on ranks of its own, at a Unix socket that only this user can
use.

A child process becomes rank 0 of the job (`chat_rank`), because MPI needs the main thread, as
Ctrl-C does; this process has the terminal.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time

import click

from pipeinfer import host
from pipeinfer.config import JobConfig, SamplingConfig
from pipeinfer.errors import RequestError, UsageError, ending
from pipeinfer.server.http_process import listen_privately

_EVERY = 0.05  #: seconds between two checks whether the server is ready, or has ended
_END = 60.0  #: seconds for the job to end before it is killed
_PATIENCE = 24 * 3600.0  #: seconds for any wait: for a long prompt, or in a terminal that is held


class OwnServer:
    """The server, and the process that is rank 0."""

    def __init__(self, job: JobConfig, sampling: SamplingConfig) -> None:
        """Start it. In the new process this does not return."""
        self._folder = tempfile.mkdtemp(prefix="pipeinfer-chat-")
        path = os.path.join(self._folder, "socket")
        try:
            listener = listen_privately(path)
        except UsageError:
            os.rmdir(self._folder)
            raise
        with listener:
            ending, self._ending = os.pipe()
            self._process = os.fork()  # before MPI, and before any thread
            if not self._process:
                os.close(self._ending)
                from pipeinfer.cli.chat_rank import be_rank_0

                be_rank_0(job, sampling, listener, ending, self._folder, _PATIENCE)
        os.close(ending)
        host.forget_launcher()
        from pipeinfer.cli.client import Remote  # while the other process imports what it needs

        self.remote = Remote(f"unix:{path}", timeout=_PATIENCE)
        self._status: int | None = None

    def wait_until_ready(self) -> None:
        """Return when requests are accepted. Raises SystemExit if the job ends before that, which
        has printed its error."""
        try:
            self.remote.wait_until_ready(lambda _: None, every=_EVERY)
        except RequestError:
            raise SystemExit(self.joined()) from None

    def has_failed(self) -> bool:
        """Whether the job has ended or is about to."""
        return self.remote.state() in ("", "failed", "stopped")

    def end(self, status: int) -> int:
        """End the job; return its exit status.

        status: with which it is to end, INTERRUPTED for at once.
        """
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            os.write(self._ending, str(status).encode())
        return self.joined()

    def joined(self) -> int:
        """Wait for the end of the job; return its exit status."""
        if self._status is None:
            self._status = self._wait()
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._status < 0:
            click.echo(f"pipeinfer: error: rank 0 has ended with {ending(self._status)}", err=True)
            self._status = 128 - self._status
        return self._status

    def _wait(self) -> int:
        """Return the exit code, -N after signal N."""
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_EVERY)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        return -signal.SIGKILL
