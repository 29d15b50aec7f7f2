"""The real scheduler and the real draft logic in virtual time.

Stages, links and the draft's processor are simulated; the scheduler, the token tree, the draft's
cache and job handling are the ones that run on a cluster. A second of a cluster takes some
milliseconds here, nothing is drawn at random, and 256 stages need no 256 processes. What the
runtime itself costs (messages, polling, the head's Python) is part of the scenario. This module
knows no named machines: stages, links and the draft are durations.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeinfer.backends.base import apply
from pipeinfer.core.control import DraftStop
from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.messages import CacheOps, Cancel, Decode, LaneClose, LaneOpen
from pipeinfer.core.types import Choice, Request
from pipeinfer.emulation.synthetic import SyntheticBackend, SyntheticHead, SyntheticPair
from pipeinfer.errors import PipeinferError
from pipeinfer.scheduler.controller import Controller, gaps
from pipeinfer.scheduler.events import (
    Drafted,
    Emit,
    Enqueue,
    Event,
    Finish,
    Instruction,
    LaneStats,
    Refuse,
    RunDone,
)
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.cascade import Cascade
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.prompt_lookup import PromptLookup
from pipeinfer.strategies.proposers.target_head import TargetHead

HEADER_BYTES = 96  #: a transaction without its columns
ROW_BYTES = 24  #: columns of one row without activations


@dataclass(frozen=True, slots=True)
class Wire:
    """A link: seconds of latency, bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the runtime costs, in seconds: `hop` to receive and send a message, `head` per event.

    Measured with cold caches, as after a computation: a send of a rank that has slept for 10 ms
    took 0.33 to 0.42 ms, ten times one of a ping-pong.
    poll: the longest sleep of a waiting rank; it sleeps an eighth of the time already waited.
    """

    hop: float = 400e-6
    head: float = 150e-6
    poll: float = 1e-3
    poll_least: float = 30e-6


def no_attention(*_: int) -> float:
    """The time of attention where it does not count."""
    return 0.0


@dataclass(frozen=True, slots=True)
class VirtualStage:
    """seconds: duration of a run of so many rows. layers: how often a run looks for cancels.
    attention: what it takes longer where its rows see so many cells in all, and the longest row so
    many."""

    seconds: Callable[[int], float]
    layers: int = 1
    attention: Callable[[int, int], float] = no_attention


@dataclass(frozen=True, slots=True)
class Scenario:
    """One request on one pipeline.

    links: one more than stages: head to first, between stages, last to head. draft: seconds of a
    draft decode of so many rows. row_bytes: bytes of one row's activations.
    context: tokens that are cached before the prompt. draft_attention: as a stage's, for the draft.
    """

    stages: tuple[VirtualStage, ...]
    links: tuple[Wire, ...]
    draft: Callable[[int], float]
    limits: Limits
    pair: SyntheticPair
    row_bytes: int = 0
    prompt: int = 128
    tokens: int = 512
    overheads: Overheads = field(default_factory=Overheads)
    draft_paths: int = 8
    direct_cancel: bool = False
    context: int = 0
    draft_attention: Callable[[int, int], float] = no_attention

    def __post_init__(self) -> None:
        if len(self.links) != len(self.stages) + 1:
            raise ValueError(f"{len(self.stages)} stages need {len(self.stages) + 1} links, not "
                             f"{len(self.links)}")


@dataclass(slots=True)
class Result:
    """Times in seconds, counted from the moment the prompt was processed (its token is free).

    busy: seconds each stage computed.
    """

    tokens: list[int]
    times: list[float]
    prompt_seconds: float
    stats: LaneStats
    busy: list[float]
    head_busy: float
    draft_busy: float
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """From the prompt's token to the last token."""
        return self.times[-1] - self.times[0] if len(self.times) > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generation speed as the paper measures it: prompt processing does not count."""
        return (len(self.times) - 1) / self.seconds if self.seconds else 0.0

    @property
    def itl(self) -> list[float]:
        """Times between accepted tokens."""
        return [b - a for a, b in itertools.pairwise(self.times)]


def prompt_of(scenario: Scenario, request: int = 0) -> tuple[int, ...]:
    """The prompt's tokens; another request has others."""
    return scenario.pair.prompt(scenario.prompt, request)


