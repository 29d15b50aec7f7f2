"""Node k, a stage: evaluates one shard of the target for every run that passes.

A stage receives transactions from its predecessor, applies them in order and forwards them; the
last stage chooses tokens and sends results to the head. The members of a wide stage run this loop
in step: all receive the same transactions, and the leader decides which runs are skipped.
Cancellations travel in the opposite direction. A stage has no policy, token tree or requests; it
decides only which runs are dead already.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field, structs

from pipeinfer.backends.base import Backend, apply, norms
from pipeinfer.backends.team import Team
from pipeinfer.core import messages
from pipeinfer.core.codec import check_decode, check_ops, check_pieces
from pipeinfer.core.control import (
    DraftSetup,
    Pace,
    Peers,
    Report,
    RollCall,
    Standing,
    StoreFigures,
)
from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.grid import Grid
from pipeinfer.core.policy import CancelPath
from pipeinfer.core.sampling import choose, likeliest
from pipeinfer.core.types import (
    END,
    NO_TOKEN,
    Choice,
    FloatArray,
    IntArray,
    Pooling,
    Rows,
    SamplingParams,
    SeqCopy,
    SeqKeep,
    SeqOp,
    SeqRemove,
)
from pipeinfer.errors import ProtocolError, TransportTimeout
from pipeinfer.models.text.constraint import Constraints
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.runtime.kv_peers import StorePeers
from pipeinfer.runtime.kv_store import StagePieces
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.runtime.sliced_head import HeadMember
from pipeinfer.transport.base import Dismissed, Port, Regrouped
from pipeinfer.transport.lent import LentLoop, Stuck


class PooledRows:
    """The sums of the rows of prompts that are being embedded."""

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}  # mean: float64[n_embd]

    def add(self, backend: Backend, run: messages.Decode, pooling: Pooling) -> FloatArray:
        """Evaluate a run of one prompt.

        Returns float32[k, n_embd] for the k rows with an output: at the prompt's end its embedding.
        """
        if pooling == "last":
            return norms(backend, run.rows, run.hidden)
        rows, lane = run.rows, run.lanes[0]
        every = Rows(rows.tokens, rows.positions, rows.seq_ids, np.ones(len(rows), np.bool_),
                     rows.views)
        found = norms(backend, every, run.hidden)
        first, last = rows.lists.positions[0], rows.lists.positions[-1]
        if pooling == "mean":
            before = self._sums[lane] if first else 0.0
            self._sums[lane] = before + found.sum(axis=0, dtype=np.float64)
            row = self._sums[lane] / (last + 1)
        else:
            row = self._sums.setdefault(lane, found[0]) if first else found[0]
            self._sums[lane] = row
        return np.repeat(row.astype(np.float32)[None], int(rows.outputs.sum()), axis=0)

    def forget(self, lane: int) -> None:
        """Drop what is stored of a lane that has ended."""
        self._sums.pop(lane, None)


_PROBE_SECONDS = 0.5e-3  #: least time between two looks for a cancellation inside a run
_ANY_POSITION = 1 << 31
_BRIEF_SECONDS = 25e-3  #: longest run after which the loop is lent to the head's thread
_NAMED = 8  #: tokens in the result of a row whose id is beyond the vocabulary
_STORE_SECONDS = 1.0  #: between two reports of what is on the disk
_PACE = 16  #: runs after which a member of a wide stage reports their times
_NOTHING = np.zeros(0, np.int32)  #: a path that is not read
_REMEMBER = 4096  #: how many run ids back a skipped parent is remembered


class Fate(enum.StrEnum):
    """What became of a run at one stage."""

    COMPUTED = "computed"
    STOPPED = "stopped"  #: cancelled at a layer boundary
    SKIPPED = "skipped"  #: cancelled before it started
    LOADED = "loaded"  #: read from the disk


class StageStats(Struct):
    """Statistics of a stage. Times are in seconds.

    waited: for the other members of a wide stage; not part of `compute`.
    sample: choosing tokens. wasted: computing runs that were stopped.
    events: (run id, start, end, fate, rows, waited), only when tracing.
    """

    started: float = field(default_factory=time.monotonic)
    busy: float = 0.0
    compute: float = 0.0
    waited: float = 0.0
    sample: float = 0.0
    wasted: float = 0.0
    runs: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    rows: int = 0
    events: list[tuple[int, float, float, str, int, float]] = field(default_factory=list)


class History:
    """The tokens by (sequence id, position), for penalties and grammars: int32[n_seq, n_ctx].

    Only prefixes of live paths are read, and those are always complete, so removals need no work.
    """

    def __init__(self, n_seq: int, n_ctx: int) -> None:
        self._tokens = np.zeros((n_seq, n_ctx), np.int32)
        self._memory = self._tokens.data  # for single tokens, for which numpy is slow

    def apply(self, op: SeqOp) -> None:
        """Apply a sequence operation."""
        match op:
            case SeqCopy(src, dst, p0, p1):
                self._tokens[dst, p0:p1] = self._tokens[src, p0:p1]
            case SeqRemove() | SeqKeep():
                pass

    def write(self, rows: Rows) -> None:
        """Store the rows' tokens under all their sequence ids."""
        tokens, positions, _ = rows.lists
        for token, pos, ids in zip(tokens, positions, rows.seq_ids, strict=True):
            for seq_id in ids:
                self._memory[seq_id, pos] = token

    def of(self, seq_id: int, pos: int) -> IntArray:
        """Return the tokens of a path up to and including `pos`."""
        return self._tokens[seq_id, : pos + 1]


