"""Proposals copied from the text itself: what followed the last time these tokens came up.

Looks for the longest run of tokens that ends the path and occurs earlier in prompt or output, and
proposes what followed there; other continuations become alternatives. It costs no model, and pays
where text repeats: code, summaries, edits of a given text (known as prompt lookup or n-gram
speculation). Where a job names a pool, other answers of that pool are looked through as well. How
far a continuation can be trusted depends on how many tokens agree and on whether all places agree
on what follows; that is learnt from every accepted token, guessed or not. This module knows no
model, cache or thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from msgspec import Struct, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.strategies.proposers.answer_pool import AnswerPool
from pipeinfer.strategies.proposers.text_index import LONGEST, Match, TextIndex
from pipeinfer.strategies.spec import ProposerSpec

T = TypeVar("T")
Kind: TypeAlias = bool | None  #: whether places agree on what follows; None for a single place
_LANES = 32  #: lanes whose index is kept
_POOLS = 16  #: pools that are kept
#: how likely a continuation is right where 1, 2, 3, 4, fewer than 8, fewer than 16 and more tokens
#: agree, before anything is learnt: where all places agree, for a single place, where they differ
#: (SmolLM2-135M's answers to `benchmarks.methods.prompts.CHATS`)
_CLAIMS: Mapping[Kind, Sequence[float]] = {
    True: (0.5, 0.8, 0.8, 0.9, 0.95, 0.9, 0.99),
    None: (0.2, 0.5, 0.75, 0.75, 0.8, 0.9, 0.9),
    False: (0.1, 0.3, 0.5, 0.3, 0.4, 0.7, 0.85)}
#: the same of what followed in other answers (SmolLM2-135M's to `benchmarks.methods.prompts.FORMS`
#: and `CHATS`)
_POOL_CLAIMS: Mapping[Kind, Sequence[float]] = {
    True: (0.4, 0.6, 0.6, 0.85, 0.9, 0.9, 0.95),
    None: (0.15, 0.4, 0.6, 0.65, 0.7, 0.75, 0.75),
    False: (0.1, 0.15, 0.2, 0.3, 0.3, 0.45, 0.5)}
_PRIOR = 8.0  #: trials that those count for
_MEMORY = 0.995  #: weight that what was learnt keeps at each new trial of its kind


class Claims(Struct):
    """How often continuations were right, by tokens that agree and by agreement of the places.
    first: what is assumed before anything is learnt."""

    first: Mapping[Kind, Sequence[float]] = field(default_factory=lambda: _CLAIMS)
    _counts: dict[tuple[int, Kind], list[float]] = field(default_factory=dict)

    def of(self, length: int, agreed: Kind) -> float:
        """Probability that a continuation is right."""
        slot = _slot(length)
        trials, hits = self._counts.get((slot, agreed), (0.0, 0.0))
        return (self.first[agreed][slot] * _PRIOR + hits) / (_PRIOR + trials)

    def learn(self, match: Match | None, token: int) -> None:
        """This token came where a match was, or none."""
        if match is None:
            return
        counts = self._counts.setdefault((_slot(match.length), match.agreed), [0.0, 0.0])
        counts[0] = counts[0] * _MEMORY + 1.0
        counts[1] = counts[1] * _MEMORY + (match.text[match.start] == token)


def _slot(length: int) -> int:
    return length - 1 if length <= 4 else 4 if length < 8 else 5 if length < 16 else 6


class PromptLookup:
    """A `Proposer`. claims: what is known of continuations; shared by all lanes."""

    free = True

    def __init__(self, claims: Claims | None = None) -> None:
        self.rows_evaluated = 0
        self.claims = claims or Claims()
        self._lanes: dict[int, TextIndex] = {}
        self._pools: dict[int, _Pool] = {}

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """See `Proposer.propose`."""
        del stopped
        pool = self._pool(job.pool)
        index = self._grown(job, pool)
        if job.max_tokens <= 0 or job.max_depth <= 0:
            return ()
        path = [*job.accepted[max(0, job.base - LONGEST) : job.base], *job.suffix]
        places = []
        if (match := index.find(path)) is not None:
            places.append(_Place(match, self.claims, job.suffix))
        if pool is not None and (match := pool.answers.find(path, job.lane)) is not None:
            places.append(_Place(match, pool.claims))
        # where both are trusted as much the lane's own text goes first
        places.sort(key=lambda place: -place.claim(0))
        return _continue(job, places) if places else ()

    def close(self) -> None:
        """See `Proposer.close`."""
        self._lanes.clear()
        self._pools.clear()

    def _pool(self, number: int) -> _Pool | None:
        return _latest(self._pools, number, _POOLS, _Pool) if number else None

    def _grown(self, job: StartDraft, pool: _Pool | None) -> TextIndex:
        """The index of the job's lane with all accepted tokens. What the prompt repeats says little
        about answers: nothing is learnt from it, and it goes into no pool."""
        learns = job.lane in self._lanes
        index = _latest(self._lanes, job.lane, _LANES, TextIndex)
        own = index.tokens.setdefault(0, [])
        for token in job.accepted[len(own) : job.base]:
            if learns:
                path = own[-LONGEST:]
                self.claims.learn(index.find(path), token)
                if pool is not None:
                    pool.claims.learn(pool.answers.find(path, job.lane), token)
                    pool.answers.add(job.lane, token)
            index.append(token)
        return index


class _Pool(Struct):
    answers: AnswerPool = field(default_factory=AnswerPool)
    claims: Claims = field(default_factory=lambda: Claims(_POOL_CLAIMS))


def _latest(known: dict[int, T], key: int, most: int, make: Callable[[], T]) -> T:
    """What belongs to a key, made where it is new; of others than the last `most` used, none."""
    one = known.pop(key, None) or make()
    known[key] = one
    while len(known) > most:
        del known[next(iter(known))]
    return one


class _Place(Struct):
    """A match, and how far it is trusted. ahead: tokens that follow its text, where that is the
    path's own, so that a copy may run into the guesses, and then into itself."""

    match: Match
    claims: Claims
    ahead: Sequence[int] | None = None

    def claim(self, k: int) -> float:
        """Probability that the k-th token is right if those before are."""
        return self.claims.of(self.match.length + k, self.match.agreed)

    def tokens(self, most: int) -> Iterable[int]:
        """At most so many of those that follow."""
        match = self.match
        follow = match.text[match.start : match.start + most]
        if self.ahead is None:
            return follow
        return itertools.islice(itertools.cycle([*follow, *self.ahead]), most)


def _continue(job: StartDraft, places: Sequence[_Place]) -> tuple[Proposal, ...]:
    """What followed at the first place, and what else followed, as alternatives."""
    chain: list[Proposal] = []
    most = min(job.free_max or job.max_tokens, job.max_depth)
    least = job.p_min if job.free_min is None else job.free_min
    for k, token in enumerate(places[0].tokens(most)):
        claim = places[0].claim(k)
        if token in job.stop_ids or claim < least:
            break
        chain.append(Proposal(k - 1, token, claim))
    if not chain:
        return ()
    others = dict.fromkeys(token for place in places for token in place.match.followers)
    alternatives = [token for token in others
                    if token != chain[0].token and token not in job.stop_ids]
    left = 1.0 - chain[0].confidence
    return (*chain, *(Proposal(-1, token, left / (k + 2), alternative=True)
                      for k, token in enumerate(alternatives[: job.alternatives])))


SPEC = ProposerSpec("prompt-lookup", "what followed when the same tokens came up before",
                    worker=lambda _: [PromptLookup()])
