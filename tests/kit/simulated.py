"""A pipeline without a model, clock or transport, for tests of the scheduler.

Every stage keeps its own cells; a row's choice is a hash of the tokens that it can really see, so
a wrong sequence operation, a cell that a skipped run never wrote, or a doubled position changes
the output. `Pipeline` lets the test choose which thing happens next.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import FeedDraft, Proposal, StartDraft
from pipeinfer.core.messages import CacheOps, Cancel, Decode, LaneClose, LaneOpen
from pipeinfer.core.types import (
    ALL_SEQS,
    END,
    NO_TOKEN,
    Choice,
    Request,
    SeqCopy,
    SeqJoin,
    SeqKeep,
    SeqRemove,
)
from pipeinfer.scheduler.events import (
    AbortRequest,
    Drafted,
    Emit,
    Enqueue,
    Finish,
    Refuse,
    Restart,
    RunDone,
)
from pipeinfer.scheduler.scheduler import Scheduler

MASK = 1000  #: the first mask's token id, see `WithMasks`


def next_token(path: tuple[int, ...], n_vocab: int, salt: int = 0) -> int:
    """The 'model': a token after a path."""
    value = salt
    for token in path:
        value = (value * 1000003 + token + 1) & 0xFFFFFFFF
        value ^= value >> 13
    return (value * 2654435761 >> 7) % n_vocab


def mark(path: tuple[int, ...]) -> int:
    """A number for a path."""
    return next_token(path, 1 << 30, salt=3)


def plain(prompt: tuple[int, ...], count: int, n_vocab: int, eos: frozenset[int] = frozenset()
          ) -> list[int]:
    """Plain decoding."""
    path = list(prompt)
    while len(path) < len(prompt) + count:
        token = next_token(tuple(path), n_vocab)
        if token in eos:
            break
        path.append(token)
    return path[len(prompt):]


def cuts(request: Request, chunk: int) -> set[int]:
    """Where the prompt of a request is cut into runs: at multiples of a chunk, though not inside a
    picture whose rows see each other, and where pictures begin and end."""
    together = {place for one in request.media if not one.causal
                for place in range(one.start + 1, one.stop)}
    return {*range(0, len(request.prompt), chunk)} - together | {
        edge for one in request.media for edge in (one.start, one.stop)}


@dataclass(eq=False)
class Cell:
    pos: int
    ids: set[int]
    token: int
    made: tuple[int, int] = (0, 1)  # first position and rows of the run that computed it
    joined: bool = False  # it belongs to the start of its sequences, whatever its position

    def within(self, p0: int, p1: int) -> bool:
        """Whether an operation over these positions reaches it."""
        return p0 == 0 if self.joined else p0 <= self.pos < p1


@dataclass
class KvModel:
    """Cells by the rules of docs/algorithms.md 1.1."""

    cells: list[Cell] = field(default_factory=list)

    def apply(self, ops):
        for op in ops:
            match op:
                case SeqRemove(seq_id, p0, p1):
                    for cell in self.cells:
                        if cell.within(p0, p1):
                            if seq_id == ALL_SEQS:
                                cell.ids.clear()
                            cell.ids.discard(seq_id)
                case SeqCopy(src, dst, p0, p1):
                    for cell in self.cells:
                        if src in cell.ids and cell.within(p0, p1):
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
        return sorted((c for c in self.cells if seq_id in c.ids and (c.pos <= pos or c.joined)),
                      key=lambda c: c.pos)


class StateModel:
    """States by id, as layers that keep one have them: whole or not at all."""

    def __init__(self):
        self.texts: dict[int, tuple[int, ...]] = {}

    def apply(self, ops):
        for op in ops:
            match op:
                case SeqRemove(seq_id, p0, p1):
                    assert p0 == 0, f"a part of a state cannot be removed: {op}"
                    assert p1 == END
                    if seq_id == ALL_SEQS:
                        self.texts.clear()
                    self.texts.pop(seq_id, None)
                case SeqCopy(src, dst, p0, p1):
                    text = self.texts.get(src, ())
                    assert p0 == 0, f"a part of a state cannot be copied: {op}"
                    assert dst not in self.texts, f"the state of {dst} is not empty: {op}"
                    # fewer: its last run was skipped, and so will be what follows
                    assert len(text) <= p1, f"a state of {len(text)} tokens is copied: {op}"
                    if text:
                        self.texts[dst] = text

    def advance(self, rows, tokens):
        """What the state of each row's id has seen, the row included."""
        assert len({ids for ids in rows.seq_ids}) == 1, "rows of several ids in one run"
        found = []
        for token, pos, (seq_id,) in zip(tokens, rows.positions.tolist(), rows.seq_ids,
                                         strict=True):
            text = self.texts.get(seq_id, ())
            assert len(text) == pos, f"a state of {len(text)} tokens at position {pos}"
            self.texts[seq_id] = (*text, token)
            found.append(self.texts[seq_id])
        return found


