"""Text as it may be shown: nothing after a stop string, no beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Looks for stop strings in a text that arrives in pieces; holds back partial matches."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string has been met."""
        text = self._held + piece
        found = [at for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((n for s in self._stops for n in range(1, min(len(s), len(text) + 1))
                    if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was held back when no more text comes."""
        held, self._held = self._held, ""
        return held
