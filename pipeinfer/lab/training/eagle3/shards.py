"""Answers with the target's hidden rows on disk, in shards, so that an interrupted run goes on.

A shard is NNNNN.npz, as `Lessons.save` writes it, and NNNNN.rows.npy, float16[n, taps * width].
What collects them may be replaced: `fill` takes any iterator of finished texts.

Independent of what computes the texts and what learns from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeinfer.lab.training.draft.answers import Lesson
from pipeinfer.lab.training.draft.own_draft import joined
from pipeinfer.lab.training.draft.teach import Lessons

SHARD_TOKENS = 20_000  #: at least; about a minute and 70 MB for a target of 576 columns


@dataclass(frozen=True, slots=True)
class TappedLessons:
    """All shards as one. rows: those of each shard, mapped; starts: the first position of each."""

    lessons: Lessons
    rows: tuple[npt.NDArray[np.float16], ...]
    starts: tuple[int, ...]

    def rows_of(self, start: int, stop: int) -> npt.NDArray[np.float16]:
        """Return the rows of one text."""
        shard = int(np.searchsorted(self.starts, start, "right")) - 1
        return self.rows[shard][start - self.starts[shard] : stop - self.starts[shard]]


def shards_of(folder: Path) -> list[Path]:
    """Return the finished shards, in order."""
    return sorted(path for path in folder.glob("*.npz") if path.stem.isdigit())


def tokens_in(folder: Path) -> int:
    """Return the number of tokens in the finished shards."""
    return sum(np.load(path.with_suffix(".rows.npy"), mmap_mode="r", allow_pickle=False).shape[0]
               for path in shards_of(folder))


def fill(folder: Path, texts: Iterator[Lesson], skip: tuple[int, ...],
         report: Callable[[str], None]) -> None:
    """Write the texts as further shards; skip: as in `Lessons`."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Lesson] = []
    for text in texts:
        found.append(text)
        if sum(len(one.tokens) for one in found) >= SHARD_TOKENS:
            _write(folder, found, skip)
            report(f"answers: {tokens_in(folder)} tokens")
            found = []
    if found:
        _write(folder, found, skip)


def _write(folder: Path, found: list[Lesson], skip: tuple[int, ...]) -> None:
    last = shards_of(folder)
    path = folder / f"{int(last[-1].stem) + 1 if last else 0:05d}.npz"
    np.save(path.with_suffix(".rows.npy"), np.concatenate([one.rows for one in found]))
    joined(found, skip).save(path)  # last: a shard counts once this file is there


def load_shards(folder: Path) -> TappedLessons:
    """Return all finished shards."""
    paths = shards_of(folder)
    each = [Lessons.load(path) for path in paths]
    starts = np.cumsum([0, *(len(one.tokens) for one in each)])
    return TappedLessons(
        Lessons(np.concatenate([one.tokens for one in each]),
                np.concatenate([one.ends + start
                                for one, start in zip(each, starts, strict=False)]),
                np.concatenate([one.likely for one in each]),
                np.concatenate([one.shares for one in each]), each[0].skip),
        tuple(np.load(path.with_suffix(".rows.npy"), mmap_mode="r", allow_pickle=False)
              for path in paths),
        tuple(starts[:-1].tolist()))