@dataclass
class Stage:
    kv: KvModel = field(default_factory=KvModel)
    states: StateModel = field(default_factory=StateModel)
    queue: deque = field(default_factory=deque)
    cancelled: set = field(default_factory=set)
    skipped: set = field(default_factory=set)


class Pipeline:
    """Scheduler, stages, cancels and a draft, advanced one random step at a time."""

    def __init__(self, limits, *, n_stages=3, n_vocab=11, accuracy=0.7, seed=0,
                 respect_cancel=True, strict=True, rows=None, drafts=True, taps=False,
                 disks=None, vanish=0.0):
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(limits, rows, drafts=drafts, validate=True)
        self.drafts = drafts
        self.taps = taps  # whether runs bring a row for each token: a hash of its path
        self.seen: list[tuple[int, ...]] = []  # paths of the rows of the last run
        self.fed: dict[int, dict[int, int]] = {}  # what a head got, by lane and index
        self.probe_runs: set[int] = set()
        self.disks: list[dict] | None = disks  # of each stage: cells, or a state, by name
        self.vanish = vanish  # how likely a piece is gone when it is to be read
        self.stages = [Stage() for _ in range(n_stages)]
        self.results: deque = deque()
        self.jobs: dict[int, StartDraft] = {}
        self.cancels: list[list] = []  # [stage index, ids]
        self.n_vocab, self.accuracy = n_vocab, accuracy
        self.respect_cancel, self.strict = respect_cancel, strict
        self.output: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.log: list = []
        self.max_cells = 0

    def feed(self, event):
        for instruction in self.scheduler.handle(event):
            self.log.append(instruction)
            match instruction:
                case Decode(run_id):
                    if self.scheduler.runs[run_id].hint:
                        self.probe_runs.add(run_id)
                    elif instruction.rows.media is None or instruction.rows.media.causal:
                        limits, alone = self.scheduler.limits, len(set(instruction.lanes)) == 1
                        width = limits.exact_width if alone else limits.widest_group
                        assert instruction.loads or len(instruction.rows) <= max(
                            width, limits.chunk)
                    self.stages[0].queue.append((instruction, False))
                case CacheOps() | LaneOpen() | LaneClose():
                    self.stages[0].queue.append((instruction, False))
                case Cancel(ids):
                    self.cancels.append([len(self.stages) - 1, ids])
                case FeedDraft(lane, index, rows):
                    self.fed.setdefault(lane, {}).update(enumerate(rows[:, 0].tolist(), index))
                case StartDraft():
                    assert self.drafts
                    self.jobs[instruction.job_id] = instruction
                case DraftStop(job_id):
                    if self.rng.random() < 0.5:
                        self.jobs.pop(job_id, None)
                case Emit(request_id, choice, _):
                    assert request_id not in self.finished
                    self.output[request_id].append(choice.token)
                case Finish(request_id, reason, _) | Refuse(request_id, reason):
                    assert request_id not in self.finished
                    self.finished[request_id] = reason

    def submit(self, request: Request):
        self.output[request.request_id] = []
        self.feed(Enqueue(request))

    def answer(self, prompt, count, request_id=0):
        """The statistics of one more request, which is computed whole."""
        self.submit(Request(request_id, tuple(prompt), count))
        self.drain()
        assert self.output[request_id] == plain(tuple(prompt), count, self.n_vocab)
        return self.stats(request_id)

    def stats(self, request_id=0):
        return next(i.stats for i in self.log
                    if isinstance(i, Finish) and i.request_id == request_id)

    def runs(self, since=0):
        return [i for i in self.log[since:] if isinstance(i, Decode)]

    def abort(self, request_id):
        self.feed(AbortRequest(request_id, "abort"))

    def choices(self):
        out = [("stage", k) for k, s in enumerate(self.stages) if s.queue]
        out += [("cancel", k) for k in range(len(self.cancels))]
        out += [("job", j) for j in self.jobs]
        if self.results:
            out.append(("result", 0))
        return out

    def step(self, pick=None):
        options = self.choices()
        if not options:
            return False
        kind, index = options[pick % len(options)] if pick is not None else \
            self.rng.choice(options)
        match kind:
            case "stage":
                self._run_stage(index)
            case "cancel":
                self._move_cancel(index)
            case "job":
                self._draft(self.jobs.pop(index))
            case "result":
                self.feed(self.results.popleft())
        return True

    def drain(self, limit=200_000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the pipeline does not come to rest")

    def _move_cancel(self, index):
        stage, ids = self.cancels[index]
        self.stages[stage].cancelled.update(ids)
        if stage == 0:
            del self.cancels[index]
        else:
            self.cancels[index][0] -= 1

    def _run_stage(self, index):
        stage = self.stages[index]
        item, skipped = stage.queue.popleft()
        last = index == len(self.stages) - 1
        choices: list[Choice] = []
        self.seen.clear()
        if isinstance(item, CacheOps | Decode):
            stage.kv.apply(item.ops)
            if self.scheduler.limits.states:
                stage.states.apply(item.ops)
            if isinstance(item, CacheOps):
                self._save(index, item)
        if isinstance(item, Decode):
            skip = skipped or (self.respect_cancel and (
                item.run_id in stage.cancelled or item.parent_id in stage.skipped))
            if skip:
                stage.skipped.add(item.run_id)
            elif item.loads:
                item = structs.replace(item, loaded=self._load(index, item))
            else:
                choices = self._evaluate(stage, item)
                self._save(index, item)
            skipped = skip
        self.max_cells = max(self.max_cells, len(stage.kv.cells))
        if not last:
            self.stages[index + 1].queue.append((item, skipped))
        elif isinstance(item, Decode):
            taps = np.array([[mark(path)] for path in self.seen]) \
                if self.taps and not skipped else None
            self.results.append(RunDone(item.run_id, None if skipped else tuple(choices), taps,
                                        item.loaded))

    def _save(self, index, item):
        assert not item.saves or self.disks is not None
        stage = self.stages[index]
        for piece in item.saves:
            cells = [Cell(c.pos, set(), c.token, c.made) for c in stage.kv.view(
                piece.seq_id, piece.stop - 1) if c.pos >= piece.start]
            assert [c.pos for c in cells] == list(range(piece.start, piece.stop)), piece
            self.disks[index][piece.key] = tuple(c.token for c in cells) if piece.state else cells

    def _load(self, index, item):
        stage, disk, states = self.stages[index], self.disks[index], self.scheduler.limits.states
        for done, piece in enumerate(item.loads[:item.loaded]):
            if self.rng.random() < self.vanish:
                disk.pop(piece.key, None)
            if (held := disk.get(piece.key)) is None:
                if states:
                    stage.kv.apply((SeqRemove(piece.seq_id, 0, END),))
                    stage.states.texts.pop(piece.seq_id, None)
                return 0 if states else done
            if piece.state:
                assert piece.seq_id not in stage.states.texts
                stage.states.texts[piece.seq_id] = held
            else:
                assert not [c for c in stage.kv.cells if piece.seq_id in c.ids
                            and c.pos >= piece.start]
                stage.kv.cells += [Cell(c.pos, {piece.seq_id}, c.token, c.made) for c in held]
        return item.loaded

    def _evaluate(self, stage, item):
        rows = item.rows
        tokens = rows.tokens.tolist()
        if rows.media is not None:  # what a row shows, in place of a token
            assert tokens == [NO_TOKEN] * len(rows)
            tokens = rows.media.rows[:, 0].astype(int).tolist()
        states = stage.states.advance(rows, tokens) if self.scheduler.limits.states else None
        for token, pos, ids in zip(tokens, rows.positions.tolist(), rows.seq_ids,
                                   strict=True):
            extents = {tuple(f([c.pos for c in stage.kv.cells if i in c.ids] or [-1])
                             for f in (min, max)) for i in ids}
            assert len(extents) == 1, (item, ids, extents)  # llama.cpp: coupled ids end alike
            for seq_id in ids:
                held = [c.pos for c in stage.kv.cells if seq_id in c.ids]
                assert not held or max(held) in (pos - 1, pos), (item, seq_id, held)
            made = (int(rows.positions[0]), len(rows))
            stage.kv.cells.append(Cell(pos, set(ids), token, made))
        out = []
        for i, (pos, ids) in enumerate(zip(rows.positions.tolist(), rows.seq_ids, strict=True)):
            seen = stage.kv.view(ids[0], pos)
            good = [c.pos for c in seen] == list(range(pos + 1))
            if self.strict:
                assert good, (item, [(c.pos, c.ids) for c in seen])
                if item.run_id not in self.probe_runs:
                    self._check_widths(item.lanes[i], seen)
            path = tuple(c.token for c in seen)
            self.seen.append(path)
            assert states is None or states[i] == path
            if rows.outputs[i]:
                out.append(self.choice_after(path) if good else Choice(-1))
        return out

    def choice_after(self, path):
        return Choice(next_token(path, self.n_vocab))

    def _check_widths(self, lane, cells):
        """Cells of a prompt come from runs cut as if the request were alone, the others from runs
        that are no wider than their groups: else the bits of a real backend would differ."""
        lane = self.scheduler.lanes.get(lane)
        if lane is None:
            return
        chunk, n = self.scheduler.limits.chunk, len(lane.request.prompt)
        for cell in cells:
            if cell.pos < n:
                edges = cuts(lane.request, chunk)
                start = max(edge for edge in edges if edge <= cell.pos)
                stop = min(edge for edge in (*edges, n) if edge > cell.pos)
                assert cell.made == (start, stop - start), (cell, n)
            else:
                assert cell.made[1] <= self.scheduler.limits.widest_group, (cell, n)

    def _draft(self, job: StartDraft):
        path = [*job.accepted[:job.base], *job.suffix]
        proposals: list[Proposal] = []
        spares: list[Proposal] = []
        level = [(-1, path)]
        depth = 0
        while level and len(proposals) < job.max_tokens and depth < job.max_depth:
            depth += 1
            following = []
            for parent, tokens in level:
                right = next_token(tuple(tokens), self.n_vocab)
                guess = right if self.rng.random() < self.accuracy else \
                    self.rng.randrange(self.n_vocab)
                options = [guess]
                while len(options) + len(level) + len(following) - 1 < job.branches and \
                        self.rng.random() < 0.5:
                    options.append(self.rng.randrange(self.n_vocab))
                for _ in range(self.rng.randint(0, job.alternatives)):
                    spares.append(Proposal(parent, self.rng.randrange(self.n_vocab),
                                           self.rng.choice([0.05, 0.3]), alternative=True))
                for token in options:
                    if len(proposals) < job.max_tokens and token not in job.stop_ids:
                        proposals.append(Proposal(parent, token, 0.9))
                        following.append((len(proposals) - 1, [*tokens, token]))
            level = following
            if self.rng.random() < 0.1:
                break
        if self.rng.random() < 0.1:
            proposals, spares = [], []
        spares = [p for p in spares if p.parent < len(proposals)]
        self.feed(Drafted(job.job_id, (*proposals, *spares)))


class Lossy:
    """What a loss of stages is to a simulated pipeline: others come, with empty caches."""

    lost = 0  #: how often

    def lose(self, n_stages, limits=None):
        """The stages, what they were at and what they have answered are gone. Old drafts may
        still answer: the draft lives at the head."""
        self.lost += 1
        self.stages = [Stage() for _ in range(n_stages)]
        self.results.clear()
        self.cancels.clear()
        self.feed(Restart(limits or self.scheduler.limits))


class LossyPipeline(Lossy, Pipeline):
    """A pipeline whose stages may be lost."""


def named(*tokens):
    """What a mask names, the likeliest first."""
    return Choice(tokens[0], math.log(0.5), tuple(
        (token, math.log(0.5 / (k + 1))) for k, token in enumerate(tokens)))


class WithMasks(Pipeline):
    """Masks name the right token among wrong ones, as often as a draft is right here."""

    def choice_after(self, path):
        masks = 0
        while path[-1 - masks] >= MASK:
            masks += 1
        if not masks:
            return super().choice_after(path)
        future = list(path[:-masks])
        assert all(token < MASK for token in future)
        assert list(path[-masks:]) == [MASK + r for r in range(masks)]
        for _ in range(masks + 1):
            future.append(next_token(tuple(future), self.n_vocab))
        names = [self.rng.randrange(self.n_vocab) for _ in range(4)]
        if self.rng.random() < self.accuracy:
            names[self.rng.choice([0, 0, 1])] = future[-1]
        return named(*dict.fromkeys(names))
