"""A proposer and a decomposer of another package: all that has to be written for each is here."""

from __future__ import annotations

from pipeinfer.config import Option, OwnOption
from pipeinfer.core.drafting import Proposal
from pipeinfer.strategies.decomposers.base import MAIN, TextPiece
from pipeinfer.strategies.spec import DecomposerSpec, ProposerSpec


class Stutter:
    """Proposes that the last token comes again, so many times; fails at a job on request."""

    free = True
    rows_evaluated = 0

    def __init__(self, times, fails_at):
        self._times, self._left = times, fails_at or -1

    def propose(self, job, stopped):
        self._left -= 1
        if self._left == 0:
            raise ValueError("stuck")
        path = [*job.accepted[: job.base], *job.suffix]
        count = min(self._times, job.max_tokens, job.max_depth)
        if not path or path[-1] in job.stop_ids:
            return ()
        return tuple(Proposal(k - 1, path[-1], 0.5) for k in range(count))

    def close(self):
        pass


class Shout:
    """One thread, whose text comes in capitals."""

    bans = ()

    def __init__(self, setup):
        self._vocabulary, self._sign = setup.vocabulary, setup.options["shout_sign"]
        self._pieces, self._count, self.complete = [], 0, False

    def accepted(self, thread, token):
        text = self._vocabulary.piece(token).upper()
        self._pieces.append(TextPiece(MAIN, self._count, text))
        self._count += 1
        return []

    def ended(self, thread):
        if self._sign:
            self._pieces.append(TextPiece(MAIN, max(self._count - 1, 0), self._sign.encode()))
        self.complete = True
        return []

    def settled(self, thread):
        return []

    def take(self):
        pieces, self._pieces = self._pieces, []
        return pieces

    flush = take


STUTTER = ProposerSpec(
    "stutter", "the last token again", worker=lambda setup: Stutter(
        setup.options["times"], setup.options["stutter_fails_at"]),
    options={
        "times": OwnOption(2, Option(("--stutter-times",), "int", "How often.", 1, 8)),
        "stutter_fails_at": OwnOption(0, Option((), "int", "At which job it fails.", 0, 99))})
SHOUT = DecomposerSpec(
    "shout", "one thread in capitals", Shout,
    options={"shout_sign": OwnOption("!", Option(("--shout-sign",), "str", "What ends it."))})