def simulate(scenario: Scenario, controller: Controller | None = None) -> Result:
    """Run the request of a scenario to its end.

    controller: adapts the limits while running. Raises PipeinferError
    when the pipeline comes to rest before the request has ended, which would be a bug.
    """
    return Simulation(scenario, controller).run()


@dataclass(slots=True)
class _Packet:
    """A message on its way: an instruction, or None for the end."""

    item: Decode | CacheOps | LaneOpen | LaneClose
    skipped: bool = False
    spans: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class _StageState:
    spec: VirtualStage
    queue: deque[_Packet] = field(default_factory=deque)
    cancelled: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    last_run: int = -1
    running: _Packet | None = None
    started: float = 0.0
    ends: float = 0.0
    token: int = 0
    idle_since: float = 0.0
    waking: bool = False
    busy: float = 0.0


class Simulation:
    """One request through a scenario."""

    def __init__(self, scenario: Scenario, controller: Controller | None) -> None:
        self.spec = scenario
        self.controller = controller
        self.now = 0.0
        self.scheduler = Scheduler(scenario.limits)
        n_ctx = scenario.prompt + scenario.tokens + 8
        self.target = SyntheticBackend(scenario.pair, n_ctx, scenario.limits.n_ids)
        paths = scenario.draft_paths + scenario.limits.parallel - 1
        ids = paths + max(scenario.limits.branches, 1)
        self.taps = bool(scenario.pair.by_depth)
        draft: DraftModel = TargetHead(
            SyntheticHead(scenario.pair, n_ctx, ids), paths=paths) \
            if self.taps else DraftModel(
                SyntheticBackend(scenario.pair, n_ctx, ids, draft=True), paths=paths)
        self.draft = Cascade(self.proposers(draft))
        self.stages = [_StageState(spec) for spec in scenario.stages]
        self.link_free = [0.0] * len(scenario.links)
        self.head_free = 0.0
        self.draft_free = 0.0
        self.jobs: deque[StartDraft] = deque()
        self.stopped: set[int] = set()
        self.working: StartDraft | None = None
        self.issued: dict[int, float] = {}
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.finished: LaneStats | None = None
        self.head_busy = self.draft_busy = 0.0
        self.sent = 0

    def proposers(self, draft: DraftModel) -> list[DraftModel | PromptLookup]:
        """All that propose tokens, in the order in which they are asked."""
        return [draft]

    def draft_seconds(self, rows: int) -> float:
        """The time of the draft's decode that is next."""
        return self.spec.draft(rows)

    # --- time ---------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (max(time, self.now), next(self.count), action))

    def run(self) -> Result:
        request = Request(0, prompt_of(self.spec), self.spec.tokens)
        self.at(0.0, lambda: self.feed(Enqueue(request)))
        self.advance()
        assert self.finished is not None
        return Result(self.tokens, self.times, self.times[0] if self.times else 0.0,
                      self.finished, [stage.busy for stage in self.stages], self.head_busy,
                      self.draft_busy, self.sent)

    def advance(self) -> None:
        """Until everything has ended. Raises PipeinferError when it never does."""
        while self.queue and not self.over():
            self._turn()
        if not self.over():
            raise PipeinferError("the simulated pipeline stopped before the request ended (this is "
                                 "a bug)")

    def _turn(self) -> None:
        self.now, _, action = heapq.heappop(self.queue)
        action()

    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.finished is not None

    def emitted(self, request_id: int, token: int) -> None:
        """A token came out."""
        del request_id
        self.times.append(self.now)
        self.tokens.append(token)

    def computed(self, stage: int, run: Decode, started: float, *, skipped: bool) -> None:
        """A stage has done with a run, now."""

    def ended(self, request_id: int, stats: LaneStats) -> None:
        """A request ended."""
        del request_id
        self.finished = stats

    # --- the head -----------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """An event reaches the head; its instructions leave when the head has handled it."""
        done = max(self.now, self.head_free) + self.spec.overheads.head
        self.head_busy += self.spec.overheads.head
        self.head_free = done
        self.at(done, lambda: self._handle(event))

    def _handle(self, event: Event) -> None:
        if self.controller is not None and isinstance(event, RunDone):
            calibration = self.scheduler.calibration
            limits = self.controller.advise(calibration.acceptance, calibration.second)
            if limits is not None:
                self.scheduler.tune(limits)
        for instruction in self.scheduler.handle(event):
            self._execute(instruction)

    def _execute(self, item: Instruction) -> None:
        match item:
            case Decode(run_id, rows=rows):
                self.issued[run_id] = self.now
                self._send(0, _Packet(item), HEADER_BYTES + ROW_BYTES * len(rows))
            case CacheOps() | LaneOpen() | LaneClose():
                self._send(0, _Packet(item), HEADER_BYTES)
            case Cancel(run_ids):
                self._cancel(run_ids)
            case StartDraft():
                self.jobs.append(item)
                self._draft_next()
            case DraftStop(job_id):
                self.stopped.add(job_id)
            case FeedDraft():
                self.draft.feed(item)
            case Emit(request_id, choice, _):
                self.emitted(request_id, choice.token)
            case Finish(request_id, _, stats):
                self.ended(request_id, stats)
            case Refuse(_, error):
                raise error

    # --- links --------------------------------------------------------------------------------

    def _send(self, link: int, packet: _Packet, size: int) -> None:
        """Over the link into stage `link`: one message after the other, then the latency."""
        wire = self.spec.links[link]
        self.sent += size
        start = max(self.now, self.link_free[link])
        self.link_free[link] = start + size / wire.bandwidth
        self.at(self.link_free[link] + wire.latency, lambda: self._arrive(link, packet))

    def _cancel(self, run_ids: tuple[int, ...]) -> None:
        last = len(self.stages) - 1
        if self.spec.direct_cancel:
            for stage in range(last, -1, -1):
                self._send_cancel(stage, run_ids, self.spec.links[-1].latency)
        else:
            self._send_cancel(last, run_ids, self.spec.links[-1].latency)

    def _send_cancel(self, stage: int, run_ids: tuple[int, ...], latency: float) -> None:
        self.sent += HEADER_BYTES
        self.at(self.now + latency, lambda: self._notice(stage, run_ids))

    def _notice(self, index: int, run_ids: tuple[int, ...]) -> None:
        """A cancellation has arrived; the stage looks for it between layers or when it polls."""
        stage = self.stages[index]
        if stage.running is not None:
            layer = (stage.ends - stage.started) / max(stage.spec.layers, 1)
            passed = math.ceil((self.now - stage.started) / layer) if layer > 0 else 0
            when = min(stage.started + passed * layer, stage.ends)
        else:
            when = self.now + self._poll(stage)
        self.at(when, lambda: self._take_cancel(index, run_ids))

    def _take_cancel(self, index: int, run_ids: tuple[int, ...]) -> None:
        stage = self.stages[index]
        stage.cancelled.update(i for i in run_ids if i > stage.last_run)
        if index > 0 and not self.spec.direct_cancel:
            self._send_cancel(index - 1, run_ids, self.spec.links[index].latency)
        running = stage.running
        if running is not None and isinstance(running.item, Decode) and not running.skipped \
                and running.item.speculative and running.item.run_id in stage.cancelled:
            running.skipped = True
            stage.ends = self.now
            stage.token += 1
            token = stage.token
            self.at(self.now, lambda: self._end(index, token))

    # --- stages -------------------------------------------------------------------------------

    def _poll(self, stage: _StageState) -> float:
        """Mean time until a waiting stage looks again."""
        over = self.spec.overheads
        waited = self.now - stage.idle_since
        return 0.5 * min(max(waited / 8, over.poll_least), over.poll)

    def _arrive(self, index: int, packet: _Packet) -> None:
        if index == len(self.stages):
            self._result(packet)
            return
        stage = self.stages[index]
        stage.queue.append(packet)
        if stage.running is None and not stage.waking:
            stage.waking = True
            self.at(self.now + self._poll(stage), lambda: self._wake(index))

    def _wake(self, index: int) -> None:
        self.stages[index].waking = False
        self._next(index)

    def _next(self, index: int) -> None:
        """Take the next message, if the stage is free."""
        stage = self.stages[index]
        if stage.running is not None or not stage.queue:
            if stage.running is None:
                stage.idle_since = self.now
            return
        packet = stage.queue.popleft()
        item = packet.item
        seconds = self.spec.overheads.hop
        if isinstance(item, Decode):
            dead = packet.skipped or item.run_id in stage.cancelled \
                or item.parent_id in stage.skipped
            packet.skipped = dead
            if not dead:
                seen = item.rows.positions + 1 + self.spec.context
                seconds += stage.spec.seconds(len(item.rows)) \
                    + stage.spec.attention(int(seen.sum()), int(seen.max()))
        stage.running, stage.started, stage.ends = packet, self.now, self.now + seconds
        stage.token += 1
        token = stage.token
        self.at(stage.ends, lambda: self._end(index, token))

    def _end(self, index: int, token: int) -> None:
        stage = self.stages[index]
        packet = stage.running
        if packet is None or token != stage.token:
            return  # a stopped run's planned end
        stage.running = None
        stage.busy += self.now - stage.started
        item = packet.item
        size = HEADER_BYTES
        if isinstance(item, Decode):
            stage.last_run = item.run_id
            stage.cancelled.discard(item.run_id)
            self.computed(index, item, stage.started, skipped=packet.skipped)
            if packet.skipped:
                stage.skipped.add(item.run_id)
            else:
                packet.spans.append((stage.started, self.now - stage.started))
                size += len(item.rows) * (ROW_BYTES + self.spec.row_bytes)
        if index + 1 < len(self.stages):
            self._send(index + 1, packet, size)
        elif isinstance(item, Decode):
            tapped = self.spec.row_bytes * len(item.rows) if self.taps else 0
            self._send(index + 1, packet, HEADER_BYTES + tapped)
        self._next(index)

    def _result(self, packet: _Packet) -> None:
        item = packet.item
        if not isinstance(item, Decode):
            return
        choices = self._evaluate(item, packet.skipped)
        if self.controller is not None and not packet.skipped and item.rows.outputs.all():
            when, took = self.issued[item.run_id], [seconds for _, seconds in packet.spans]
            lanes = self.scheduler.decoding
            self.controller.run_returned(
                len(item.rows), max(took), math.fsum(took),
                self.now - when,
                gaps(when, self.now, packet.spans) if lanes > 1 else () if lanes else None)
        taps = np.zeros((len(item.rows), 1), np.float32) \
            if self.taps and choices is not None else None
        self.feed(RunDone(item.run_id, choices, taps))

    def _evaluate(self, item: Decode, skipped: bool) -> tuple[Choice, ...] | None:
        """Runs come back in the order of issue, so one cache stands for those of all stages."""
        for op in item.ops:
            apply(self.target, op)
        if skipped:
            return None
        self.target.decode(item.rows)
        rows = item.rows
        return tuple(
            Choice(self.spec.pair.token(self.target.path(ids[0], pos), pos))
            for pos, ids, wanted in zip(rows.positions.tolist(), rows.seq_ids,
                                        rows.outputs.tolist(), strict=True) if wanted
        )

    # --- the draft ----------------------------------------------------------------------------

    def _draft_next(self) -> None:
        while self.working is None and self.jobs:
            job = self.jobs.popleft()
            if job.job_id in self.stopped:
                continue
            self.working = job
            self._start_job(job)

    def _start_job(self, job: StartDraft) -> None:
        steps = self.draft.steps(job)
        self.at(max(self.now, self.draft_free), lambda: self._draft_step(job, steps, 0.0, 0))

    def _draft_step(self, job: StartDraft, steps: Generator[int, None, Any], spent: float,
                    evaluated: int) -> None:
        """Go on to the next evaluation; the answer comes when the last one is over."""
        if job.job_id in self.stopped:
            steps.close()
            self.working = None
            self._draft_next()
            return
        try:
            rows = next(steps)
        except StopIteration as end:
            self.working = None
            guesses = sum(not proposal.alternative for proposal in end.value)
            if self.controller is not None and 0 < guesses == evaluated:
                self.controller.drafted(guesses, spent)
            self.feed(Drafted(job.job_id, end.value, evaluated, spent))
            self._draft_next()
            return
        longest = self.spec.context + self.spec.prompt + len(self.tokens)
        seconds = self.draft_seconds(rows) + self.spec.draft_attention(rows * longest, longest)
        self.draft_busy += seconds
        self.draft_free = self.now + seconds
        self.at(self.draft_free,
                lambda: self._draft_step(job, steps, spent + seconds, evaluated + rows))
