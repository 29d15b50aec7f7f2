"""Conversion of tokens to text that may be shown: no incomplete character, nothing from a stop
string on, and no beginning of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer


class TextStream:
    """The text of one response. Positions count its characters from 0.

    Text is certain once it cannot be the beginning of a stop string; `take` returns it once.
    stopped: whether a stop string occurred; the text ends before it
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (),
                 shown: Sequence[int] = (), thought: Sequence[str] = ()) -> None:
        """shown: control tokens that are text here. thought: marks of reasoning, see StopText."""
        self.stopped = False
        self.produced = 0  #: characters of all tokens, certain or not
        self.certain = 0  #: characters that stay; where the text ends, once it has ended
        self._decoder, self._stopper = tokenizer.stream(shown), StopText(stops, thought)
        self._ready = ""

    @property
    def stop(self) -> str:
        """The stop string that has ended the text, "" if none has."""
        return self._stopper.found

    @property
    def taken(self) -> int:
        """The number of characters that `take` has returned."""
        return self.certain - len(self._ready)

    def push(self, token: int, seen: bytes | None = None) -> str:
        """Add a token and return its text, certain or not; nothing after a stop string.

        token: vocabulary id
        seen: in a decomposed response, the bytes that the reader sees of the token; None: its own
            text
        Raises UsageError for a token outside the vocabulary.
        """
        if self.stopped:
            return ""
        text = self._decoder.push(token) if seen is None else self._decoder.push_bytes(seen)
        self._add(text)
        return text

    def finish(self) -> None:
        """End the text: held-back text becomes certain, except an incomplete character."""
        if not self.stopped:
            self._show(self._stopper.rest())

    def take(self) -> str:
        """Return the text that has become certain since the last call."""
        text, self._ready = self._ready, ""
        return text

    def is_certain(self, start: int, text: str) -> bool:
        """Return whether a token's text at position `start` stays whole."""
        return start + len(text) <= self.certain

    def cut(self, start: int, text: str) -> str | None:
        """Return the remaining part of a token's text at position `start` of a text that has ended.

        None for a token that begins behind the end.
        """
        return text[: self.certain - start] if start < self.certain else None

    def _add(self, text: str) -> None:
        self.produced += len(text)
        safe, self.stopped = self._stopper.push(text)
        self._show(safe)

    def _show(self, text: str) -> None:
        self._ready += text
        self.certain += len(text)


class StopText:
    """Searches stop strings in a text that arrives in pieces; holds back partial matches.

    thought: the marks around reasoning, in which a text may begin and where no stop string counts;
        the first is "" if the text begins within it, and there are none if it never does
    found: the stop string that has occurred, "" before.
    """

    def __init__(self, stops: Sequence[str], thought: Sequence[str] = ()) -> None:
        self.found = ""
        self._stops = [s for s in stops if s]
        self._held = ""
        self._opening, self._closing = thought or ("", "")

    def push(self, piece: str) -> tuple[str, bool]:
        """Add a piece; return text that is safe to show now, and whether a stop string has
        occurred.
        """
        if not self._stops:
            return piece, False
        text, start = self._held + piece, 0
        if self._closing and self._opening:
            begun = text.lstrip()
            if len(begun) < len(self._opening) and self._opening.startswith(begun):
                self._held = text
                return "", False
            self._closing *= begun.startswith(self._opening)
            self._opening = ""
        if self._closing:
            start = text.find(self._closing) + len(self._closing)
            if start < len(self._closing):
                keep = partial(text, self._closing)
                self._held = text[len(text) - keep :]
                return text[: len(text) - keep], False
            self._closing = ""
        found = [(at, s) for s in self._stops if (at := text.find(s, start)) >= 0]
        if found:
            at, self.found = min(found)
            self._held = ""
            return text[:at], True
        keep = max(partial(text[start:], s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """Return the text that was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def partial(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1)
                 if text.endswith(mark[:n])), 0)