class Stage:
    """The message loop of one member of a stage; `serve` returns after a Shutdown.

    backend: this member's layers.
    team: the other members, if the stage is wide.
    cancel_path: BACKWARD: forward each cancellation to the stage before.
    trace: whether to record an event per run.
    timeout: seconds without a transaction, while a lane is open, that end the stage.
    extra_report: returns further figures for the final report.
    vocabulary: what the last stage needs for lanes with a grammar.
    learned: number of token ids beyond the vocabulary that rows may have.
    tapped: returns the rows of the last decode that a head reads, float32 or float16; None without
        one.
    drafting: this member's side of a prediction head in slices.
    pieces, peers: cells of prompts on this host's disk, and on others; None: nothing is kept.
    """

    def __init__(  # noqa: PLR0913
        self, port: Port, grid: Grid, backend: Backend, *, team: Team | None = None,
        cancel_path: CancelPath = CancelPath.DIRECT, trace: bool = False, timeout: float = 300.0,
        extra_report: Callable[[], dict[str, Any]] | None = None,
        vocabulary: Vocabulary | None = None, learned: int = 0, pulse: Pulse | None = None,
        tapped: Callable[[], npt.NDArray[Any]] | None = None, drafting: HeadMember | None = None,
        pieces: StagePieces | None = None, peers: StorePeers | None = None,
    ) -> None:
        self.stats = StageStats()
        self._port, self._backend, self._team = port, backend, team
        self._name = grid.name(port.node)
        self._before, self._next = grid.predecessor(port.node), grid.successors(port.node)
        self._leader_before = grid.leader(self._name.stage - 1)
        self._cancel_path, self._trace, self._timeout = cancel_path, trace, timeout
        self._extra_report, self._tapped, self._drafting = extra_report, tapped, drafting
        self._pieces, self._peers = pieces, peers
        self._leads = self._name.member == 0
        self._last = self._name.stage == grid.n_stages
        self._answers = self._last and self._leads
        self._cancelled: set[int] = set()
        self._skipped: set[int] = set()
        self._last_run = -1
        self._received, self._done_at = 0, time.monotonic()
        self._at_work = False
        self._lanes: dict[int, SamplingParams] = {}
        self._pooled = PooledRows()
        self._constraints = Constraints(vocabulary)
        info = backend.info
        able = backend.capabilities  # one with views of its own counts learned tokens itself
        self._bounds = (info.n_seq_max, _ANY_POSITION if able.free_positions else info.n_ctx,
                        None if able.separate_views else info.n_vocab + learned,
                        None if info.first else info.n_embd)
        self._history = History(info.n_seq_max, info.n_ctx) if self._answers else None
        self._next_probe = self._next_figures = 0.0
        self._run_at_hand = -1
        self._speculates = False
        self._pulse = pulse or Pulse()
        self._lent: LentLoop | None = None
        self._running = True

    def serve(self, lent: LentLoop | None = None) -> None:
        """Handle messages until Shutdown.

        lent: lets the head's thread, in the same process, run short turns of this loop.
        Raises TransportTimeout, ProtocolError, BackendError; Stuck if a lent turn does not end in
        time.
        """
        if lent is not None:
            self._lent = lent
            self._serve_lent(lent)
            return
        while self._running:
            self._running = self._handle(self._receive())

    def _serve_lent(self, lent: LentLoop) -> None:
        try:
            # while the head's thread runs the loop itself, this thread only watches over it
            while self._running:
                if not lent.own(self._turn, self._timeout):
                    self._port.wait(1.0, live=bool(self._lanes))
        except TimeoutError:
            raise Stuck(f"run {self._run_at_hand} on rank 0 has not ended for {self._timeout:g} s: "
                        "it hangs, or needs a longer --timeout") from None
        finally:
            lent.lend(None)

    def _turn(self) -> bool:
        if not self._running or (message := self._take()) is None:
            return False
        self._running = self._handle(message)
        if not self._running and self._lent is not None:
            self._lent.lend(None)
        return True

    @property
    def current_run(self) -> int:
        """The id of the current or the last run; -1 before the first."""
        return self._run_at_hand

    # --- receiving ----------------------------------------------------------------------------

    def _receive(self) -> messages.Message:
        """Wait for the next transaction, and handle cancellations meanwhile."""
        start = time.monotonic()
        # cancellations arrive while it waits; without open lanes it may wait for ever
        while True:
            if (message := self._take()) is not None:
                return message
            live = bool(self._lanes)
            if live and time.monotonic() - start > self._timeout:
                raise TransportTimeout(
                    rank=self._port.rank_of(self._port.node),
                    peer=self._port.rank_of(self._before), tag=messages.Tag.TRANSACTION.name,
                    run_id=self._last_run + 1, seconds=self._timeout,
                )
            self._port.wait(1.0, live=live)

    def _take(self) -> messages.Message | None:
        self._pulse.beat("waits")
        self._take_cancels()
        envelope = self._port.take(messages.Tag.TRANSACTION)
        return None if envelope is None else envelope.message

    def _take_cancels(self) -> None:
        # before each transaction: a run that was cancelled in time costs nothing
        while (envelope := self._port.take(messages.Tag.CANCEL)) is not None:
            message = envelope.message
            if isinstance(message, RollCall):
                self._answer_call(message)
                continue
            if not isinstance(message, messages.Cancel):
                raise ProtocolError(f"{type(message).__name__} came on the tag for Cancel")
            if self._cancel_path is CancelPath.BACKWARD and self._leader_before:
                self._port.send(self._leader_before, messages.Tag.CANCEL, message)
            self._cancelled.update(i for i in message.run_ids if i > self._last_run)

    def _answer_call(self, call: RollCall) -> None:
        idle = 0.0 if self._at_work else time.monotonic() - self._done_at
        self._port.send(0, messages.Tag.RESULT,
                        Standing(self._name, call.number, self._received, idle))

    def _handle(self, message: messages.Message) -> bool:
        """Handle one message; return whether to continue."""
        self._received += 1
        self._at_work = True
        goes_on = self._do(message)
        self._at_work, self._done_at = False, time.monotonic()
        return goes_on

    def _do(self, message: messages.Message) -> bool:
        match message:
            case messages.Decode():
                self._decode(message)
            case messages.CacheOps(ops, saves):
                check_ops(ops, self._backend.info.n_seq_max)
                check_pieces(saves, *self._bounds[:2])
                self._forward(message)
                self._apply(ops)
                if saves and self._pieces is not None:
                    self._pieces.save(saves)
            case messages.LaneOpen(lane, params):
                self._forward(message)
                if params.grammar and self._answers:
                    self._constraints.of(lane, params.grammar)
                self._lanes[lane] = params
            case messages.LaneClose(lane):
                self._forward(message)
                self._lanes.pop(lane, None)
                self._pooled.forget(lane)
                self._constraints.forget(lane)
            case DraftSetup() | FeedDraft() | StartDraft() if self._drafting is not None:
                self._speculates = True
                if self._lent is not None:
                    self._lent.lend(None)  # jobs wait for messages that the head's thread receives
                self._drafting.handle(message)
            case RollCall():
                self._forward(message)
                self._answer_call(message)
            case Peers():
                self._forward(message)
                if self._peers is not None:
                    self._peers.meet(message, self._name.stage)
            case messages.Shutdown():
                self._forward(message)
                self._port.send(0, messages.Tag.RESULT, self._report())
                return False
            case _:
                raise ProtocolError(
                    f"stage {self._name.stage} cannot handle {type(message).__name__}"
                )
        return True

    def _forward(self, message: messages.Message) -> None:
        for node in self._next:
            self._port.send(node, messages.Tag.TRANSACTION, message)

    # --- runs ---------------------------------------------------------------------------------

    def _decode(self, run: messages.Decode) -> None:
        start, clock = time.time(), time.monotonic()  # the former may jump
        check_decode(run, *self._bounds, lanes=self._lanes)
        if run.loads:
            self._load(run, start, clock)
            return
        self._apply(run.ops)
        result: FloatArray | None = None
        taps = run.taps
        self._speculates |= run.speculative
        self._run_at_hand = run.run_id
        self._pulse.beat(f"has worked on run {run.run_id}")
        waited = self._waited
        dead, whole = self._is_dead(run), all(run.rows.lists.outputs)
        if not dead:
            self._next_probe = time.monotonic() + _PROBE_SECONDS
            if self._embeds(run):
                result = self._pooled.add(self._backend, run, self._lanes[run.lanes[0]].pooling)
                taps = None  # nothing follows an embedding
            else:
                result = self._backend.decode(run.rows, run.hidden, self._check_inside(run))
                if result is not None and self._tapped is not None and self._leads:
                    taps = _beside(taps, self._tapped())
        computed, waited = time.monotonic() - clock, self._waited - waited
        fate = Fate.SKIPPED if dead else Fate.STOPPED if result is None else Fate.COMPUTED
        if result is None:
            self._skip(run, _extended(run.spans, start, 0.0 if dead else computed, waited))
        elif self._answers:
            choices = self._choose(run, result)
            spans = _extended(run.spans, start, time.monotonic() - clock, waited)
            self._port.send(0, messages.Tag.RESULT,
                            messages.RunFinished(run.run_id, choices, spans, taps))
        elif not self._last:
            self._forward(structs.replace(
                run, hidden=result, spans=_extended(run.spans, start, computed, waited), taps=taps))
        if run.saves and result is not None and self._pieces is not None:
            self._pieces.save(run.saves)  # what follows may change them; the next stage works
        self._last_run = run.run_id
        self._cancelled.discard(run.run_id)
        self._note(run, fate, start, (computed, time.monotonic() - clock), waited)
        if self._lent is not None:
            brief = fate is Fate.COMPUTED and not self._speculates and whole \
                and computed < _BRIEF_SECONDS
            self._lent.lend(self._turn if brief else None)

    def _check_inside(self, run: messages.Decode) -> Callable[[], bool] | None:
        """Return what to call at each layer of a run; None for nothing, as a check costs time."""
        if not self._leads:
            return None  # the leader decides
        if run.speculative or not all(run.rows.lists.outputs):  # or a part of a prompt
            return self._should_stop
        if self._speculates and self._cancel_path is CancelPath.BACKWARD:
            return self._look
        return None

    def _load(self, run: messages.Decode, start: float, clock: float) -> None:
        """Read the cells of a run from the disk, as far as this stage and those before have them.
        """
        self._apply(run.ops)
        self._run_at_hand = run.run_id
        self._pulse.beat(f"reads the cells of run {run.run_id}")
        dead, loaded = self._is_dead(run), 0
        if not dead and self._pieces is not None:
            loaded = self._pieces.load(run.loads[:run.loaded])
            if loaded < len(run.loads) and not self._backend.capabilities.takes_back:
                loaded = 0  # a state is there as a whole or not at all
            if loaded < run.loaded:
                piece = run.loads[0]
                self._backend.seq_rm(piece.seq_id, run.loads[loaded].start, END)
        seconds = time.monotonic() - clock
        spans = _extended(run.spans, start, 0.0 if dead else seconds, 0.0)
        if dead:
            self._skip(run, spans)
        elif self._history is not None:
            self._history.write(run.rows)
            self._port.send(0, messages.Tag.RESULT,
                            messages.RunFinished(run.run_id, (), spans, loaded=loaded))
        else:
            self._forward(structs.replace(run, spans=spans, loaded=loaded))
        self._last_run = run.run_id
        self._cancelled.discard(run.run_id)
        self._note(run, Fate.SKIPPED if dead else Fate.LOADED, start, (seconds, seconds), 0.0)

    def _embeds(self, run: messages.Decode) -> bool:
        """Whether the run's result is an embedding. A prompt's rows have runs of their own, so all
        rows belong to one lane."""
        params = self._lanes[run.lanes[0]]
        return self._last and params.embed and (
            params.reads_prompt or any(run.rows.lists.outputs))

    @property
    def _waited(self) -> float:
        return 0.0 if self._team is None else self._team.waited

    def _is_dead(self, run: messages.Decode) -> bool:
        """Whether the run is to be skipped here. In a wide stage the leader decides for all
        members."""
        # A child of a skipped run reads cells that were never made: skip it as well.
        if run.skipped or run.parent_id in self._skipped:
            return True  # every member finds this by itself
        cancelled = run.run_id in self._cancelled
        return cancelled if self._team is None else self._team.begin(
            run.run_id, cancelled=cancelled)

    def _skip(self, run: messages.Decode, spans: messages.Spans) -> None:
        self._skipped.add(run.run_id)
        if len(self._skipped) > _REMEMBER:
            self._skipped = {i for i in self._skipped if i > run.run_id - _REMEMBER}
        if self._answers:
            self._port.send(0, messages.Tag.RESULT, messages.RunCancelled(run.run_id, spans))
        elif not self._last:
            self._forward(structs.replace(run, skipped=True, hidden=None, taps=None, spans=spans))

    def _look(self) -> bool:
        """Forward cancellations, but do not stop: a run that is not speculative is always
        completed."""
        self._should_stop()
        return False

    def _should_stop(self) -> bool:
        now = time.monotonic()
        if now < self._next_probe:
            return False
        self._next_probe = now + _PROBE_SECONDS
        try:
            self._take_cancels()
        except (Regrouped, Dismissed):  # raised again by the next look, outside of the backend
            return True
        return self._run_at_hand in self._cancelled

    def _apply(self, ops: tuple[SeqOp, ...]) -> None:
        for op in ops:
            apply(self._backend, op)
            if self._history is not None:
                self._history.apply(op)

    def _choose(self, run: messages.Decode, logits: FloatArray) -> tuple[Choice, ...]:
        assert self._history is not None
        self._history.write(run.rows)
        tokens, positions, outputs = run.rows.lists
        wanted = [row for row, output in enumerate(outputs) if output]
        choices, lanes = [], run.lanes
        for row, values in zip(wanted, logits, strict=True):
            pos, seq_id, lane = positions[row], run.rows.seq_ids[row][0], lanes[row]
            params, path, allowed = self._lanes[lane], _NOTHING, None
            if params.embed:
                choices.append(Choice(0, None, tuple(enumerate(values.tolist()))))
                continue
            if params.reads_path:
                path = self._history.of(seq_id, pos)
            if tokens[row] >= self._backend.info.n_vocab:  # a learned token: it proposes
                choices.append(likeliest(values, params, pos, _NAMED))
                continue
            if params.grammar:
                allowed = self._constraints.of(lane, params.grammar).allowed(
                    path[params.grammar_start :])
                if allowed is None:  # the path breaks the grammar, so it will be rejected
                    choices.append(Choice(NO_TOKEN))
                    continue
            choices.append(choose(values, params, path, pos, allowed))
        return tuple(choices)

    # --- figures ------------------------------------------------------------------------------

    def _note(self, run: messages.Decode, fate: Fate, start: float, seconds: tuple[float, float],
              waited: float) -> None:
        """Count a run.

        start: seconds since the epoch. seconds: duration until it was computed, and in all.
        """
        computed, whole = seconds
        stats = self.stats
        stats.busy += whole
        stats.compute += computed - waited
        stats.waited += waited
        stats.sample += whole - computed
        stats.runs[fate] += 1
        if fate is Fate.COMPUTED:
            stats.rows += len(run.rows)
        elif fate is Fate.STOPPED:
            stats.wasted += computed
        if self._trace:
            stats.events.append((run.run_id, start, start + whole, fate.value, len(run.rows),
                                 waited))
        runs = sum(stats.runs.values())
        if self._team is not None and runs % _PACE == 0:
            self._port.send(0, messages.Tag.RESULT,
                            Pace(self._name, runs, stats.compute, stats.waited))
        if self._pieces is not None and (run.saves or run.loads) and (
                now := time.monotonic()) > self._next_figures:
            self._next_figures = now + _STORE_SECONDS
            self._port.send(0, messages.Tag.RESULT,
                            StoreFigures(self._name, **structs.asdict(self._pieces.counts)))

    def _report(self) -> Report:
        stats, info = self.stats, self._backend.info
        return Report(
            self._name, info.layers, info.weight_bytes, info.cache_bytes,
            stats.busy, stats.compute, stats.waited, stats.sample, stats.wasted, stats.rows,
            {fate.value: count for fate, count in stats.runs.items()},
            time.monotonic() - stats.started, self._port.traffic.total_bytes, stats.events,
            {} if self._extra_report is None else self._extra_report())


def _beside(before: npt.NDArray[Any] | None, own: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return own if before is None else np.concatenate([before, own], axis=1)


def _extended(spans: messages.Spans, start: float, seconds: float, waited: float) -> messages.Spans:
    """Return `spans` with one more span."""
    return (*spans, (start, seconds, min(waited, seconds)))
