"""An engine that has connected to the HTTP process that outlives the job: its progress, and the
frames that it sent before it serves.

It loads, together with its vocabulary if that is another one, while another engine serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, TypeAlias

from pipeinfer.errors import PipeinferError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.engine_line import EngineLine
from pipeinfer.server.frames import Bye, EngineFrame, Failed, Loading, Ready
from pipeinfer.server.settings import Settings

Progress: TypeAlias = Literal["loading", "ready", "gone"]
_log = logging.getLogger("pipeinfer.server")


class Entered:
    """A connected engine and its settings. reason: why it has gone."""

    def __init__(self, line: EngineLine, settings: Settings) -> None:
        self.line, self.settings = line, settings
        self.reason = ""
        self.tokenizer: Tokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._said: dict[str, EngineFrame] = {}
        self._gone = False
        line.hear = self._remember

    @property
    def state(self) -> Progress:
        """The progress of the engine."""
        if self._gone:
            return "gone"
        waits = self._loading is not None and not self._loading.done()
        return "ready" if Ready.op in self._said and not waits else "loading"

    def load(self, then: Callable[[], None]) -> None:
        """Start to load its vocabulary. then: called when `tokenizer` is set, or the state is
        `gone`."""
        async def load() -> None:
            try:
                self.tokenizer = await asyncio.to_thread(open_tokenizer, self.settings.model)
                tokenizer = self.tokenizer
                await asyncio.to_thread(lambda: (tokenizer.eog_ids, tokenizer.marks.pattern))
            except PipeinferError as error:
                _log.error("%s", error)
                self.lose(str(error))
            then()

        self._loading = asyncio.create_task(load())

    def lose(self, reason: str) -> None:
        """Record that the engine has gone."""
        if not self._gone:
            self._gone, self.reason = True, self.reason or reason

    def talk_to(self, hear: Callable[[EngineFrame], None]) -> None:
        """Pass all frames to `hear` from now on, beginning with those that were stored."""
        self.line.hear = hear
        for frame in self._said.values():
            hear(frame)

    def _remember(self, frame: EngineFrame) -> None:
        match frame:
            case Loading() | Ready():
                self._said[frame.op] = frame
            case Failed(message):
                self.lose(message)
            case Bye():
                self.lose("it has ended")
            case _:
                pass  # figures of an engine that does not serve yet
