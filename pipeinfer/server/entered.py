"""An engine that has entered the HTTP process that outlives the job, from its first frame on: how
far it is, and what it has said before anybody asked it for something.

It loads, and the vocabulary with it where that is another one, while another engine serves.
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
    """An engine and its settings. reason: why it is gone."""

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
        """How far it is."""
        if self._gone:
            return "gone"
        waits = self._loading is not None and not self._loading.done()
        return "ready" if Ready.op in self._said and not waits else "loading"

    def load(self, then: Callable[[], None]) -> None:
        """Have its vocabulary loaded. then: called when `tokenizer` is there, or it is `gone`."""
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
        """It does not come, or no more."""
        if not self._gone:
            self._gone, self.reason = True, self.reason or reason

    def talk_to(self, hear: Callable[[EngineFrame], None]) -> None:
        """Who hears it from now on, and first what it has said already."""
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
                pass  # figures of one that does nothing yet
