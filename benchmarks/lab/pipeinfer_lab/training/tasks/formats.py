"""Training rows: ids, positions, who sees whom, targets.

One row is flat. Threads that decode side by side lie one behind the other in it and are kept apart
by the mask, so a prompt is evaluated once for all of them.

Does not know: models, batches, how a server renders the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeinfer_lab.training.pasta import pasta
from pipeinfer_lab.training.pasta.pasta import IGNORE


@dataclass(frozen=True, slots=True)
class Example:
    """One row: ``tokens``, ``positions``, ``targets`` [n] int64 and ``visible`` [n, n] bool."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    targets: NDArray[np.int64]
    visible: NDArray[np.bool_]

    @property
    def context(self) -> int:
        """The least context that it fits into: its tokens, and positions, which may skip some."""
        return max(len(self.tokens), int(self.positions.max()) + 1)


@dataclass(slots=True)
class Tree:
    """Collects segments; each sees the whole of some earlier ones and its own past."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)

    def add(
        self, ids: Sequence[int], start: int, sees: Sequence[int], targets: Sequence[int]
    ) -> int:
        """Append a segment at positions from ``start``; returns its number."""
        if len(ids) != len(targets):
            raise ValueError(f"{len(ids)} tokens but {len(targets)} targets")
        first = len(self.tokens)
        self.tokens += ids
        self.positions += range(start, start + len(ids))
        self.targets += targets
        self.spans.append((first, len(self.tokens), tuple(sees)))
        return len(self.spans) - 1

    def example(self) -> Example:
        """The finished training row, with its visibility mask."""
        length = len(self.tokens)
        visible = np.zeros((length, length), dtype=bool)
        for first, last, sees in self.spans:
            visible[first:last, first:last] = np.tri(last - first, dtype=bool)
            for other in sees:
                visible[first:last, self.spans[other][0] : self.spans[other][1]] = True
        return Example(
            np.array(self.tokens, dtype=np.int64),
            np.array(self.positions, dtype=np.int64),
            np.array(self.targets, dtype=np.int64),
            visible,
        )


def nothing(ids: Sequence[int]) -> list[int]:
    """Targets of a segment that is only read."""
    return [IGNORE] * len(ids)


def sequence(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    """A plain exchange: the answer is learnt, the prompt is read."""
    tree = Tree()
    tree.add([*prompt, *answer], 0, (), [*nothing(prompt[1:]), *answer, IGNORE])
    return tree.example()


def pasta_example(flat: pasta.Flat) -> Example:
    """The layout of paper section 4 for one flat response."""
    return Example(
        np.array(flat.tokens, dtype=np.int64),
        pasta.positions(flat),
        pasta.targets(flat),
        pasta.visible(flat),
    )
