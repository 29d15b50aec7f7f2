"""Masks: the tokens that a compiled grammar allows after a path. Independent of threads and
    processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeinfer.core.types import BoolArray, IntArray
from pipeinfer.errors import UsageError

if TYPE_CHECKING:
    from pipeinfer.models.text.vocabulary import Vocabulary

_MASKS = 16  #: masks that a constraint stores


class Constraint:
    """The tokens that one grammar allows after a path; used by one thread.

    A matcher moves from path to path: back to their common beginning, then forward.
    """

    def __init__(self, vocabulary: Vocabulary, compiled: str) -> None:
        self.failure = ""  #: why a mask allows nothing: the parser's work exceeded a limit
        self._vocabulary, self._compiled = vocabulary, compiled
        self._matcher: Any = None
        self._path: IntArray = np.zeros(0, np.int32)
        self._masks: OrderedDict[bytes, BoolArray | None] = OrderedDict()
        self._ends = np.zeros(len(vocabulary), np.bool_)
        self._ends[list(vocabulary.end_ids)] = True
        self._ends.setflags(write=False)

    def allowed(self, output_tokens: Sequence[int] | IntArray) -> BoolArray | None:
        """Return which tokens may follow a path: bool[len(vocabulary)], read-only, or None.

        output_tokens: the path, token ids
        None: the path itself is not in the grammar, so nothing that follows it will be accepted.
            When the grammar is complete, only end-of-generation tokens are allowed. All False: the
            parser exceeded a limit, see `failure`.
        """
        path: IntArray = np.asarray(output_tokens, np.int32)
        key = path.tobytes()
        if key in self._masks:
            self._masks.move_to_end(key)
            return self._masks[key]
        mask = self._after(path)
        self._masks[key] = mask
        if len(self._masks) > _MASKS:
            self._masks.popitem(last=False)
        return mask

    def _after(self, path: IntArray) -> BoolArray | None:
        inside = (path >= 0) & (path < len(self._ends))
        if not inside.all():
            return None
        if (ends := np.flatnonzero(self._ends[path])).size:
            before = self.allowed(path[: int(ends[0])])
            if before is None or not before.any():
                return before
            return self._ends if before[path[ends[0]]] else None
        for fresh in (False, True):  # a new matcher may succeed where a used one fails
            if fresh or self._matcher is None:
                self._matcher = self._vocabulary.matcher(self._compiled)
                self._path = path[:0]
            try:
                mask, ok = self._look(path)
                if ok:
                    return mask
                self.failure = str(self._matcher.get_error())
            except Exception as error:
                self.failure = str(error)
            except BaseException as error:  # how a panic of the Rust side arrives
                if type(error).__name__ != "PanicException":
                    raise
                self.failure = str(error)
            self._matcher = None
        return np.zeros_like(self._ends)

    def _look(self, path: IntArray) -> tuple[BoolArray | None, bool]:
        """The mask after a path, and False when the matcher is in its error state."""
        matcher, here = self._matcher, self._path
        shorter = min(len(here), len(path))
        differ = np.flatnonzero(here[:shorter] != path[:shorter])
        common = int(differ[0]) if differ.size else shorter
        if common < len(here):
            matcher.rollback(len(here) - common)
        wanted = path[common:].tolist()
        taken = matcher.try_consume_tokens(wanted) if wanted else 0
        self._path = path[: common + taken].copy()
        if matcher.is_error():
            return None, False
        if taken < len(wanted):
            return None, True
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return None, False
        mask = np.unpackbits(bits, count=len(self._ends), bitorder="little").astype(np.bool_)
        mask.setflags(write=False)
        return mask, True


class Constraints:
    """Constraints of several lanes, each made at its first use; used by one thread.

    vocabulary: for the masks; None where the rank received none
    keep: how many are stored, the least recently used is dropped first
    """

    def __init__(self, vocabulary: Vocabulary | None, keep: int = 32) -> None:
        self._vocabulary, self._keep = vocabulary, keep
        if vocabulary is not None:
            vocabulary.prepare()
        self._made: OrderedDict[tuple[Hashable, str], Constraint] = OrderedDict()

    def of(self, lane: Hashable, compiled: str) -> Constraint:
        """Return the constraint of a lane. Raises UsageError without a vocabulary."""
        if self._vocabulary is None:
            raise UsageError("a grammar arrived at a rank that has not received the vocabulary")
        key = (lane, compiled)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = Constraint(self._vocabulary, compiled)
            if len(self._made) > self._keep:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return found

    def forget(self, lane: Hashable) -> None:
        """Drop the constraints of a lane that has ended."""
        for key in [key for key in self._made if key[0] == lane]:
            del self._made[key]
