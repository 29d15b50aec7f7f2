"""Rank 0's side of serving: receives frames, submits requests to the head, returns tokens.

The loop owns the head (and with it MPI). It handles token ids and request ids; HTTP, text and
clients are in the HTTP process at the other end of the link.
"""

from __future__ import annotations

import time
from typing import Any, assert_never

import click
from msgspec import structs

from pipeinfer import __version__
from pipeinfer.cluster.balance import Balance
from pipeinfer.cluster.generate import decomposition_of
from pipeinfer.cluster.session import Session
from pipeinfer.core.grid import Grid
from pipeinfer.core.types import Request
from pipeinfer.errors import ClusterError, ContextOverflow, ModelError, ProtocolError, UsageError
from pipeinfer.models.layers import pooling_of
from pipeinfer.planning.wide import is_cut, widths_of
from pipeinfer.scheduler.events import Emit, Finish, Refuse
from pipeinfer.server.frames import (
    Abort,
    Bye,
    Changed,
    ClientFrame,
    Draining,
    Ended,
    News,
    NewsItem,
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
)
from pipeinfer.server.link import Link

_BATCH = 256  #: news items of one frame
_STATUS_BUSY, _STATUS_IDLE, _RUNS = 0.5, 5.0, 0.1  #: seconds between reports
_PACE_SECONDS = 10.0  #: between two checks whether a stage has become slow
WORTH = 1.25  #: least estimated speed-up for which layers are moved automatically
DRIFT = 1.5  #: multiple of a stage's best time from which it counts as slow
_RETRY = 0.02  #: seconds after which an unfinished send is tried again


