"""Prompt lookup: proposals copied from the text itself, where its last tokens occurred before.

Searches prompt and output for the longest run of tokens that ends the path and occurs earlier, and
proposes the tokens that followed it there. Other continuations become alternatives. It evaluates no
model, and pays where text repeats: code, summaries, edits of a given text (known as prompt lookup
or n-gram speculation). Where a job names an answer pool, other answers of that pool are searched as
well. The confidence of a continuation depends on how many tokens agree and on whether all places
agree on what follows; it is learnt from every accepted token, speculative or not. Independent of
models, caches and threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from msgspec import Struct, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.strategies.spec import ProposerSpec

SEEDS = 4  #: tokens of the longest run that is looked up
PLACES = 16  #: places that are stored for each run
LONGEST = 64  #: tokens that are compared at most


class Match(Struct, frozen=True):
    """Places that continue a path, the one with the longest agreement first, then the newest.

    text: of the first place
    start: index of the token that follows there
    length: number of tokens that agree at the first place
    followers: the tokens that follow the places, each once
    agreed: whether the same token follows at all of several places; None for a single place
    """

    text: Sequence[int]
    start: int
    length: int
    followers: tuple[int, ...]
    agreed: bool | None


class TextIndex(Struct):
    """The tokens of texts to which tokens are only ever appended.

    tokens: by the text's number
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    _places: dict[tuple[int, ...], list[tuple[int, int]]] = field(default_factory=dict)

    def append(self, token: int, text: int = 0) -> None:
        """Append a token to a text."""
        tokens = self.tokens.setdefault(text, [])
        tokens.append(token)
        end = len(tokens)
        for size in range(1, min(SEEDS, end) + 1):
            places = self._places.setdefault(tuple(tokens[end - size:]), [])
            places.append((text, end))
            del places[:-PLACES]

    def find(self, path: Sequence[int], without: int | None = None) -> Match | None:
        """Return the places where the end of `path` occurred with a token after it.

        path: its last `LONGEST` tokens suffice
        without: number of a text to leave out
        None where there is no such place, even for the last token alone.
        """
        texts = self.tokens
        for size in range(min(SEEDS, len(path)), 0, -1):
            places = [(text, end) for text, end in self._places.get(tuple(path[-size:]), ())
                      if text != without and end < len(texts[text])]
            if places:
                break
        else:
            return None
        found = [(_agreement(path, texts[text], end, size), k)
                 for k, (text, end) in enumerate(places)]
        found.sort(reverse=True)
        length, best = found[0]
        followers = dict.fromkeys(
            texts[text][end] for text, end in (places[k] for _, k in found))
        text, end = places[best]
        return Match(texts[text], end, length, tuple(followers),
                     None if len(places) == 1 else len(followers) == 1)


def _agreement(path: Sequence[int], text: Sequence[int], end: int, known: int) -> int:
    """The number of tokens before `end` of the text that agree with the end of `path`.

    known: so many agree already
    """
    most = min(LONGEST, len(path), end)
    while known < most and text[end - 1 - known] == path[-1 - known]:
        known += 1
    return known


MOST = 1 << 16  #: tokens of a pool, beyond which the older half of the answers is dropped


class AnswerPool:
    """The answers of one pool, unfinished ones included.

    most: tokens of the pool
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._size = most, 0
        self._index = TextIndex()

    def add(self, lane: int, token: int) -> None:
        """Append a token to the lane's answer."""
        if self._size >= self._most:
            self._halve()
        self._index.append(token, lane)
        self._size += 1

    def find(self, path: Sequence[int], lane: int) -> Match | None:
        """Return the places where another lane's answer continues the end of `path`; see
        `TextIndex.find`.
        """
        return self._index.find(path, without=lane)

    def _halve(self) -> None:
        texts, kept = list(self._index.tokens.items()), TextIndex()
        while texts and self._size > self._most // 2:
            self._size -= len(texts.pop(0)[1])
        for lane, tokens in texts:
            for token in tokens:
                kept.append(token, lane)
        self._index = kept


T = TypeVar("T")
Kind: TypeAlias = bool | None  #: whether places agree on what follows; None for a single place
_LANES = 32  #: lanes whose index is stored
_POOLS = 16  #: pools that are stored
#: how likely a continuation is right where 1, 2, 3, 4, fewer than 8, fewer than 16 and more tokens
#: agree, before anything is learnt: where all places agree, for a single place, where they differ
#: (SmolLM2-135M's answers to questions, about texts, with edits and programs)
_CLAIMS: Mapping[Kind, Sequence[float]] = {
    True: (0.5, 0.8, 0.8, 0.9, 0.95, 0.9, 0.99),
    None: (0.2, 0.5, 0.75, 0.75, 0.8, 0.9, 0.9),
    False: (0.1, 0.3, 0.5, 0.3, 0.4, 0.7, 0.85)}
