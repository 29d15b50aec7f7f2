"""A client that watches the pipeline, and the frames that wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_FRAMES = 64  #: most frames that wait for a slow client


@dataclass(slots=True, eq=False)
class Watcher:
    """A client of the pipeline page. The oldest frames are dropped if it is too slow."""

    frames: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_FRAMES))
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, frame: dict[str, Any]) -> None:
        """Queue a frame for the client and wake its stream."""
        self.frames.append(frame)
        self.news.set()
