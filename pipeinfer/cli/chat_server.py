"""The server of a `pipeinfer chat` of its own: `pipeinfer serve` as a child process, alone or over
ranks, at a Unix socket that only this user can use.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import click

from pipeinfer import host
from pipeinfer.cli.client import Remote
from pipeinfer.errors import RequestError, ending

_EVERY = 0.05  #: seconds between two checks whether the server is ready, or has ended
_END = 60.0  #: seconds for the job to end before it is killed
_PATIENCE = 24 * 3600  #: seconds for any wait: for a long prompt, or in a terminal that is held


class OwnServer(contextlib.AbstractContextManager["OwnServer"]):
    """The server. It ends with the block, and with this process.

    words: options of the job. ranks: over so many; hosts: over those of this hostfile.
    """

    def __init__(self, words: Sequence[str], ranks: int | None, hosts: str | None) -> None:
        self._socket = Path(tempfile.gettempdir(), f"pipeinfer-chat-{secrets.token_hex(8)}")
        self.remote = Remote(f"unix:{self._socket}", timeout=_PATIENCE)
        if hosts:
            from pipeinfer.cli.doctor_hosts import check_head

            check_head(hosts)
        over = [*(("-np", str(ranks)) if ranks else ()), *(("--hosts", hosts) if hosts else ())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeinfer", *(["run", *over] if over else []), "serve",
             "--host", f"unix:{self._socket}", "--request-timeout", str(_PATIENCE), "--set",
             f"client_timeout={_PATIENCE}", *words],
            stdin=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the conversation
            preexec_fn=host.end_with_parent)

    def wait_until_ready(self) -> None:
        """Return when requests are accepted. Raises SystemExit if the job ends before that, which
        has printed its error."""
        while not self._socket.exists():  # it checks the model first
            if self._process.poll() is not None:
                raise SystemExit(self.joined())
            time.sleep(_EVERY)
        try:
            self.remote.wait_until_ready(lambda _: None, every=_EVERY)
        except RequestError:
            raise SystemExit(self.joined()) from None

    def has_failed(self) -> bool:
        """Whether the job has ended or is about to."""
        return self.remote.state() in ("", "failed", "stopped")

    def joined(self) -> int:
        """Wait for the end of the job; return its exit status."""
        try:
            # it lets its ranks end; one that hangs must not keep the terminal
            status = self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status < 0:
            click.echo(f"pipeinfer: error: the server has ended with {ending(status)}", err=True)
        return status if status >= 0 else 128 - status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.joined()
        self._socket.unlink(missing_ok=True)
