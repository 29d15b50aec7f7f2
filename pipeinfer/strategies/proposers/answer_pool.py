"""The answer pool: earlier answers to the same client, from which prompt lookup may copy.

Requests of one kind (forms, reports, tests of functions) get answers that share much of their
wording, which no prompt contains. Uses tokens and lane numbers only; independent of requests and
clients.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeinfer.strategies.proposers.text_index import Match, TextIndex

MOST = 1 << 16  #: tokens of a pool, beyond which the older half of the answers is dropped


class AnswerPool:
    """The answers of one pool, unfinished ones included.

    most: tokens of the pool
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._size = most, 0
        self._index = TextIndex()

    def add(self, lane: int, token: int) -> None:
        """Append a token to the lane's answer."""
        if self._size >= self._most:
            self._halve()
        self._index.append(token, lane)
        self._size += 1

    def find(self, path: Sequence[int], lane: int) -> Match | None:
        """Return the places where another lane's answer continues the end of `path`; see
        `TextIndex.find`.
        """
        return self._index.find(path, without=lane)

    def _halve(self) -> None:
        texts, kept = list(self._index.tokens.items()), TextIndex()
        while texts and self._size > self._most // 2:
            self._size -= len(texts.pop(0)[1])
        for lane, tokens in texts:
            for token in tokens:
                kept.append(token, lane)
        self._index = kept
