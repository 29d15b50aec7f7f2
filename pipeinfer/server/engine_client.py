"""The HTTP process's view of the engine: open choices, the engine's state, watchers.

One object per process, used in its event loop only. It handles frames and choices, no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, assert_never

from msgspec import structs

from pipeinfer.core.types import Media
from pipeinfer.errors import PipeinferError, RequestError
from pipeinfer.models.media import Pictures
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.choice import Generation, PromptProgress
from pipeinfer.server.engines import ConnectedEngine, vocabulary
from pipeinfer.server.errors import ApiError, Failure
from pipeinfer.server.frames import (
    STOPPED,
    Abort,
    Bye,
    Changed,
    ClientFrame,
    Draining,
    Ended,
    EngineFrame,
    Failed,
    Loading,
    News,
    NewsItem,
    Picture,
    Ready,
    Rebalance,
    Rebalanced,
    Recovering,
    Refused,
    Runs,
    Status,
    Submit,
    Token,
    Watch,
    loading_text,
)
from pipeinfer.server.keys import Meter
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.other_models import OtherModels
from pipeinfer.server.pictures import File, media_of
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.settings import Settings

State: TypeAlias = Literal[
    "loading", "ready", "asleep", "restarting", "draining", "failed", "stopped"]
_AWAY = ("asleep", "restarting")  #: states in which another engine follows
_MOST_WATCHERS = 64
_log = logging.getLogger("pipeinfer.server")
_ABORTED = {
    "poison": Failure("internal", "stages failed repeatedly while working on this request, so it "
                                  "was abandoned to protect the others"),
    "shutdown": Failure("shutdown", f"{STOPPED}, and the time for running requests is over"),
    "timeout": Failure("timeout", "the request took longer than the server allows "
                                  "(--request-timeout)"),
}


class EngineClient:
    """The open choices and the state of the engine that serves; `reason`: why it failed.

    outlives: whether another engine may follow a failed one. Until then requests wait, and the new
        engine continues them after the tokens that they have.
    url: the address for clients.
    renewed: called when the settings have changed.
    prepare: called with a vocabulary before requests of its model are taken.
    """

    def __init__(self, settings: Settings, metrics: Metrics, *, outlives: bool = False,
                 url: str = "") -> None:
        self.settings, self.metrics, self.outlives = settings, metrics, outlives
        self.url = url
        self.others = OtherModels()
        self.pictures: Pictures | None = None
        self._work = ThreadPoolExecutor(1, "pictures")  # the projector has one process
        self.renewed: Callable[[], None] = _nothing
        self.prepare: Callable[[Tokenizer], Awaitable[None]] = _no_work
        self.state: State = "loading"
        self.reason = ""
        self.recovering = ""  #: why stages are taken over now; requests wait for that
        self.loading: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.tokenizer: Tokenizer | None = None
        self.open: dict[int, Generation] = {}  #: choices that have not ended
        self.meters: dict[str, Meter] = {}  #: by API key; a reload changes none that stays
        self.left = asyncio.Event()  #: set when the engine has gone: sent Bye, failed or died
        self.waiting = 0  #: requests that wait for admission
        self.newest = 0  #: id of the choice that came last
        self._ids = itertools.count(1)
        self._serves: ConnectedEngine | None = None
        self._new_model = False  #: whether the next one may have another model under the same name
        self._moving = False  #: whether the engine's own end is not that of the service
        self._tasks: set[asyncio.Task[None]] = set()
        self._admits = asyncio.Event()
        self._admits.set()
        self._watchers: set[Watcher] = set()
        self._rebalances: dict[int, asyncio.Future[Rebalanced]] = {}
        self._patience: asyncio.TimerHandle | None = None
        self._gave_up = False  #: the engine has been away for too long

    # --- requests -----------------------------------------------------------------------------

    async def admission(self) -> None:
        """Return when a new request may enter, or after --set restart_timeout."""
        if self._admits.is_set() or self.waiting >= self.settings.most_open:
            return
        self.waiting += 1
        try:
            # a move that never ends must not hold clients for ever
            async with asyncio.timeout(self.settings.serve.restart_timeout):
                await self._admits.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1

    async def model(self, name: str | None) -> None:
        """Return when this model is served, where it is one of several. Raises ApiError."""
        # while it waits for its turn to go on, another one may have come
        while name != self.settings.name and name in self.others.names:
            if self.waiting + self.others.waiting >= self.settings.most_open:
                raise ApiError(429, "enough requests wait for another model; try again later",
                               code="queue_full")
            await self.others.wait(name, self.settings.serve.restart_timeout)

    @property
    def shown(self) -> str:
        """The state as the page shows it: `state`, or recovering."""
        return "recovering" if self.state == "ready" and self.recovering else self.state

    def hold(self, on: bool) -> None:
        """Hold new requests from now on, or admit all of them."""
        if on:
            self._admits.clear()
        else:
            self._admits.set()

    @property
    def loading_text(self) -> str:
        """How far the stages are that are not ready yet; "" if none loads."""
        return loading_text(self.loading) if self.state == "loading" else ""

    def check_ready(self) -> Tokenizer:
        """Return the vocabulary if requests can be accepted. Raises ApiError (503) otherwise."""
        waits = self.state in _AWAY and not self._gave_up
        if (self.state == "ready" or waits) and self.tokenizer is not None:
            return self.tokenizer
        if self.state == "restarting":
            raise ApiError(503, f"the cluster has failed: {self.reason}; it is being started "
                                "again", code="cluster_failed")
        if self.state in ("loading", "ready"):
            how_far = f" ({text})" if (text := self.loading_text) else ""
            raise ApiError(503, f"the model is still loading{how_far}; try again shortly",
                           code="loading")
        if self.state == "failed":
            raise ApiError(503, f"the cluster has failed: {self.reason}", code="cluster_failed")
        raise ApiError(503, "the server is shutting down", code="shutting_down")

    def check_room(self, count: int) -> None:
        """Raise ApiError: 400 for more choices than are ever allowed, 429 for more than are
        allowed now. No request overtakes those that wait for admission."""
        if not self._admits.is_set():
            raise ApiError(429, "the server is being changed and enough requests wait; try again "
                                "later", code="queue_full")
        most = self.settings.most_open
        if count > most:
            raise ApiError(400, f"the request asks for {count} choices; this server allows at most "
                                f"{most}", param="n", code="too_many_choices")
        if len(self.open) + count > most:
            raise ApiError(429, f"the queue is full: {self.settings.parallel} requests are running "
                                f"and {self.settings.serve.queue} are waiting; try "
                                "again later", code="queue_full")

    def new_id(self) -> int:
        return next(self._ids)

    def add(self, generation: Generation, request: EngineRequest) -> None:
        """Send a choice of a request to the engine."""
        request_id, (prompt, params) = generation.request_id, request.choice(generation.index)
        self.newest = request_id
        if self.state == "asleep":
            self._await_engine("it slept, and wakes for a request")
        meter = generation.meter
        # what a process before this one had begun has no client here
        pool = meter.number if self.settings.serve.remember_answers and not generation.before else 0
        frame = Submit(
            request_id, tuple(prompt), request.max_tokens, params, request.ignore_eos,
            request.decompose, pool=pool, stores=request.stores, salt=request.salt)
        self.open[request_id] = generation
        if not generation.index % request.n:  # a prompt counts once for all its choices
            meter.used(generation.counts.prompt, time.monotonic())
        if request.files:
            self._run(self._compute(generation, frame, request.files))
        else:
            self._take(generation, frame)

    def _take(self, generation: Generation, frame: Submit) -> None:
        generation.frame = frame
        if self.state == "ready":
            self._hand_over(generation)

    async def _compute(self, generation: Generation, frame: Submit, files: Sequence[File]) -> None:
        """Compute the rows of a choice's pictures, and send it to the engine."""
        def rows() -> tuple[Media, ...]:
            return media_of(files, self.pictures) if frame.id in self.open else ()

        try:
            media = await asyncio.get_running_loop().run_in_executor(self._work, rows)
            if (used := self.pictures) is not None:
                self.metrics.pictures(used.computed, used.found, used.seconds)
            if frame.id in self.open:
                self._take(generation, structs.replace(frame, media=tuple(map(Picture.of, media))))
        except RequestError as error:
            if self.open.pop(frame.id, None) is not None:
                generation.fail(Failure("request", str(error)))
                self.metrics.ended(generation, "error")

    def abort(self, generation: Generation, reason: str) -> None:
        """End a choice whose client has gone. Without effect if it has ended."""
        if generation.request_id not in self.open or generation.ended:
            return
        if self.state in ("restarting", "loading") or generation.frame is None:
            self._end(generation, reason, {})
        else:
            self._send(Abort(generation.request_id, reason))

    async def rebalance(self, timeout: float, *, preview: bool = False) -> Rebalanced:
        """Let the engine move layers, or (preview) return what that would change.

        timeout: seconds. Raises ApiError.
        """
        self.check_ready()
        if self.state != "ready":
            raise ApiError(503, f"the cluster is {self.state}", code="cluster_failed")
        if self._rebalances:
            raise ApiError(429, "the layers are already being redistributed", code="rebalancing")
        number = next(self._ids)
        answer = self._rebalances[number] = asyncio.get_running_loop().create_future()
        self._send(Rebalance(number, preview))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise ApiError(504, f"no answer within {timeout:g} s", code="timeout") from None
        finally:
            self._rebalances.pop(number, None)

    # --- watchers -----------------------------------------------------------------------------

    def check_watchers(self) -> None:
        """Raise ApiError (429) if too many clients watch."""
        if len(self._watchers) >= _MOST_WATCHERS:
            raise ApiError(429, f"{_MOST_WATCHERS} clients are already watching the pipeline",
                           code="too_many_watchers")

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Yield a Watcher that receives the engine's status and runs while the block lasts."""
        watcher = Watcher()
        self._watchers.add(watcher)
        if len(self._watchers) == 1:
            self._send(Watch(True))
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._send(Watch(False))

    # --- frames -------------------------------------------------------------------------------

    def handle(self, frame: EngineFrame) -> None:
        """Apply one frame of the engine to choices, status and watchers."""
        match frame:
            case News(items):
                for item in items:
                    self._item(item)
            case Status(at, figures):
                self.status = {"op": "status", "time": at, **figures}
                self.metrics.status(figures, self.facts)
                self._show(self.status)
                self._progress(figures.get("lanes", ()))
            case Runs(items):
                self._show({"op": "runs", "items": items})
            case Loading(stages):
                self.loading = stages
            case Ready(facts):
                self._welcome(facts)
            case Recovering(message):
                self.recovering = message
                self._show_state()
            case Changed(facts):
                self.facts, self.recovering = facts, ""
                self._show({"op": "facts", "state": self.state, "facts": self.facts})
            case Rebalanced(number):
                waiting = self._rebalances.pop(number, None)
                if waiting is not None and not waiting.done():  # its client may have left
                    waiting.set_result(frame)
            case Draining() | Bye() if self._moving:
                pass
            case Draining():
                self.state = "draining"
                self._show({"op": "state", "state": self.state})
            case Failed(message):
                self._lost(message)
            case Bye():
                self.state = "stopped"
                self._end_all(Failure("shutdown", "the server has shut down"))
            case _:
                assert_never(frame)

    def _progress(self, lanes: Iterable[dict[str, Any]]) -> None:
        for lane in lanes:
            if (one := self.open.get(lane["request"])) is not None:
                one.read(PromptProgress(
                    lane["prompt"], min(lane["prefilled"], lane["prompt"]), lane["reused"]))

    def _item(self, item: NewsItem) -> None:
        generation = self.open.get(item.id)
        if generation is None:
            return
        match item:
            case Token():
                self._token(generation, item)
            case Ended(_, reason, stats):
                self._end(generation, reason, stats)
            case Refused(request_id, kind, message):
                del self.open[request_id]
                generation.fail(Failure(kind, message))
                self.metrics.ended(generation, "error")
            case _:
                assert_never(item)

    def _token(self, generation: Generation, item: Token) -> None:
        before = generation.counts.last
        if not generation.rows:
            generation.reused = item.reused
        try:
            if generation.push((item.token, item.speculated, item.logprob, item.top, item.seen)):
                self._send(Abort(generation.request_id, "stop"))
        except Exception as error:  # one request's trouble is not the others'
            _log.exception("token %r cannot be handled", item.token)
            self._send(Abort(generation.request_id, "error"))
            generation.fail(Failure("internal", f"a token cannot be handled: {error}"))
        self.metrics.token(generation, before)

    def _end(self, generation: Generation, reason: str, stats: dict[str, Any]) -> None:
        del self.open[generation.request_id]
        if (failure := _ABORTED.get(reason)) is not None and not generation.stopped:
            generation.stats = stats
            generation.fail(failure)
        generation.end(reason, stats)
        self.metrics.ended(generation, reason)

    # --- engines that come and go -------------------------------------------------------------

    def enter(self, engine: ConnectedEngine) -> None:
        """Let this engine serve; the one before it has gone, or is dropped."""
        before, self._serves = self._serves, engine
        if before is not None:
            before.close()
            if not self._over():
                self._lost("another rank 0 has come")
        old, self.settings = self.settings, engine.settings
        if before is not None and (self._new_model or engine.settings.model != old.model
                                   or engine.settings.projector != old.projector):
            self._end_all(Failure("failed", "the server has come back with another model"))
            if self.tokenizer is not None:  # in a thread: a text may still be on its way
                asyncio.get_running_loop().run_in_executor(None, self.tokenizer.apart.close)
            self.tokenizer = None
        if engine.settings != old or self._new_model:
            self.renewed()
        self._new_model = False
        # beside the vocabulary: the engine says meanwhile how far it is
        work = [self._read(engine)]
        if self.tokenizer is None:
            work.append(self.load(engine.settings))
        for one in work:
            self._run(one)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, engine: ConnectedEngine) -> None:
        reason = await engine.read(
            self.handle, until=lambda: engine is not self._serves or self._over())
        if engine is self._serves:
            if not self._over():
                self._lost(reason)
            if self.state not in _AWAY:
                self.left.set()

    def _over(self) -> bool:
        """Whether further frames of the engine are to be ignored."""
        return self.state in ("failed", "stopped")

    async def load(self, settings: Settings) -> None:
        """Load the vocabulary and what needs it, while the stages load."""
        try:
            tokenizer = await asyncio.to_thread(vocabulary, settings.model)
            await asyncio.to_thread(self._use_projector, settings)
            await self.prepare(tokenizer)
            if settings is self.settings:
                self.tokenizer = tokenizer
                self._admit()
        except Exception as error:  # any, or /health would stay at "loading"
            expected = isinstance(error, PipeinferError)
            why = str(error) if expected else f"{type(error).__name__}: {error} (this is a bug)"
            _log.error("%s", why, exc_info=not expected)
            self.fail(why)

    def _use_projector(self, settings: Settings) -> None:
        """Start the projector of a model. Raises RequestError, if the user has named it."""
        options = settings.projector
        self.close()
        self.pictures = None
        if options is not None:
            found = Pictures(options)
            try:
                found.ready()
                self.pictures = found
            except RequestError as error:
                found.close()
                if options.named:
                    raise
                _log.warning("%s is not used: %s", options.path, error)

    def close(self) -> None:
        """End the projector's process, also while it computes."""
        if self.pictures is not None:
            self.pictures.close()

    def move(self, why: str, new_model: bool) -> None:
        """Prepare for the end of the engine: its further frames count, except for Bye and
        Draining."""
        self._moving, self._new_model = True, new_model
        self._lost(why)

    def sleep(self) -> None:
        """Prepare for the end of the engine, as in `move`, until the next request; without effect
        if one is open."""
        if self.state == "ready" and not (self.open or self._rebalances):
            self._moving, self.state = True, "asleep"
            self._show_state()

    # --- their states -------------------------------------------------------------------------

    def _welcome(self, facts: dict[str, Any]) -> None:
        """Handle an engine that accepts requests: send it those that wait."""
        if self._patience is not None:
            self._patience.cancel()
        if self.state == "restarting":
            self.metrics.restarted()
        self._patience, self._gave_up, self.reason, self.recovering = None, False, "", ""
        self._moving = False
        self.state, self.facts, self.status = "ready", facts, {}
        if self._watchers:
            self._send(Watch(True))
            self._show({"op": "facts", "state": self.state, "facts": facts})
        for one in list(self.open.values()):
            if one.ended:  # it failed here, and the engine that was to end it has gone
                self._end(one, "error", {})
            elif one.frame is not None:  # else its pictures are still being computed
                self._hand_over(one)
        self._admit()

    def _admit(self) -> None:
        """Let requests go on that wait for this engine, once it and the vocabulary are there."""
        if self.state == "ready" and self.tokenizer is not None:
            self._admits.set()
            self.others.came(self.settings.name)

    def _hand_over(self, one: Generation) -> None:
        """Let the engine continue a choice after the tokens that it has."""
        frame, bits = one.frame, str(self.facts.get("bits", ""))
        assert frame is not None
        if one.stopped or len(one.rows) >= frame.max_tokens:
            self._end(one, "length", {})  # the frame with its end was lost with the engine
            return
        if one.bits is not None:
            one.restarts += 1
            # clients may have tokens that an earlier process did not write
            one.same_bits &= one.bits == bits or not (one.rows or one.before)
        one.bits = bits
        self._send(structs.replace(frame, output=tuple(row[0] for row in one.rows)))

    def _lost(self, reason: str) -> None:
        """Handle an engine that has gone or cannot continue."""
        if not self.outlives or self.state in ("failed", "stopped"):
            self.fail(reason)
        elif self.state not in _AWAY:
            self._end_rebalances(reason)
            self._await_engine(reason)

    def _await_engine(self, reason: str) -> None:
        self.state, self.reason = "restarting", reason
        # open requests wait for the next engine, but not for ever
        self._patience = asyncio.get_running_loop().call_later(
            self.settings.serve.restart_timeout, self._give_up)
        self._show_state()

    def _give_up(self) -> None:
        self._gave_up = True
        self._end_all(Failure("failed", f"the cluster has failed: {self.reason}; it was not back "
                                        f"within {self.settings.serve.restart_timeout:g} s "
                                        "(--set restart_timeout)"))

    def fail(self, reason: str) -> None:
        """Record that the engine is lost for good: every open choice ends with an error."""
        self.state, self.reason = "failed", reason
        self._admits.set()  # those that wait get this error
        self._end_all(Failure("shutdown", reason) if reason == STOPPED else
                      Failure("failed", f"the cluster has failed: {reason}"))

    def leave(self) -> None:
        """Record that no engine follows. Waiting requests are admitted, so that they get an
        error."""
        if self.state != "stopped":
            self.fail(self.reason or "the server was ended")
        self.left.set()
        self._admits.set()

    def _end_all(self, failure: Failure) -> None:
        for one in self.open.values():
            one.fail(failure)
            self.metrics.ended(one, "error")
        self.open.clear()
        self._end_rebalances(failure.message, failure.kind)
        self._show_state()

    def _end_rebalances(self, message: str, kind: str = "failed") -> None:
        for waiting in self._rebalances.values():
            if not waiting.done():
                waiting.set_exception(ApiError(503, message, code=(
                    "cluster_failed" if kind == "failed" else "shutting_down")))

    def _show_state(self) -> None:
        self._show({"op": "state", "state": self.shown, "reason": self.reason or self.recovering,
                    "planned": self._moving, "time": time.time()})

    def _show(self, frame: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.push(frame)

    def _send(self, frame: ClientFrame) -> None:
        if self._serves is not None:
            self._serves.send(frame)


def _nothing() -> None:
    pass


async def _no_work(_: Tokenizer) -> None:
    pass


_FRAMES = 64  #: most frames that wait for a slow client


@dataclass(slots=True, eq=False)
class Watcher:
    """A client of the pipeline page. The oldest frames are dropped if it is too slow."""

    frames: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_FRAMES))
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, frame: dict[str, Any]) -> None:
        """Queue a frame for the client and wake its stream."""
        self.frames.append(frame)
        self.news.set()
