"""Node 0: feeds events to the scheduler and executes its instructions.

    schedule -> send -> receive

The head owns the request side of the job. It sends runs to the first stage, receives choices from
the last, passes draft jobs to a worker thread and returns tokens to its caller. It computes
nothing itself and has no tokenizer and no model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from msgspec import Struct

from pipeinfer.core import messages
from pipeinfer.core.control import (
    DraftStop,
    Pace,
    Progress,
    Ready,
    Received,
    Report,
    Standing,
    StoreFigures,
)
from pipeinfer.core.drafting import FeedDraft, StartDraft
from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import WorkerFailed as WorkerFailedMessage
from pipeinfer.core.policy import CancelPath
from pipeinfer.core.types import ALL_SEQS, END, Request, SeqRemove
from pipeinfer.errors import (
    LOSSES,
    LinkCut,
    Loss,
    ProtocolError,
    RankLost,
    StageFailed,
    TransportTimeout,
)
from pipeinfer.runtime.drafts import Drafts
from pipeinfer.runtime.link_watch import UNDER_WAY, LinkWatch
from pipeinfer.runtime.observers import LiveRuns, RunObserver, RunTrace, StageTimes, Tuner
from pipeinfer.scheduler import events
from pipeinfer.scheduler.controller import Controller
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.base import Decomposer
from pipeinfer.transport.base import Envelope, Port

_LAST_REPORTS_SECONDS = 2.0  #: for the reports of other stages once a stage has left


class HeadStats(Struct):
    """busy: seconds spent on events and instructions, without the draft's computation."""

    busy: float = 0.0


