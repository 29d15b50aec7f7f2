"""Moves layers to other ranks while a job runs, and undoes moves that do not pay.

    judge     estimate the speed of each assignment from the measured times of the stages
              (without their wait for shared cores) and from the observed load
    move      ranks that become idle lend their cores to the ranks of their host that stay
    verify    after enough runs over the new stages, compare the speed; move back if it is lower

A rank without layers may get some again. Slices of wide stages stay where they are. A move that was
undone is not tried again for a while. This module uses no HTTP and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from pipeinfer.cluster.session import Session
from pipeinfer.planning.judge import Judge, granted
from pipeinfer.planning.pace import Seen, StagePace
from pipeinfer.planning.replan import Holding, MoveVerdict
from pipeinfer.planning.wide import is_cut

ASKED = 1.03  #: least gain, since times are not exact
_LOOKS = 3  #: successive checks that must find a slow stage before an automatic move
_AGAIN = 600.0  #: seconds before a move that was undone is tried again; doubled each time
_RETURN = 300.0  #: seconds after a move before idle ranks are considered automatically
_LOST = 0.97  #: speed relative to the old one below which a move is undone


class PlannedMove(Struct, frozen=True):
    """A rebalance, and what its verification needs.

    held: the new assignment. gain: its speed relative to the present one. why: the reason, in
        words. threads: by rank, of ranks that compute with cores of idle ones.
    before, threads_before: the present assignment. rate: its estimated tokens per second, by
        `judge` under the load `seen`.
    """

    held: tuple[Holding, ...]
    gain: float
    why: str
    threads: Mapping[int, int]
    before: tuple[Holding, ...]
    threads_before: Mapping[int, int]
    rate: float
    seen: Seen
    judge: Judge


@dataclass(slots=True)
class Balance:
    """Rebalances one session; see the module docstring."""

    session: Session
    _trial: PlannedMove | None = None  # to be verified
    _pace: StagePace | None = None  # that of the stages after it; another one: others took over
    _failed: dict[tuple[Holding, ...], tuple[float, float]] = field(default_factory=dict)
    _looks: int = 0
    _moved: float = field(default_factory=time.monotonic)

    def rebalance(self, need: float = 1.0, drift: float = 1.0) -> str | None:
        """Move layers according to the present times of the stages, and replay the open
        requests.

        need: least estimated speed relative to the present one.
        drift: least present time of a stage relative to its best. 1.0: do not check.
        Returns what was done, None if nothing.
        """
        pace = self.session.head.times.pace
        if not self._movable():
            return None
        if drift > 1.0 and not self._worth_a_look(
                pace, drift, idle=bool(self.session.assembly.returning)):
            return None
        self._looks = 0
        found = self._better(need)
        if found is None:
            return None
        self._move(found.held, found.why, found.threads)
        self._trial, self._pace = found, self.session.head.times.pace
        return str(self.session.assembly.changes[-1])

    def preview(self) -> PlannedMove | None:
        """Return what `rebalance` would do now; None if nothing. Changes nothing."""
        return self._better(1.0) if self._movable() else None

    def verify(self) -> str | None:
        """Compare the speed after the last move with that before; move back if it is lower.

        Returns the result in words, None while it cannot be determined.
        """
        trial, session = self._trial, self.session
        pace = session.head.times.pace
        if trial is None or pace is not self._pace or not pace.settled:
            return None
        self._trial = None
        held = session.assembly.held
        seen = session.head.times.load.lately(session.head.scheduler.totals.accepted)
        if seen.like(trial.seen):
            found, how = seen.speed / trial.seen.speed, "tokens/s"
        else:
            judge = structs.replace(trial.judge, using=session.assembly.threads)
            if not pace.known:
                self._trial = trial  # members have not reported enough yet
                return None
            found = self._rate(judge) / trial.rate
            how = "by what stages take"
        if found >= _LOST:
            self._failed.pop(held, None)
            text = (f"the layers in their new places run at {found:.2f} times the old speed "
                    f"({how}; promised {trial.gain:.2f})")
            session.notes.append(text)
            return text
        wait = 2 * self._failed.get(held, (0.0, _AGAIN / 2))[1]
        self._failed[held] = (time.monotonic() + wait, wait)
        self._move(trial.before, f"layers back where they were: {found:.2f} times the speed "
                   f"instead of the {trial.gain:.2f} that was promised ({how})",
                   trial.threads_before)
        return str(session.assembly.changes[-1])

    # --- steps --------------------------------------------------------------------------------

    def _movable(self) -> bool:
        """Whether layers can be moved at all, and enough is measured."""
        session, assembly = self.session, self.session.assembly
        alone = len(assembly.held) == 1 and not assembly.returning
        return session.head.times.pace.known and not alone and not is_cut(assembly.held)

    def _rate(self, judge: Judge) -> float:
        """Tokens per second of the present stages, estimated from their present times."""
        return judge.rate(self.session.head.times.pace.seconds,
                          [[one.rank] for one in self.session.assembly.held], now=True)

    def _better(self, need: float) -> PlannedMove | None:
        """Return an assignment with at least `need` times the speed, or None."""
        assembly, pace = self.session.assembly, self.session.head.times.pace
        judge, seen = self.session.judge()
        verdict = assembly.better(pace.seconds, judge)
        held = verdict.held
        if held == assembly.held or verdict.gain < max(need, ASKED) or self._too_soon(held):
            return None
        ranks = [holding.rank for holding in held]
        threads = granted(judge.seats, judge.cores, ranks) if judge.grows else {}
        why = _why(judge, verdict, pace) + _idle(assembly.held, held, threads, judge)
        return PlannedMove(held, verdict.gain, why, threads, assembly.held, assembly.threads,
                    self._rate(judge), seen, judge)

    def _worth_a_look(self, pace: StagePace, drift: float, *, idle: bool) -> bool:
        """Whether an automatic move should be considered: for a while, one stage has been slower
        relative to its best than the others, or a rank has been idle. If all stages slow down
        alike, moving layers does not help."""
        slowdown = pace.drift
        slower = max(slowdown)
        if len(slowdown) > 1:
            slower /= min(slowdown)
        self._looks = self._looks + 1 if slower >= drift else 0
        return self._looks >= _LOOKS or (idle and time.monotonic() - self._moved > _RETURN)

    def _too_soon(self, held: tuple[Holding, ...]) -> bool:
        return time.monotonic() < self._failed.get(held, (0.0, 0.0))[0]

    def _move(self, held: tuple[Holding, ...], why: str, threads: Mapping[int, int]) -> None:
        self.session.assembly.move(held, why, threads)
        self._moved = time.monotonic()
        self.session.resume()


def _why(judge: Judge, verdict: MoveVerdict, pace: StagePace) -> str:
    streams, times = max(mix.streams for mix in judge.mixes), max(pace.slowdown)
    return (f"layers redistributed for {verdict.gain:.2f} times the speed with "
            f"{streams} request{'s' * (streams != 1)} at once (stage "
            f"{pace.slowdown.index(times) + 1} takes {times:.1f} times as long as at its best)")


def _idle(before: Sequence[Holding], after: Sequence[Holding], threads: Mapping[int, int],
          judge: Judge) -> str:
    """Name the ranks without layers from now on, and the ranks that compute with their cores."""
    now = {holding.rank for holding in after}
    idle = sorted({holding.rank for holding in before} - now)
    if not idle:
        return ""
    text = f"; {_ranks(idle)} hold{'s' * (len(idle) == 1)} no layers now"
    grown = [f"rank {rank} computes with {count} threads" for rank, count in threads.items()
             if count > judge.seats[rank].cores]
    return "; ".join([text, *grown])


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
