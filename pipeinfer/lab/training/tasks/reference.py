"""Reference decoding: programs say which rows to evaluate, the driver batches many of them.

A program is a generator: it yields rows and is sent the token chosen after each. A row names the
cells that it sees by a view, a boolean vector over the program's cells, and the views that its own
cell joins. Nothing is ever moved or removed, so a result depends on masks and positions alone;
the training evaluation and the preference stage use it, serving has its own interpreter.

Does not know: what a format means (see :mod:`pipeinfer.lab.training.programs`), files.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pipeinfer.lab.training.pair.model import Llama
from pipeinfer.lab.training.pair.tokenizer import PAD_ID

#: Cells per program, one of them for padding.
CELLS = 1024
View: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Row:
    """One token to evaluate: it sees ``view`` and itself, and its cell joins ``store``."""

    token: int
    position: int
    view: View
    store: tuple[View, ...]
    ban: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program wrote: ids without the prompt, its text, and the steps it took (the
    evaluation of the prompt is the first)."""

    tokens: tuple[int, ...]
    text: str
    steps: int


Program: TypeAlias = Generator[list[Row], list[int], Outcome]
Choose: TypeAlias = Callable[[Tensor], Tensor]


def view() -> View:
    """A view that sees nothing yet."""
    return np.zeros(CELLS, dtype=bool)


def greedy(logits: Tensor) -> Tensor:
    """The arg-max of every row [rows, vocabulary]."""
    return logits.argmax(-1)


def sampler(seed: int) -> Choose:
    """Sampling at temperature 1 from one seeded generator."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    return choose


class Cells:
    """Keys and values of a batch of programs; ``forward`` appends rows."""

    def __init__(self, model: Llama, count: int) -> None:
        config = model.config
        shape = (config.n_layer, count, config.n_head, CELLS, config.head_size)
        self.model = model
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.used = [0] * count

    def keep(self, which: Sequence[int]) -> None:
        """Go on with some of the programs only."""
        self.keys, self.values = self.keys[:, list(which)], self.values[:, list(which)]
        self.used = [self.used[i] for i in which]

    def forward(self, batch: Sequence[Sequence[Row]]) -> Tensor:
        """Logits [programs, most rows, vocabulary] after the rows of each program."""
        most = max(1, *(len(rows) for rows in batch))
        shape = (len(batch), most)
        tokens, positions = np.full(shape, PAD_ID), np.zeros(shape, dtype=np.int64)
        cells = np.full(shape, CELLS - 1)
        visible = np.zeros((*shape, CELLS), dtype=bool)
        visible[:, :, 0] = True
        for number, rows in enumerate(batch):
            for at, row in enumerate(rows):
                cell = self.used[number]
                if cell >= CELLS - 1:
                    raise ValueError(f"a program needs more than {CELLS - 1} cells")
                tokens[number, at], positions[number, at] = row.token, row.position
                cells[number, at] = cell
                visible[number, at] = row.view
                visible[number, at, cell] = True
                for store in row.store:
                    store[cell] = True
                self.used[number] += 1
        return self._evaluate(*map(torch.from_numpy, (tokens, positions, cells, visible)))

    @torch.no_grad()
    def _evaluate(
        self, tokens: Tensor, positions: Tensor, cells: Tensor, visible: Tensor
    ) -> Tensor:
        model, top = self.model, max(self.used)
        cos, sin = model.cos[positions], model.sin[positions]
        mask = visible[:, None, :, :top]
        rows = torch.arange(len(tokens))[:, None]
        x = model.token_embd(tokens)
        for layer, block in enumerate(model.blk):
            q, k, v = block.project(x, cos, sin)
            # Indexing with two tensors around a slice puts them first: [programs, rows, heads, ..].
            self.keys[layer][rows, :, cells] = k.transpose(1, 2)
            self.values[layer][rows, :, cells] = v.transpose(1, 2)
            keys, values = self.keys[layer][:, :, :top], self.values[layer][:, :, :top]
            x = block.finish(x, F.scaled_dot_product_attention(q, keys, values, mask))
        return model.logits(x)


def run(
    model: Llama, programs: Sequence[Program], choose: Choose = greedy, *, group: int = 64
) -> list[Outcome]:
    """Run programs to their ends, ``group`` of them side by side; outcomes in order."""
    outcomes: list[Outcome] = []
    for start in range(0, len(programs), group):
        outcomes += _run_group(model, programs[start : start + group], choose)
    return outcomes


def _run_group(model: Llama, programs: Sequence[Program], choose: Choose) -> list[Outcome]:
    done: dict[int, Outcome] = {}
    live = list(range(len(programs)))
    cells = Cells(model, len(live))
    rows = [next(program) for program in programs]
    while live:
        logits = cells.forward(rows)
        for number, asked in enumerate(rows):
            for at, row in enumerate(asked):
                if row.ban:
                    logits[number, at, list(row.ban)] = -torch.inf
        picked = [(number, at) for number, asked in enumerate(rows) for at in range(len(asked))]
        where = torch.tensor(picked)
        chosen = choose(logits[where[:, 0], where[:, 1]]).tolist()
        replies: list[list[int]] = [[] for _ in rows]
        for (number, _), token in zip(picked, chosen, strict=True):
            replies[number].append(token)
        staying = []
        following = []
        for number, reply in enumerate(replies):
            try:
                following.append(programs[live[number]].send(reply))
                staying.append(number)
            except StopIteration as stop:
                done[live[number]] = stop.value
        if len(staying) < len(live):
            cells.keep(staying)
            live = [live[number] for number in staying]
        rows = following
    return [done[number] for number in range(len(programs))]