class Head:
    """The message loop of node 0.

    draft: source of proposals, or None.
    cancel_path: which stages receive a cancellation from the head: all, or only the last.
    trace: whether to record every run in the attribute `trace`.
    timeout: seconds without a result after which runs in flight count as lost.
    controller: tunes the scheduler's limits; None: they stay as they are.

    times: the attribute with the measured times of the stages.
    on_loss: called when a stage is lost. When it returns, other stages must be in place and
        `restart` must have been called. If it is None, the loss is raised to the caller of
        `next_news`.
    """

    def __init__(
        self, port: Port, grid: Grid, scheduler: Scheduler, draft: Drafts | None, *,
        cancel_path: CancelPath = CancelPath.DIRECT, trace: bool = False, timeout: float = 300.0,
        controller: Controller | None = None,
    ) -> None:
        self.stats = HeadStats()
        self.scheduler = scheduler
        self._port, self._grid, self._draft = port, grid, draft
        self._cancel_path, self._timeout = cancel_path, timeout
        self._kept: dict[int, StoreFigures] = {}  # by stage
        self._news: deque[events.Emit | events.Finish | events.Refuse] = deque()
        self._last_result = time.monotonic()
        self._woken = False
        self.trace = RunTrace() if trace else None
        self.times = StageTimes(grid)
        self._live: LiveRuns | None = None
        self._tuner: Tuner | None = None
        self._observers: list[RunObserver] = []
        self._set_controller(controller)
        self.on_loss: Callable[[Loss], None] | None = None
        self._links = self._watch_links()

    @property
    def tuned(self) -> bool:
        """Whether a controller tunes the scheduler's limits."""
        return self._tuner is not None

    def _set_controller(self, controller: Controller | None) -> None:
        self._tuner = None if controller is None else Tuner(self.scheduler, controller)
        self._attach()

    def _attach(self) -> None:
        """Collect the observers. The tuner is last, since it changes what is issued next."""
        everyone = (self.trace, self._live, self.times, self._tuner)
        self._observers = [observer for observer in everyone if observer is not None]

    def wake(self) -> None:
        """Make a `next_news` that waits return None soon. Any thread may call this."""
        self._woken = True
        self._port.wake()

    def reconfigure(self, limits: Limits, controller: Controller | None = None) -> None:
        """Set other limits, and another controller or none. Only while nothing runs."""
        self.scheduler.reconfigure(limits)
        self._set_controller(controller)

    @property
    def draft(self) -> Drafts | None:
        """The source of proposals."""
        return self._draft

    def replace(self, scheduler: Scheduler, draft: Drafts | None,
                controller: Controller | None) -> None:
        """Replace scheduler, draft and controller, and clear the caches of all stages.

        Raises ProtocolError unless the scheduler is idle.
        """
        if not self.scheduler.idle:
            raise ProtocolError("the scheduler can be replaced only while it is idle")
        if self._draft is not None:
            self._draft.close(self._timeout)
        scheduler.next_run = self.scheduler.next_run
        self.scheduler, self._draft = scheduler, draft
        self._set_controller(controller)
        self._forget_caches()

    def restart(self, grid: Grid, limits: Limits, controller: Controller | None,
                reason: str = "") -> None:
        """Continue over other stages: replay every request with the tokens that it has produced.

        grid: the new stages.
        limits: of the scheduler, for these stages.
        controller: tunes them; None: no tuning.
        reason: if given, requests that were running end with it instead of being replayed.
        """
        self._grid = grid
        self._links = self._watch_links()
        self._set_controller(controller)
        for observer in self._observers:
            observer.restarted()
        self._feed(events.Restart(limits, reason))
        self._last_result = time.monotonic()  # loading has its own deadline

    def submit(self, request: Request, decompose: Callable[[], Decomposer] | None = None,
               output: tuple[int, ...] = ()) -> None:
        """Queue a request. `next_news` returns its tokens and its terminal event.

        decompose: makes the decomposer of a response in threads.
        output: tokens that an earlier job has already returned; they are not returned again.
        """
        self._feed(events.Enqueue(request, output, decompose))

    def abort(self, request_id: int, reason: str) -> None:
        """End a request now. No effect if it has ended already."""
        self._feed(events.AbortRequest(request_id, reason))

    def next_news(self, timeout: float) -> events.Emit | events.Finish | events.Refuse | None:
        """Return the next token or terminal event.

        timeout: seconds to wait for it; after that, or after `wake`, None is returned.
        Raises WorkerFailed when a node reports a failure, RankLost when its rank is gone and
        LinkCut when the link between two nodes is cut, unless `on_loss` handles these;
        TransportTimeout when runs are in flight and no result has arrived for the head's deadline.
        A draft that is late instead is given up.
        """
        deadline = time.monotonic() + timeout
        # messages of an instant are handled before it sleeps: each may end the wait
        while not self._news:
            left = deadline - time.monotonic()
            if not self._receive() and (left <= 0 or self._woken):
                self._woken = False
                return None
            if not self._news and not self._has_mail() and not self._woken:
                self._port.wait(max(min(left, 1.0), 0.0), live=not self.scheduler.idle)
                self._check_deadline()
        return self._news.popleft()

    def observe(self, on: bool) -> None:
        """Start (`on`) or stop collecting what runs do, for `take_runs`."""
        if on != (self._live is not None):
            self._live = LiveRuns() if on else None
            self._attach()

    def take_runs(self) -> list[dict[str, Any]]:
        """Return what runs did since the last call; empty unless observed."""
        return [] if self._live is None else self._live.take()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the scheduler (`Scheduler.snapshot`), with seconds of work so far."""
        return self.scheduler.snapshot() | {
            "head_busy": self.stats.busy,
            "draft_busy": 0.0 if self._draft is None else self._draft.busy_seconds,
            "stage_seconds": self.times.pace.seconds, **self.times.members_now(),
            "stage_slowdown": self.times.pace.slowdown, **self._stored()}

    def _stored(self) -> dict[str, Any]:
        """Return, for the snapshot, what is on the stages' disks; empty if nothing is kept there.
        """
        stored, kept = self.scheduler.state.stored, list(self._kept.values())
        return {} if stored is None else {
            "stored_pieces": len(stored.names), "stored_read": stored.found,
            "stored_missed": stored.missed,
            **{f"stored_{name}": sum(getattr(one, name) for one in kept)
               for name in ("written", "dropped", "written_bytes", "held_bytes")}}

    def drain(self, timeout: float) -> None:
        """Wait for the runs that are still in flight after their request has ended.

        timeout: seconds. Raises TransportTimeout after it, and what `next_news` raises for losses.
        """
        deadline = time.monotonic() + timeout
        # runs of ended requests still occupy ids and cells, which the next job needs
        while self.scheduler.runs:
            if not self._receive():
                if time.monotonic() > deadline:
                    self._raise_timeout(timeout)
                self._port.wait(0.1)
                self._check_deadline()

    def shutdown(self, timeout: float) -> dict[int, dict[str, Any]]:
        """End every stage; return the reports of their members by node.

        timeout: seconds to wait for the reports. Those that come later are missing from the
            result.
        """
        self._first(messages.Shutdown())
        reports: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        # a report is worth a short wait, and a rank that sends none must not hold the exit up
        while len(reports) < self._grid.n_nodes and time.monotonic() < deadline:
            try:
                message = self._take()
            except LOSSES:  # all ranks are about to leave, so a loss does not matter any more
                deadline = min(deadline, time.monotonic() + _LAST_REPORTS_SECONDS)
                continue
            if message is None:
                self._port.wait(0.05)
            elif isinstance(message, Report) and (node := self._grid.node(message.port)):
                reports[node] = message.figures()
        return reports

    # --- receive ------------------------------------------------------------------------------

    def _has_mail(self) -> bool:
        return self._draft is not None and self._draft.has_news

    def _receive(self) -> bool:
        """Handle all messages that have arrived; return whether there were any."""
        try:
            return self._handle_mail()
        except LOSSES as loss:
            if isinstance(loss, StageFailed):
                loss.story = self.scheduler.story.lines()
            self._lose(loss)
            return True
        except ProtocolError as error:
            error.story = self.scheduler.story.lines()
            raise

    def _lose(self, loss: Loss) -> None:
        if self.on_loss is None:
            raise loss
        self.on_loss(loss)
        self._last_result = time.monotonic()

    def _handle_mail(self) -> bool:
        some = False
        # all that has arrived: what follows from one result may make another one useless
        while (message := self._take()) is not None:
            some = True
            match message:
                case messages.RunFinished(run_id, choices, taps=taps, loaded=loaded):
                    self._returned(message, events.RunDone(run_id, choices, taps, loaded))
                case messages.RunCancelled(run_id):
                    self._returned(message, events.RunDone(run_id, None))
                case Pace(port, runs, compute, waited):
                    self.times.pace.reported(self._grid.node(port), runs, compute, waited)
                case StoreFigures(port):
                    self._kept[port.stage] = message
                case Standing():
                    if self._links is not None:
                        self._links.hear(message)
                case Progress() | Ready() | Received() | Report():
                    pass  # of an earlier epoch
                case _:
                    raise ProtocolError(f"the head cannot handle {type(message).__name__}")
        # after the results, which may have decided what a draft was asked
        while self._draft is not None and (drafted := self._draft.take()) is not None:
            some = True
            self._last_result = time.monotonic()
            guesses = sum(not proposal.alternative for proposal in drafted.proposals)
            timed = drafted.rows == guesses or self._draft.free  # no accepted tokens among the rows
            passes = guesses if timed else min(drafted.rows, guesses + 1)
            if self._tuner is not None and guesses and passes and (
                    timed or self._tuner.time_sharing):
                self._tuner.drafted(passes, drafted.seconds)
            self._feed(drafted)
        return some

    def _take(self) -> messages.Message | None:
        envelope = take_result(self._port)
        return None if envelope is None else envelope.message

    def _returned(self, message: messages.RunFinished | messages.RunCancelled,
                  event: events.RunDone) -> None:
        self._last_result, when = time.monotonic(), time.time()
        run = self.scheduler.runs.get(message.run_id)
        self._feed(event)  # before the observers: a stage may be waiting for the next run
        for observer in self._observers:
            observer.returned(message, run, when)

    def _check_deadline(self) -> None:
        now = time.monotonic()
        if self.scheduler.idle:
            self._last_result = now
        silence = now - self._last_result
        if silence > self._timeout:
            draft = None if self.scheduler.runs else self._draft
            if draft is None:
                self._raise_timeout(self._timeout)
            draft.lose(f"the draft has not answered for {self._timeout:.1f} s: it hangs, or "
                             "needs a longer --timeout")
            self._last_result = now
        if self._links is None:
            return
        if silence <= self._links.patience:
            self._links.rest()
        elif (link := self._links.turn()) is not None:
            source, target = map(self._port.rank_of, link)
            self._lose(LinkCut(source, target, silence))

    def _watch_links(self) -> LinkWatch | None:
        """Return the detector of cut links between stages; None if stages exchange nothing."""
        return LinkWatch(self._port, self._grid, UNDER_WAY * self._timeout)

    def _raise_timeout(self, seconds: float) -> NoReturn:
        peer = self._port.rank_of(self._grid.leaders[-1])
        raise TransportTimeout(rank=0, peer=peer, tag=messages.Tag.RESULT.name,
                               run_id=min(self.scheduler.runs, default=None), seconds=seconds)

    # --- schedule and send --------------------------------------------------------------------

    def _feed(self, event: events.Event) -> None:
        start = time.perf_counter()
        if self.scheduler.idle:
            self._last_result = time.monotonic()
        for instruction in self.scheduler.handle(event):
            self._execute(instruction)
        for observer in self._observers:
            observer.handled(self.scheduler.runs, time.time())
        self.stats.busy += time.perf_counter() - start

    def _execute(self, instruction: events.Instruction) -> None:
        match instruction:
            case messages.Decode(run_id):
                for observer in self._observers:
                    observer.issued(self.scheduler.runs[run_id], time.time())
                self._first(instruction)
            case messages.CacheOps() | messages.LaneOpen() | messages.LaneClose():
                self._first(instruction)
            case messages.Cancel():
                self._cancel(instruction)
            case StartDraft():
                if self._draft is None:
                    raise ProtocolError("a draft is needed, but none is loaded: give one with -md, "
                                        "or use --policy iterative")
                self._draft.start(instruction)
            case FeedDraft():
                if self._draft is not None:
                    self._draft.feed(instruction)
            case DraftStop(job_id):
                if self._draft is not None:
                    self._draft.stop(job_id)
            case events.Emit() | events.Finish() | events.Refuse():
                self._news.append(instruction)
            case _:
                raise ProtocolError(f"unknown instruction {instruction!r}")

    def _first(self, message: messages.Message) -> None:
        for node in self._grid.successors(0):
            self._port.send(node, messages.Tag.TRANSACTION, message)

    def _forget_caches(self) -> None:
        self._first(messages.CacheOps((SeqRemove(ALL_SEQS, 0, END),)))

    def _cancel(self, cancel: messages.Cancel) -> None:
        for observer in self._observers:
            observer.cancelled(cancel.run_ids, time.time())
        leaders = self._grid.leaders[::-1]
        for node in leaders if self._cancel_path is CancelPath.DIRECT else leaders[:1]:
            self._port.send(node, messages.Tag.CANCEL, cancel)


def take_result(port: Port) -> Envelope | None:
    """Return the next message for the head, or None.

    Raises WorkerFailed if a node has reported a failure, RankLost if a rank is newly found dead.
    """
    failure = port.take(messages.Tag.ERROR)
    if failure is not None and isinstance(failure.message, WorkerFailedMessage):
        raise_worker_failed(failure.message, port.rank_of(failure.message.node))
    if lost := port.new_losses():
        raise RankLost(min(lost), "is dead")
    return port.take(messages.Tag.RESULT)


def raise_worker_failed(message: WorkerFailedMessage, rank: int) -> None:
    """Raise a node's last message as a WorkerFailed of its rank, with its exit code."""
    error = StageFailed(
        rank=rank, host=message.host,
        run_id=None if message.run_id < 0 else message.run_id,
        summary=message.summary, remote_traceback=message.traceback,
    )
    error.exit_code = message.exit_code
    raise error