#: the same of what followed in other answers (SmolLM2-135M's to such requests, and to others that
#: come by the dozen with one word changed)
_POOL_CLAIMS: Mapping[Kind, Sequence[float]] = {
    True: (0.4, 0.6, 0.6, 0.85, 0.9, 0.9, 0.95),
    None: (0.15, 0.4, 0.6, 0.65, 0.7, 0.75, 0.75),
    False: (0.1, 0.15, 0.2, 0.3, 0.3, 0.45, 0.5)}
_PRIOR = 8.0  #: weight of these values, in trials
_MEMORY = 0.995  #: weight of the past at each new trial of its kind


class Claims(Struct):
    """How often continuations were right, by number of agreeing tokens and by agreement of the
    places.

    first: the probabilities before anything is learnt
    """

    first: Mapping[Kind, Sequence[float]] = field(default_factory=lambda: _CLAIMS)
    _counts: dict[tuple[int, Kind], list[float]] = field(default_factory=dict)

    def of(self, length: int, agreed: Kind) -> float:
        """Return the probability that a continuation is right.

        length: number of agreeing tokens
        agreed: whether all places agree on what follows; None for a single place
        """
        slot = _slot(length)
        trials, hits = self._counts.get((slot, agreed), (0.0, 0.0))
        return (self.first[agreed][slot] * _PRIOR + hits) / (_PRIOR + trials)

    def learn(self, match: Match | None, token: int) -> None:
        """Record that `token` was accepted where `match` was found, or no match (None)."""
        if match is None:
            return
        counts = self._counts.setdefault((_slot(match.length), match.agreed), [0.0, 0.0])
        counts[0] = counts[0] * _MEMORY + 1.0
        counts[1] = counts[1] * _MEMORY + (match.text[match.start] == token)


def _slot(length: int) -> int:
    return length - 1 if length <= 4 else 4 if length < 8 else 5 if length < 16 else 6


class PromptLookup:
    """The proposer of prompt lookup.

    claims: probabilities of continuations, shared by all lanes; None: new ones
    """

    free = True

    def __init__(self, claims: Claims | None = None) -> None:
        self.rows_evaluated = 0
        self.claims = claims or Claims()
        self._lanes: dict[int, TextIndex] = {}
        self._pools: dict[int, _Pool] = {}

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """Return proposals below the job's path, parents before children, the best chain first."""
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
        # the sort is stable: at equal confidence the lane's own text comes first
        places.sort(key=lambda place: -place.claim(0))
        return _continue(job, places) if places else ()

    def close(self) -> None:
        """Release memory, models and threads."""
        self._lanes.clear()
        self._pools.clear()

    def _pool(self, number: int) -> _Pool | None:
        return _latest(self._pools, number, _POOLS, _Pool) if number else None

    def _grown(self, job: StartDraft, pool: _Pool | None) -> TextIndex:
        """The index of the job's lane, with all accepted tokens.

        Prompts are not learnt from and go into no pool, because their repetitions tell little about
        those of answers.
        """
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
    """The value of `key` in `known`, made if it is new; only the last `most` used values stay."""
    one = known.pop(key, None) or make()
    known[key] = one
    while len(known) > most:
        del known[next(iter(known))]
    return one


class _Place(Struct):
    """A match and its confidence.

    ahead: the speculative tokens after the text of the match, where that is the path's own text, so
        that a copy may continue into them and then into itself
    """

    match: Match
    claims: Claims
    ahead: Sequence[int] | None = None

    def claim(self, k: int) -> float:
        """Return the probability that the k-th token is right if those before are."""
        return self.claims.of(self.match.length + k, self.match.agreed)

    def tokens(self, most: int) -> Iterable[int]:
        """Return at most `most` of the tokens that follow."""
        match = self.match
        follow = match.text[match.start : match.start + most]
        if self.ahead is None:
            return follow
        return itertools.islice(itertools.cycle([*follow, *self.ahead]), most)


def _continue(job: StartDraft, places: Sequence[_Place]) -> tuple[Proposal, ...]:
    """The continuation of the first place, and the other continuations as alternatives."""
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
                    worker=lambda _: PromptLookup(), usual=1)
