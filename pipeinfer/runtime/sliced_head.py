"""A prediction head that the members of a wide stage have in slices, at one of these members.

    rank 0 -> each member: DraftSetup, StartDraft; -> the leader: FeedDraft
    leader -> each other member: Decode, for each run of the head; DraftStop, at the end of a job
    each other member -> leader: Part, its best logits
    leader -> rank 0: DraftReady (as each member), DraftDone

Jobs travel with the runs of the target, so all members do both in the same order, and both use the
stage's sums. During a job the leader proposes, and the other members compute the runs that it
sends; rank 0 takes no part, and a job is not stopped. This module loads no model and contains no
proposer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from pipeinfer import host
from pipeinfer.backends.base import Backend, apply
from pipeinfer.backends.composed import WideHead
from pipeinfer.backends.team import PeerSilent, Team
from pipeinfer.core.control import DraftReady, DraftSetup, DraftStop
from pipeinfer.core.drafting import FeedDraft, Prefix, Proposal, StartDraft
from pipeinfer.core.messages import NO_RUN, Decode, Message, Part, Tag, Verdict
from pipeinfer.core.sampling import log_total
from pipeinfer.core.types import (
    ALL_SEQS,
    END,
    FloatArray,
    Rows,
    SeqCopy,
    SeqKeep,
    SeqOp,
    SeqRemove,
)
from pipeinfer.errors import ClusterError, NoCells, ProtocolError
from pipeinfer.host import host_name
from pipeinfer.runtime.draft_rank import Loader, done, failure
from pipeinfer.runtime.drafts import LANES
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.strategies.proposers.base import Proposer, ReadsRows
from pipeinfer.strategies.proposers.target_head import RowHead
from pipeinfer.transport.base import Dismissed, Port, Regrouped

_FEW = 64  #: logits of a member that are sent; a proposer ranks fewer


class HeadSlices:
    """The slices of a head that a rank has loaded; they stay when other members take part.

    rank: its number in the job
    loader: loads them
    """

    def __init__(self, rank: int, loader: Loader) -> None:
        self.rank, self.loader, self.threads = rank, loader, 0
        self._setup: DraftSetup | None = None
        self._loaded: dict[int, Backend] = {}

    def load(self, setup: DraftSetup, own: Sequence[int]) -> list[Backend]:
        """Return slices with empty caches, and release all others. Raises PipeinferError."""
        kept = own if setup == self._setup else ()
        for index in [one for one in self._loaded if one not in kept]:
            self._loaded.pop(index).close()
        self._setup = setup
        for index in own:
            if index not in self._loaded:
                self._loaded[index], self.threads = self.loader.backend(
                    structs.replace(setup, index=index))
            self._loaded[index].seq_rm(ALL_SEQS, 0, END)
        return [self._loaded[index] for index in own]


class HeadMember:
    """A member's side of a sliced head.

    nodes: the members, the leader first
    timeout: seconds to wait for another member
    """

    def __init__(self, port: Port, nodes: Sequence[int], team: Team, slices: HeadSlices,
                 timeout: float, pulse: Pulse) -> None:
        self._port, self._team, self._slices = port, team, slices
        self._leader, self._others = nodes[0], tuple(nodes[1:])
        self._timeout, self._pulse = timeout, pulse
        self._head: WideHead | None = None
        self._whole: SlicedHead | None = None
        self._proposer: Proposer | None = None
        self._tokens: dict[int, list[int]] = {}

    def handle(self, message: DraftSetup | FeedDraft | StartDraft) -> None:
        """Handle a message of rank 0. An error in loading or of the proposer ends the head and is
        sent there. Raises ClusterError where a member fails during a job, Regrouped and Dismissed.
        """
        try:
            match message:
                case DraftSetup():
                    self._load(message)
                case FeedDraft():
                    if isinstance(self._proposer, ReadsRows):
                        self._proposer.feed(message)
                case StartDraft() if self._team.shape.leads:
                    self._lead(message)
                case _:
                    self._follow()
        except (Regrouped, Dismissed):
            raise
        except Exception as error:  # rank 0 goes on without proposals, and logs the reason
            if isinstance(error, ClusterError) and isinstance(message, StartDraft):
                raise
            self._proposer = None
            self._port.send(0, Tag.DRAFT, failure(self._slices.rank, error))

    def close(self) -> None:
        """End the threads; the slices stay loaded."""
        if self._head is not None:
            self._head.close()

    def _load(self, setup: DraftSetup) -> None:
        self._pulse.beat("loads its slice of the head")
        self.close()
        own = self._team.shape.own
        self._head = WideHead(self._slices.load(setup, own), self._team)
        if self._team.shape.leads:
            self._whole = SlicedHead(self._head, self._port, self._others, self._answers)
            self._proposer = self._slices.loader.proposer(setup, self._whole)
        self._pulse.settle()
        self._port.send(0, Tag.DRAFT, DraftReady(
            self._slices.rank, host_name(), self._head.info.weight_bytes, self._slices.threads,
            host.memory_parts()["rss"]))

    def _lead(self, job: StartDraft) -> None:
        """Propose, and send the result to rank 0."""
        start, rows, error = time.perf_counter(), 0, None
        found: Sequence[Proposal] | None = None
        tokens = self._tokens.pop(job.lane, [])
        if job.sent > len(tokens):
            raise ProtocolError(f"a job of lane {job.lane} lacks some of its first {job.sent} "
                                "tokens")
        tokens[job.sent:] = job.accepted
        self._tokens[job.lane] = tokens
        if len(self._tokens) > LANES:
            del self._tokens[next(iter(self._tokens))]
        if self._proposer is not None and self._whole is not None:
            params, before = job.params, self._proposer.rows_evaluated
            self._whole.few = params.temperature <= 0 and not (
                params.logit_bias or params.reads_path)
            try:
                found = self._proposer.propose(
                    structs.replace(job, sent=0, accepted=Prefix(tokens)), lambda: False)
            except (ClusterError, Regrouped, Dismissed):
                raise
            except Exception as failed:
                error = failed
            rows = self._proposer.rows_evaluated - before
        for node in self._others:
            self._port.send(node, Tag.DRAFT, DraftStop(job.job_id))
        if error is not None:
            raise error
        self._port.send(0, Tag.DRAFT, done(job.job_id, found, rows, time.perf_counter() - start))

    def _follow(self) -> None:
        """Compute the runs of a job."""
        # DraftStop ends the job: the leader alone knows how many runs it takes
        while isinstance(run := self._next(), Decode):
            assert self._head is not None  # jobs come when all members have loaded
            for op in run.ops:
                apply(self._head, op)
            try:
                tokens, logits = self._head.step(run.run_id, run.rows, run.hidden)
            except NoCells:  # as at the leader, which removes some
                continue
            if len(logits):
                self._port.send(self._leader, Tag.DRAFT, Part(
                    self._team.shape.member, 0, run.run_id, len(logits), Verdict.GO,
                    packed(tokens, logits, few=run.speculative)))

    def _answers(self, number: int) -> list[Part]:
        """Wait for the other members' logits of a run."""
        found: list[Part] = []
        # parts of an earlier run may still arrive, after the leader had no cells for it
        while len(found) < len(self._others):
            if isinstance(part := self._next(), Part) and part.run_id == number:
                found.append(part)
        return found

    def _next(self) -> Message:
        deadline = time.monotonic() + self._timeout
        # bounded, so that a silent member is replaced like one of the stage
        while (envelope := self._port.take(Tag.DRAFT)) is None:
            if time.monotonic() > deadline:
                raise PeerSilent(rank=self._slices.rank, peer=self._port.rank_of(self._leader),
                                 tag=Tag.DRAFT.name, run_id=None, seconds=self._timeout)
            self._pulse.beat("drafts")
            self._port.wait(0.2, tag=Tag.DRAFT)
        return envelope.message


