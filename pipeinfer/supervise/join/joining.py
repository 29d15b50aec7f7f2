"""`pipeinfer up --join`: the head's part, from its start to its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType

import click

from pipeinfer.supervise.join.commands import PORT, address_of
from pipeinfer.supervise.join.messages import OwnSettings
from pipeinfer.supervise.join.offers import own_offer
from pipeinfer.supervise.join.roster import JoinedRoster
from pipeinfer.supervise.join.server import JoinServer
from pipeinfer.supervise.join.tokens import JoinTokens
from pipeinfer.supervise.launcher import Launcher
from pipeinfer.supervise.state import Folder

#: options of `serve` that make the machines hold the model together, and get its layers by itself
_TOGETHER = ("--head-stage", "--distribute")


class Joining:
    """Accepts machines while it is entered as an asynchronous context.

    at: [ADDRESS][:PORT], "" for all addresses. words: `serve` and its options.
    say: prints a line for the user.
    """

    def __init__(self, at: str, launcher: Launcher, folder: Folder, words: Sequence[str],
                 say: Callable[[str], None]) -> None:
        """Raises UsageError if the token, the certificate or the hostfile cannot be used."""
        self._host, self._port = address_of(at) if at else ("", PORT)
        self._folder, self._say = folder, say
        self.server = JoinServer(JoinTokens(folder.path), own_offer(launcher, OwnSettings()), say)
        self.roster = JoinedRoster(self.server, launcher.kind, folder.path, folder.name)
        self.words = [*words, *(word for word in _TOGETHER if word not in words)]

    async def __aenter__(self) -> Joining:
        await self.server.start(self._host, self._port)
        self.roster.start()
        self._say(f"on each other machine: {self.server.line}")
        if sys.stderr.isatty():
            show_token(self._folder)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.server.close()


def show_token(folder: Folder) -> None:
    """Print the token by which machines join, on the terminal alone: no log has it."""
    tokens = JoinTokens(folder.path)
    click.echo(f"pipeinfer: it asks for this token: {tokens.token(tokens.usable()).text}", err=True)