class Engine:
    """Serves one session until `leave`.

    link: to the HTTP process. drain_seconds: for open requests to complete at the end.
    """

    def __init__(self, session: Session, link: Link, drain_seconds: float) -> None:
        self._session, self._link, self._balance = session, link, Balance(session)
        self._head = session.head
        self._eos = frozenset(session.tokenizer.eog_ids)
        self._drain_seconds = drain_seconds
        self._open: set[int] = set()
        self._asked_to_leave = False
        self._deadline: float | None = None  # of the drain
        self._watched = False
        self._status: dict[str, Any] = {}
        self._status_sent = self._status_seen = self._runs_sent = 0.0
        self._paced = 0.0
        link.on_frame = session.head.wake
        session.on_change = self._tell_change
        session.on_loss = lambda loss: link.send(Recovering(str(loss)))

    def leave(self) -> None:
        """Accept no more requests and end when the open ones have. Any thread or signal handler
        may call this."""
        self._asked_to_leave = True
        self._head.wake()

    def run(self) -> None:
        """Serve until `leave`. Raises ClusterError when a stage or the HTTP process dies."""
        self._link.send(Ready(self._facts()))
        while True:
            while (frame := self._link.take()) is not None:
                self._handle(frame)
            if self._link.problem:
                raise ProtocolError("a message of the HTTP process is malformed: "
                                    f"{self._link.problem}")
            if self._link.closed:
                raise ClusterError("the HTTP process has died, so no client can be served: start "
                                   "the server again")
            if self._asked_to_leave and self._drained():
                break
            self._news(self._head.next_news(self._patience()))
            self._report()
            self._verify()
            if not self._open and not self._asked_to_leave:
                self._mind_the_pace()
        self._link.send(Bye())

    # --- frames -------------------------------------------------------------------------------

    def _handle(self, frame: ClientFrame) -> None:
        match frame:
            case Submit():
                self._submit(frame)
            case Abort(request_id, reason):
                self._head.abort(request_id, reason)
            case Watch(on):
                self._watched = on
                self._head.observe(on)
            case Rebalance(number, preview=True):
                self._link.send(self._preview(number))
            case Rebalance(number):
                done = self._balance.rebalance()
                self._link.send(Rebalanced(number, bool(done), done or self._stays("stay")))
            case _:
                assert_never(frame)

    def _preview(self, number: int) -> Rebalanced:
        found = self._balance.preview()
        if found is None:
            return Rebalanced(number, False, self._stays("would stay"))
        grid = Grid(widths_of(found.held))
        stages = tuple(
            {"stage": grid.name(node).stage, "member": one.member, "rank": one.rank,
             "host": self._session.hosts[one.rank].host, "slices": len(one.slices),
             "of_slices": len(one.cut), "layers": [one.start, one.stop]}
            for node, one in enumerate(found.held, 1))
        return Rebalanced(number, True, found.why, stages, found.gain)

    def _stays(self, verb: str) -> str:
        """Return the message for a rebalance that moves nothing."""
        if is_cut(self._session.assembly.held):
            return (f"the slices {verb} where they are while a job runs: start it again with "
                    "--grid auto --set remeasure=true")
        return f"the layers {verb} as they are: no other plan is faster"

    def _submit(self, frame: Submit) -> None:
        if self._deadline is not None:
            self._fail(frame.id, "draining", "the server is shutting down")
            return
        if frame.params.embed and (why := self._session.no_embeddings):
            self._fail(frame.id, "request", why)
            return
        decompose = None
        try:
            if frame.decompose is not None:
                decompose = decomposition_of(
                    self._session, frame.decompose, len(frame.prompt))
        except (ModelError, UsageError) as error:
            self._fail(frame.id, "request", f"bad parameters: {error}")
            return
        self._open.add(frame.id)
        self._head.submit(Request(frame.id, frame.prompt, frame.max_tokens, frame.params, self._eos,
                                  frame.ignore_eos, frame.pool, frame.stores,
                                  tuple(one.media for one in frame.media), frame.salt), decompose,
                          frame.output)

    def _fail(self, request_id: int, kind: str, message: str) -> None:
        self._link.send(News((Refused(request_id, kind, message),)))

    # --- news ---------------------------------------------------------------------------------

    def _news(self, first: Emit | Finish | Refuse | None) -> None:
        items: list[NewsItem] = []
        news = first
        while news is not None:
            items.append(self._item(news))
            news = self._head.next_news(0.0) if len(items) < _BATCH else None
        if items:
            self._link.send(News(tuple(items)))

    def _item(self, news: Emit | Finish | Refuse) -> NewsItem:
        match news:
            case Emit(request_id, choice, speculated, _, text, reused):
                return Token(request_id, choice.token, speculated, choice.logprob, choice.top, text,
                             reused)
            case Finish(request_id, reason, stats):
                self._open.discard(request_id)
                return Ended(request_id, reason, structs.asdict(stats))
            case Refuse(request_id, error):
                self._open.discard(request_id)
                kind = "context" if isinstance(error, ContextOverflow) else "request"
                return Refused(request_id, kind, str(error))

    def _tell_change(self, message: str) -> None:
        """Report that other stages have taken over, layers have moved, or a draft was lost."""
        click.echo(f"pipeinfer: {message}", err=True)
        self._link.send(Changed(self._facts(), message))

    def _verify(self) -> None:
        """Print the effect of the last move of layers; if it was undone, that is reported as a
        change."""
        said = self._balance.verify()
        if said is not None and said != str(self._session.assembly.changes[-1]):
            click.echo(f"pipeinfer: {said}", err=True)

    def _mind_the_pace(self) -> None:
        """Between requests: move layers if a stage has become slow for good."""
        now = time.monotonic()
        auto = self._session.config.cluster.rebalance == "auto"
        if auto and now - self._paced >= _PACE_SECONDS and self._head.times.pace.settled:
            self._paced = now
            self._balance.rebalance(need=WORTH, drift=DRIFT)

    # --- reports ------------------------------------------------------------------------------

    def _patience(self) -> float:
        """Return the seconds for which the loop may sleep."""
        waits = [_STATUS_BUSY if self._open or self._watched else _STATUS_IDLE]
        if self._watched:
            waits.append(_RUNS)
        if self._link.pump():
            waits.append(_RETRY)
        if self._deadline is not None:
            waits.append(max(0.0, self._deadline - time.monotonic()))
        return min(waits)

    def _report(self) -> None:
        now = time.monotonic()
        if self._watched and now - self._runs_sent >= _RUNS:
            self._runs_sent = now
            if runs := self._head.take_runs():
                self._link.send(Runs(tuple(runs)))
        if now - self._status_seen < _STATUS_BUSY and self._open:
            return
        self._status_seen = now
        status = self._head.snapshot()
        if status != self._status or now - self._status_sent >= _STATUS_IDLE:
            self._status, self._status_sent = status, now
            self._link.send(Status(time.time(), status))

    def _facts(self) -> dict[str, Any]:
        session, limits, assembly = self._session, self._session.limits, self._session.assembly
        stages = [{"node": node, "stage": assembly.grid.name(node).stage, "member": holding.member,
                   "rank": holding.rank, "host": session.hosts[holding.rank].host,
                   "slices": len(holding.slices), "of_slices": len(holding.cut),
                   "sum_seconds": assembly.ready[node].sum_seconds,
                   "layers": [holding.start, holding.stop],
                   "exact_width": assembly.ready[node].exact_width,
                   "weight_bytes": assembly.ready[node].weight_bytes,
                   "cache_bytes": assembly.ready[node].cache_bytes,
                   "threads": assembly.ready[node].threads,
                   "backend": assembly.ready[node].backend}
                  for node, holding in enumerate(assembly.held, 1)]
        return {
            "model": session.model_name, "draft": session.draft_name,
            "policy": limits.policy.value, "n_ctx": limits.n_ctx,
            "cache_tokens": limits.cells or limits.n_ctx,
            "parallel": session.config.speculation.parallel, "exact_width": limits.exact_width,
            "speculation": session.config.speculation.speculation, "stages": stages,
            "ranks": [{"rank": one.rank, "host": one.host, "memory": one.memory,
                       "cores": one.cores, "does": self._does(one.rank)}
                      for one in session.hosts],
            "bits": session.bits, "no_embeddings": session.no_embeddings,
            "pooling": pooling_of(session.loaded.job.model),
            "n_embd": session.loaded.job.model.n_embd,
            "spares": list(assembly.spares), "lost": sorted(assembly.lost),
            "changes": [structs.asdict(change) for change in assembly.changes],
            "notes": session.notes, "load_seconds": session.load_seconds, "version": __version__,
        }

    def _does(self, rank: int) -> str:
        """Return what a rank does, for users: "this machine ..." begins the sentence."""
        assembly = self._session.assembly
        held = [f"layers {one.start} to {one.stop - 1}" + (
            f", {len(one.slices)} of {len(one.cut)} slices" if one.cut else "")
            for one in assembly.held if one.rank == rank]
        if held:
            return f"computes {'; '.join(held)}"
        if rank not in assembly.spares:
            return "is lost" if rank in assembly.lost else "computes no layers"
        why = self._session.plan.left_out.get(rank, "")
        slow = "; `layers` in a nodes file makes it compute" * ("faster without it" in why)
        return "is spare: it replaces a machine that is lost" + (f" ({why}{slow})" if why else "")

    # --- leaving ------------------------------------------------------------------------------

    def _drained(self) -> bool:
        """Begin or continue to drain; return whether every request has ended."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._drain_seconds
            self._link.send(Draining(self._drain_seconds))
            if count := len(self._open):
                click.echo(f"pipeinfer: note: shutting down: open requests ({count}) may take "
                           f"{self._drain_seconds:g} s; a second signal ends them at once",
                           err=True)
        if now >= self._deadline:
            for request_id in sorted(self._open):
                self._head.abort(request_id, "shutdown")
            # the aborts' own ends are news, which clients shall have before the process ends
            while self._open and (news := self._head.next_news(0.0)) is not None:
                self._news(news)
        return not self._open
