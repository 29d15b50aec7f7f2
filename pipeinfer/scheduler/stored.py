"""Names of pieces of prompts on the stages' disks, and which of them are there.

Cells of a chunk depend on the tokens up to its end and on the arithmetic of the stages. So a name
is a digest of those, as a chain: `key(k) = H(key(k - 1), tokens of chunk k)`, begun with a root
that stands for the arithmetic and is keyed with a secret. The state behind a chunk has a name of
its own. What is there is a hint: files may vanish at any time, and a run tells what was read.

Rows of an answer have other bits than a prompt's with the same tokens, as they were computed in
short runs. So they have names of their own, for a replay of this answer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b

from msgspec import Struct

from pipeinfer.core.messages import KEY_BYTES

Layers = tuple[int, int]  #: `[start, stop)` of the whole model
_ENTRY = struct.Struct(f"<{KEY_BYTES}sII")
_STATE, _ANSWER = b"state", b"answer"
STATE_CHUNKS = 16  #: chunks after which a state is stored, besides those that the cache keeps


class Stored(Struct, eq=False):
    """What the disks of all stages hold.

    root: a digest of what cells depend on besides tokens
    ranges: whether chunks are stored; False: whole texts, with the state behind them
    names: of the pieces that all stages hold
    answers: whether those of answers are stored: not where they are complete only at once, as
        states are, and cells behind a window
    found, missed: pieces that were read, and those of which a stage had none
    """

    root: bytes
    ranges: bool
    names: set[bytes]
    answers: bool = True
    found: int = 0
    missed: int = 0

    def chain(self, prompt: Sequence[int], chunk: int, salt: bytes = b"") -> list[bytes]:
        """Return the names of a prompt's whole chunks. salt: of its request"""
        return _chain(self._begin(salt), prompt, chunk)

    def answer(self, names: Sequence[bytes], accepted: Sequence[int], n_prompt: int, chunk: int,
               salt: bytes = b"") -> list[bytes]:
        """Return the names of an answer's whole chunks. names: of its prompt. salt: of its
        request"""
        before = names[-1] if names else self._begin(salt)
        rest = array("i", accepted[len(names) * chunk : n_prompt]).tobytes()
        return _chain(blake2b(before + rest + _ANSWER).digest(), accepted[n_prompt:], chunk)

    def _begin(self, salt: bytes) -> bytes:
        return blake2b(self.root + salt).digest() if salt else self.root

    @staticmethod
    def state(name: bytes) -> bytes:
        """Return the name of the state behind a chunk."""
        return blake2b(name + _STATE, digest_size=KEY_BYTES).digest()

    def longest_state(self, names: Sequence[bytes]) -> int:
        """Return the most chunks of those named behind which everything is stored; 0 for none."""
        there = len(names)
        if self.ranges:
            there = next((i for i, name in enumerate(names) if name not in self.names), there)
        return next((i for i in range(there, 0, -1) if self.state(names[i - 1]) in self.names), 0)


def _chain(name: bytes, tokens: Sequence[int], chunk: int) -> list[bytes]:
    names = []
    for stop in range(chunk, len(tokens) + 1, chunk):
        own = array("i", tokens[stop - chunk : stop]).tobytes()
        name = blake2b(name + own, digest_size=KEY_BYTES).digest()
        names.append(name)
    return names


def entry(name: bytes, start: int, stop: int) -> bytes:
    """Return a file of a host's listing: the layers `[start, stop)` of the piece `name`."""
    return _ENTRY.pack(name, start, stop)


def held_by(listings: Collection[bytes], n_layers: int) -> set[bytes]:
    """Return the names of pieces of which the hosts together hold all layers: each fetches from the
    others what it lacks. listings: entries, one after the other."""
    ranges: dict[bytes, set[Layers]] = {}
    for one in listings:
        for name, start, stop in _ENTRY.iter_unpack(one[: len(one) // _ENTRY.size * _ENTRY.size]):
            ranges.setdefault(name, set()).add((start, stop))
    return {name for name, own in ranges.items() if cover(own, (0, n_layers)) is not None}


def cover(ranges: Collection[Layers], wanted: Layers) -> list[Layers] | None:
    """Return ranges that together hold all of `wanted`; None if they do not."""
    if wanted in ranges:
        return [wanted]
    at, found = wanted[0], []
    while at < wanted[1]:
        best = max((one for one in ranges if one[0] <= at < one[1]), key=lambda one: one[1],
                   default=None)
        if best is None:
            return None
        found.append(best)
        at = best[1]
    return found
