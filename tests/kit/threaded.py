"""Responses with threads on the simulated pipeline, and the same computed without a pipeline.

The 'model' of a row is a hash of everything that it can see, tokens with their positions, so a cell
that is missing, doubled, or visible to the wrong thread changes the text. `reference` decodes the
threads of a program one after the other and recomputes from scratch what every token sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeinfer.core.types import Choice
from pipeinfer.strategies.decomposers.base import (
    MAIN,
    Close,
    CutThread,
    Feed,
    Fork,
    Halt,
    Join,
    Skip,
    TokenVocabulary,
)
from tests.kit.simulated import Cell, Pipeline

EOS = 0


def mix(pairs, pos, thread, tokens, weights=None):
    """The 'model': a token after seeing `pairs` of (position, token). weights: by token."""
    value = 17
    for at, token in sorted(pairs):
        value = (value * 1000003 + at * 131 + token + 1) & 0xFFFFFFFF
        value ^= value >> 13
    value = (value * 2654435761 >> 7) & 0xFFFFFF
    if weights is None:
        return tokens[value % len(tokens)]
    total = sum(weights)
    at = value % total
    for token, weight in zip(tokens, weights, strict=True):
        if at < weight:
            return token
        at -= weight
    raise AssertionError


@dataclass
class Words:
    """A vocabulary: texts and how often the model wants each; number 0 ends the text."""

    texts: list[bytes]
    weights: list[int]

    def piece(self, token):
        return self.texts[token]

    def encode(self, text):
        raw, tokens = text.encode(), []
        while raw:
            fits = [t for t, piece in enumerate(self.texts) if piece and raw.startswith(piece)]
            token = max(fits, key=lambda t: len(self.texts[t]), default=None)
            tokens.append(1 if token is None else token)  # what it cannot write
            raw = raw[1 if token is None else len(self.texts[token]):]
        return tokens

    def vocabulary(self):
        return TokenVocabulary(self.piece, self.encode)

    def choose(self, pairs, last, pos, bans):
        """The model's token for a row that sees `pairs`."""
        banned = {t for after, at, t in bans if after in (-1, last) and at in (-1, pos)}
        weights = [0 if t in banned else w for t, w in enumerate(self.weights)]
        return mix(pairs, pos, 0, range(len(weights)), weights)


class ThreadedPipeline(Pipeline):
    """Rows see cells by id and position; each choice is the hash of what it sees."""

    def __init__(self, limits, words, **options):
        super().__init__(limits, n_vocab=len(words.texts), **options)
        self.words = words
        self.params = {}
        self.emitted = []

    def feed(self, event):
        if self.scheduler.most_cells is None:
            self.scheduler.most_cells = 0
        before = len(self.log)
        super().feed(event)
        for item in self.log[before:]:
            match type(item).__name__:
                case "LaneOpen":
                    self.params[item.lane] = item.params
                case "Emit":
                    self.emitted.append(item)

    def _evaluate(self, stage, item):
        rows, out = item.rows, []
        for token, pos, ids in zip(rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids,
                                   strict=True):
            stage.kv.cells.append(Cell(pos, set(ids), token))
        for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
            if rows.outputs[i]:
                seen = [(c.pos, c.token) for c in stage.kv.view(ids[0], pos)]
                bans = self.params[item.lanes[i]].bans
                out.append(Choice(self.words.choose(seen, int(rows.tokens[i]), pos, bans)))
        return out

    @property
    def text(self):
        return b"".join(emit.text for emit in self.emitted)


@dataclass
class Graph:
    """Every row of a response: token, position, and which rows it saw when it was evaluated."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    def add(self, token, pos, others):
        self.tokens.append(token)
        self.positions.append(pos)
        self.seen.append([*others, len(self.tokens) - 1])
        return len(self.tokens) - 1

    def pairs(self, row):
        return [(self.positions[c], self.tokens[c]) for c in self.seen[row]]


@dataclass
class _Thread:
    tokens: list[int]  # its path
    cells: list[int]  # the rows of those that are evaluated
    bans: tuple
    extra: list[int] = field(default_factory=list)  # rows that were joined
    base: int = 0
    chosen: list[int] = field(default_factory=list)
    jumps: list[tuple[int, int]] = field(default_factory=list)
    waiting: bool = False
    over: bool = False

    def position(self, index):
        return index + next((s for at, s in reversed(self.jumps) if at <= index), 0)

    def evaluate(self, graph):
        while len(self.cells) < len(self.tokens):
            index = len(self.cells)
            self.cells.append(graph.add(self.tokens[index], self.position(index),
                                        [*self.cells, *self.extra]))


def reference(words, prompt, decomposer, most, n_ctx, choose=None):
    """Every thread's chosen tokens, the text, and the graph: one thread after the other, and each
    token from what its row saw. choose(graph, row, thread, bans): the model, by default a hash."""
    graph = Graph()

    def by_hash(graph, row, thread, bans):
        return words.choose(graph.pairs(row), graph.tokens[row], graph.positions[row], bans)

    choose = choose or by_hash
    threads = {MAIN: _Thread(list(prompt), [], decomposer.bans)}
    pieces = []

    def execute(actions):
        for action in actions:
            thread = threads.get(action.thread)
            match action:
                case Fork(k, parent, keep, tokens, bans):
                    base = threads[parent]
                    if keep:
                        base.evaluate(graph)
                    threads[k] = _Thread(
                        [*base.tokens[:keep], *tokens], base.cells[:keep], bans,
                        list(base.extra) if keep else [], keep,
                        jumps=[jump for jump in base.jumps if jump[0] < keep])
                case Feed(_, tokens, skip):
                    at = len(thread.cells)
                    if skip:
                        thread.jumps.append((at, thread.position(at) - at + skip))
                    thread.tokens += tokens
                    thread.waiting = False
                case Skip(_, count):
                    at = len(thread.tokens)
                    thread.jumps.append((at, thread.position(at) - at + count))
                case Halt():
                    thread.waiting = True
                case CutThread(_, keep):
                    del thread.tokens[keep:], thread.cells[keep:]
                    thread.jumps = [jump for jump in thread.jumps if jump[0] < keep]
                    thread.waiting = True
                case Join(_, others):
                    for other in others:
                        thread.extra += threads[other].cells[threads[other].base :]
                case Close(k, evaluate):
                    thread.over = True
                    if evaluate:
                        thread.evaluate(graph)
                        execute(decomposer.settled(k))

    while not decomposer.complete and len(pieces) < most:
        # the newest runnable thread first, so that none runs beside another
        k = max(t for t, thread in threads.items() if not (thread.over or thread.waiting))
        thread = threads[k]
        thread.evaluate(graph)
        token = choose(graph, thread.cells[-1], k, thread.bans)
        if token == EOS:
            thread.over = True
            execute(decomposer.ended(k))
        else:
            thread.tokens.append(token)
            thread.chosen.append(token)
            execute(decomposer.accepted(k, token))
            if not thread.over and (len(thread.chosen) >= most
                                    or thread.position(len(thread.tokens)) >= n_ctx):
                thread.over = True
                execute(decomposer.ended(k))
        pieces += decomposer.take()
    chosen = {k: thread.chosen for k, thread in threads.items()}
    return chosen, b"".join(piece.text for piece in pieces[:most]), graph
