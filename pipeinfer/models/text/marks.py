"""Protection of chat prompts: texts of clients cannot become control tokens of a template.

A chat template mixes its own marks, such as `<|im_end|>`, with texts of clients, who may write the
same. `MarkGuard` breaks each mark in such a text with a secret random number, and also parts at its
ends that could become half of a mark. The template then renders texts that are otherwise unchanged.
The marks that are whole in its result are its own. Independent of templates, and of vocabularies
beyond these texts.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

_PRINTED = frozenset({"content", "name", "reasoning_content", "thinking", "tool_call_id"})


class Marks:
    """The control tokens of a vocabulary as they are written."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """tokens: ids by text. A text of one character cannot be broken, so it is left out."""
        self.tokens = {text: token for text, token in tokens.items() if len(text) > 1}
        self._longest = max(map(len, self.tokens), default=0)

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """The expression that finds the longest mark at a place, in a time independent of their
        number.
        """
        return re.compile(_pattern(list(self.tokens))) if self.tokens else None

    @cached_property
    def _starts(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self.tokens for n in range(1, len(text)))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(text[n:] for text in self.tokens for n in range(1, len(text)))

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self.tokens)

    def first(self, text: str) -> str:
        """Return the first mark that is written out in a text; empty for none."""
        found = self.pattern.search(text) if self.pattern else None
        return found[0] if found else ""

    def exceed(self, text: str, count: int) -> bool:
        """Return whether more than `count` marks are written out in a text."""
        found = self.pattern.finditer(text) if self.pattern else iter(())
        return next(itertools.islice(found, count, None), None) is not None

    def split(self, text: str) -> list[str | int]:
        """Return the text cut into marks, as their ids, and the texts between them."""
        parts: list[str | int] = []
        at = 0
        for found in self.pattern.finditer(text) if self.pattern else ():
            parts += [text[at : found.start()], self.tokens[found[0]]]
            at = found.end()
        return [part for part in (*parts, text[at:]) if part != ""]

    def ends_in_start(self, text: str) -> bool:
        """Return whether a text's end may be the beginning of a mark."""
        return any(text[-n:] in self._starts for n in range(1, min(len(text), self._longest) + 1))

    def begins_with_end(self, text: str) -> bool:
        """Return whether a text's beginning may be the end of a mark."""
        return any(text[:n] in self._ends for n in range(1, min(len(text), self._longest) + 1))

    def has_inside(self, text: str) -> bool:
        """Return whether a text is a part of a mark."""
        return bool(text) and len(text) < self._longest and text in self._joined


class MarkGuard:
    """Breaks marks in texts of clients. seam: the text inserted at each break."""

    def __init__(self, marks: Marks, seam: str = "") -> None:
        """seam: that of a text into which more is inserted; empty: a new one."""
        self._marks = marks
        # Digits survive everything that templates do to a text: case, JSON, Python's notation.
        self.seam = seam or str(10**30 + secrets.randbelow(10**30))

    def messages(self, messages: Any) -> list[dict[str, Any]]:
        """Return a conversation without a mark in it; roles stay, as templates compare them."""
        return [{key: self._edged(value) if key in _PRINTED and isinstance(value, str)
                 else self._broken(value) if isinstance(value, str) else self.value(value)
                 for key, value in message.items()} for message in messages]

    def value(self, value: Any) -> Any:
        """Return a JSON value without a mark in it."""
        if isinstance(value, str):
            return self._edged(value, inner=False)
        if isinstance(value, Mapping):
            return {self._broken(key): self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def _broken(self, text: str) -> str:
        pattern = self._marks.pattern
        if pattern is None or pattern.search(text) is None:
            return text
        return re.sub(f"(?={pattern.pattern}).", lambda found: found[0] + self.seam, text,
                      flags=re.DOTALL)

    def _edged(self, text: str, inner: bool = True) -> str:
        """The text with its marks broken, and separated from the text that a template puts around
        it.

        inner: separate it also where all of it could be the middle of a mark. Seams are next to
            characters that are no space, so that trimming has the same effect as before.
        """
        marks, core = self._marks, text.strip()
        if not core:
            return text
        before = marks.begins_with_end(core) or (inner and marks.has_inside(core))
        after = marks.ends_in_start(core)
        at = text.index(core)
        lead, rest = text[:at], text[at + len(core) :]
        core = self._broken(core)
        return f"{lead}{self.seam * before}{core}{self.seam * after}{rest}"


def _pattern(texts: list[str]) -> str:
    """A regular expression of one of the texts, the longest; they share their beginnings."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        run += re.escape(char)
    branches = [re.escape(char) + _branches(below) for char, below in node.items() if char]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)}){'?' * ('' in node)}"
