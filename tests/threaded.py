"""Responses with threads on the simulated pipeline, and the same computed without a pipeline.

The 'model' of a row is a hash of everything that it can see, tokens with their positions, so a cell
that is missing, doubled, or visible to the wrong thread changes the text. `reference` decodes the
threads of a program one after the other and recomputes from scratch what every token sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeinfer.core import ALL_SEQS, Choice, SeqCopy, SeqJoin, SeqKeep, SeqRemove
from pipeinfer.decomposers.base import (
    MAIN,
    Close,
    Cut,
    Feed,
    Fork,
    Hold,
    Join,
    Skip,
    Vocabulary,
)
from tests import simulated
from tests.simulated import Cell, Pipeline, Stage

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
            tokens.append(1 if token is None else token)  # what it can not write
            raw = raw[1 if token is None else len(self.texts[token]):]
        return tokens

    def vocabulary(self):
        return Vocabulary(self.piece, self.encode)

    def choose(self, pairs, last, pos, bans):
        """The model's token for a row that sees `pairs`."""
        banned = {t for after, at, t in bans if after in (-1, last) and at in (-1, pos)}
        weights = [0 if t in banned else w for t, w in enumerate(self.weights)]
        return mix(pairs, pos, 0, range(len(weights)), weights)


class JoinedCell(Cell):
    joined = False


@dataclass
class KvModel(simulated.KvModel):
    """Cells that may be joined."""

    def _in(self, cell, p0, p1):
        return p0 == 0 if getattr(cell, "joined", False) else p0 <= cell.pos < p1

    def apply(self, ops):
        for op in ops:
            match op:
                case SeqRemove(seq_id, p0, p1):
                    for cell in self.cells:
                        if self._in(cell, p0, p1):
                            if seq_id == ALL_SEQS:
                                cell.ids.clear()
                            cell.ids.discard(seq_id)
                case SeqCopy(src, dst, p0, p1):
                    for cell in self.cells:
                        if src in cell.ids and self._in(cell, p0, p1):
                            cell.ids.add(dst)
                case SeqJoin(src, dst):
                    for cell in self.cells:
                        if src in cell.ids and dst not in cell.ids:
                            cell.ids.add(dst)
                            cell.joined = True
                case SeqKeep(seq_id):
                    for cell in self.cells:
                        cell.ids &= {seq_id}
            self.cells = [c for c in self.cells if c.ids]

    def view(self, seq_id, pos):
        return [c for c in self.cells if seq_id in c.ids
                and (c.pos <= pos or getattr(c, "joined", False))]


class ThreadedPipeline(Pipeline):
    """Rows see cells by id and position; each choice is the hash of what it sees."""

    def __init__(self, limits, words, **options):
        super().__init__(limits, n_vocab=len(words.texts), **options)
        self.words = words
        self.stages = [Stage(kv=KvModel()) for _ in self.stages]
        self.params = {}
        self.emitted = []

    def feed(self, event):
        before = len(self.log)
        super().feed(event)
        for item in self.log[before:]:
            match type(item).__name__:
                case "OpenLane":
                    self.params[item.lane] = item.params
                case "Emit":
                    self.emitted.append(item)

    def _evaluate(self, stage, item):
        rows, out = item.rows, []
        for token, pos, ids in zip(rows.tokens.tolist(), rows.positions.tolist(), rows.seq_ids,
                                   strict=True):
            cell = JoinedCell(pos, set(ids), token)
            stage.kv.cells.append(cell)
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
class _Thread:
    tokens: list[int]  # its path
    at: list[int]  # their positions
    bans: tuple
    extra: list = field(default_factory=list)  # joined (position, token) pairs
    chosen: list[int] = field(default_factory=list)
    shift: int = 0
    waiting: bool = False
    over: bool = False


def reference(words, prompt, decomposer, most, n_ctx):
    """Every thread's chosen tokens, and the text: one thread after the other, no cache."""
    threads = {MAIN: _Thread(list(prompt), list(range(len(prompt))), decomposer.bans)}
    pieces = []

    def execute(actions):
        for action in actions:
            thread = threads.get(action.thread)
            match action:
                case Fork(k, parent, keep, tokens, bans):
                    base = threads[parent]
                    shift = (base.at[keep - 1] - (keep - 1)) if keep else 0
                    path = [*base.tokens[:keep], *tokens]
                    at = [*base.at[:keep], *(keep + i + shift for i in range(len(tokens)))]
                    threads[k] = _Thread(path, at, bans, list(base.extra) if keep else [],
                                         shift=shift)
                case Feed(_, tokens):
                    for token in tokens:
                        thread.tokens.append(token)
                        thread.at.append(len(thread.tokens) - 1 + thread.shift)
                    thread.waiting = False
                case Skip(_, count):
                    thread.shift += count
                case Hold():
                    thread.waiting = True
                case Cut(_, keep):
                    del thread.tokens[keep:], thread.at[keep:]
                    thread.waiting = True
                case Join(_, others):
                    for other in others:
                        start = next(i for i, (a, b) in enumerate(
                            zip(threads[other].tokens, threads[other].at, strict=True))
                            if i >= len(thread.tokens) or (a, b) != (thread.tokens[i],
                                                                    thread.at[i]))
                        thread.extra += list(zip(threads[other].at, threads[other].tokens,
                                                 strict=True))[start:]
                case Close(k, evaluate):
                    thread.over = True
                    if evaluate:
                        execute(decomposer.settled(k))

    while not decomposer.complete and len(pieces) < most:
        # the newest runnable thread first, so that none runs beside another
        k = max(t for t, thread in threads.items() if not (thread.over or thread.waiting))
        thread = threads[k]
        seen = [*zip(thread.at, thread.tokens, strict=True), *thread.extra]
        token = words.choose(seen, thread.tokens[-1], thread.at[-1], thread.bans)
        if token == EOS:
            thread.over = True
            execute(decomposer.ended(k))
        else:
            thread.tokens.append(token)
            thread.at.append(len(thread.tokens) - 1 + thread.shift)
            thread.chosen.append(token)
            execute(decomposer.accepted(k, token))
            if not thread.over and (len(thread.chosen) >= most
                                    or len(thread.tokens) + thread.shift >= n_ctx):
                thread.over = True
                execute(decomposer.ended(k))
        pieces += decomposer.take()
    chosen = {k: thread.chosen for k, thread in threads.items()}
    return chosen, b"".join(piece.text for piece in pieces[:most])
