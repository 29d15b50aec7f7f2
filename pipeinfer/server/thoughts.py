"""Separates what a model thinks from what it answers, by the marks `<think>` and `</think>`.

Uses text, no HTTP and no engine.
"""

from __future__ import annotations

from pipeinfer.server.tools import partial

OPEN, CLOSE = "<think>", "</think>"


class ThoughtParser:
    """Separates thoughts at the beginning of a text that arrives in pieces.

    inside: whether the prompt has the opening mark already.
    """

    def __init__(self, inside: bool) -> None:
        self._inside, self._over = inside, False
        self._held = ""
        self._begun = False  # whether something of the present part has been returned

    def push(self, text: str, ended: bool = False) -> tuple[str, str]:
        """Return the thoughts and the answer's text that are certain; all if the text has
        ended."""
        self._held += text
        thoughts = ""
        if not self._inside and not self._over and not self._open(ended):
            return "", ""
        if self._inside:
            end = self._held.find(CLOSE)
            keep = 0 if ended else partial(self._held, CLOSE)
            cut = end if end >= 0 else len(self._held) - keep
            thoughts, self._held = self._part(self._held[:cut]), self._held[cut:]
            if end >= 0:
                self._held = self._held[len(CLOSE):]
                self._inside, self._over, self._begun = False, True, False
        if not self._over:
            return thoughts, ""
        answer, self._held = self._part(self._held), ""
        return thoughts, answer

    def _open(self, ended: bool) -> bool:
        """Whether it is certain that the text begins with thoughts, or without."""
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._inside, self._held = True, begun[len(OPEN):]
        elif ended or not OPEN.startswith(begun):
            self._over = self._begun = True
        return self._inside or self._over

    def _part(self, text: str) -> str:
        """Return a part's next text, without line breaks before its first character."""
        text = text if self._begun else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        return text