class SlicedHead:
    """A head in slices as one backend, used by the leader.

    own: its slices; others: the other members' nodes
    answers: waits for their logits of a run
    few: the attribute that says whether the best logits suffice

    Sequence operations are sent together with the next rows.
    """

    def __init__(self, own: WideHead, port: Port, others: tuple[int, ...],
                 answers: Callable[[int], Sequence[Part]]) -> None:
        self._head, self._port, self._others, self._answers = own, port, others, answers
        self._first: RowHead = own.first
        self._ops: list[SeqOp] = []
        self._run, self.few = 0, False
        self.info, self.shift = own.info, self._first.shift
        self.capabilities = structs.replace(own.capabilities, embedding_rows=False)

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray:
        """Evaluate `rows`. Raises what `WideHead.step` and `HeadMember.handle` do."""
        del should_stop
        self._run += 1
        run = Decode(self._run, NO_RUN, rows, (0,) * len(rows), tuple(self._ops),
                     speculative=self.few, hidden=hidden)
        self._ops.clear()
        for node in self._others:
            self._port.send(node, Tag.DRAFT, run)
        own = self._head.step(self._run, rows, hidden)
        parts = [one.data for one in self._answers(self._run)] if len(own[1]) else []
        return joined(self.info.n_vocab, own, parts)

    @property
    def tapped(self) -> FloatArray:
        """Its own hidden rows after the last decode, float32[n, n_embd]."""
        return self._first.tapped

    def encode(self, rows: FloatArray) -> FloatArray:
        """Return the hidden rows, float32[n, n_embd], for rows of the target, float32[n, t]."""
        return self._first.encode(rows)

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`."""
        self._apply(SeqRemove(seq_id, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`."""
        self._apply(SeqCopy(src, dst, p0, p1))

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        self._apply(SeqKeep(seq_id))

    def close(self) -> None:
        """Release the slices of this member; the others release theirs themselves."""
        self._head.close()

    def _apply(self, op: SeqOp) -> None:
        self._ops.append(op)
        apply(self._head, op)


def packed(tokens: npt.NDArray[Any], logits: FloatArray, *, few: bool) -> FloatArray:
    """Return a member's logits as they are sent, float32[n * (2 k + 1)]: of each row k tokens,
    their logits, and the log of the summed exponentials of the others.

    tokens, logits: see `WideHead.step`. few: whether the best ones suffice
    """
    rows = []
    for row in logits:
        best, rest = np.arange(len(tokens)), -math.inf
        if few and len(tokens) > _FEW:
            order = np.argpartition(row, -_FEW)
            best, rest = order[-_FEW:], log_total(row[order[:-_FEW]])
        rows.append(np.concatenate([tokens[best], row[best], [rest]], dtype=np.float32))
    return np.concatenate(rows)


def joined(n_vocab: int, own: tuple[npt.NDArray[Any], FloatArray], others: Sequence[FloatArray]
           ) -> FloatArray:
    """Return the logits of all members, float32[n, n_vocab], -inf for tokens that none has.

    own: those of the leader, see `WideHead.step`. others: what `packed` returned
    Where members sent their best logits, tokens without one share what is left, so that the softmax
    of the others is right; they have less than any that was sent.
    """
    logits = np.full((len(own[1]), n_vocab), -np.inf, np.float32)
    logits[:, own[0]] = own[1]
    for k, row in enumerate(logits):
        parts = [part.reshape(len(logits), -1)[k] for part in others]
        for one in parts:
            row[one[: len(one) // 2].astype(np.int64)] = one[len(one) // 2 : -1]
        if rests := [one for one in parts if one[-1] > -np.inf]:
            unknown = np.isneginf(row)
            each = log_total(np.array([one[-1] for one in rests])) - math.log(unknown.sum())
            least = np.float32(min(one[len(one) // 2 : -1].min() for one in rests))
            row[unknown] = min(each, np.nextafter(least, np.float32(-np.inf)))
    return logits
