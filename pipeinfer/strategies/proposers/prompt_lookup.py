"""Proposals copied from the text itself: what followed the last time these tokens came up.

Looks for the longest run of tokens that ends the path and occurs earlier in prompt or output, and
proposes what followed there; other continuations become alternatives. It costs no model, and pays
where text repeats: code, summaries, edits of a given text (known as prompt lookup or n-gram
speculation). How far a continuation can be trusted depends on how many tokens agree and on whether
all places agree on what follows; that is learnt from every accepted token, guessed or not. This
module knows no model, cache or thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeinfer.core.drafting import Proposal, StartDraft
from pipeinfer.strategies.proposers.text_index import LONGEST, Match, TextIndex
from pipeinfer.strategies.spec import ProposerSpec

_LANES = 32  #: lanes whose index is kept
#: how likely a continuation is right where 1, 2, 3, 4, fewer than 8, fewer than 16 and more tokens
#: agree, before anything is learnt: where all places agree, for a single place, where they differ
#: (SmolLM2-135M's answers to `benchmarks.methods.prompts.CHATS`)
_CLAIMS = {True: (0.5, 0.8, 0.8, 0.9, 0.95, 0.9, 0.99),
           None: (0.2, 0.5, 0.75, 0.75, 0.8, 0.9, 0.9),
           False: (0.1, 0.3, 0.5, 0.3, 0.4, 0.7, 0.85)}
_PRIOR = 8.0  #: trials that those count for
_MEMORY = 0.995  #: weight that what was learnt keeps at each new trial of its kind


@dataclass(slots=True)
class Claims:
    """How often continuations were right, by tokens that agree and by agreement of the places."""

    _counts: dict[tuple[int, bool | None], list[float]] = field(default_factory=dict)

    def of(self, length: int, agreed: bool | None) -> float:
        """Probability that a continuation is right."""
        slot = _slot(length)
        trials, hits = self._counts.get((slot, agreed), (0.0, 0.0))
        return (_CLAIMS[agreed][slot] * _PRIOR + hits) / (_PRIOR + trials)

    def learn(self, match: Match, hit: bool) -> None:
        """What followed at the first place was right, or not."""
        counts = self._counts.setdefault((_slot(match.length), match.agreed), [0.0, 0.0])
        counts[0] = counts[0] * _MEMORY + 1.0
        counts[1] = counts[1] * _MEMORY + hit


def _slot(length: int) -> int:
    return length - 1 if length <= 4 else 4 if length < 8 else 5 if length < 16 else 6


class PromptLookup:
    """A `Proposer`. claims: what is known of continuations; shared by all lanes."""

    free = True

    def __init__(self, claims: Claims | None = None) -> None:
        self.rows_evaluated = 0
        self.claims = claims or Claims()
        self._lanes: dict[int, TextIndex] = {}

    def propose(self, job: StartDraft, stopped: Callable[[], bool]
                ) -> tuple[Proposal, ...] | None:
        """See `Proposer.propose`."""
        del stopped
        index = self._grown(job)
        if job.max_tokens <= 0 or job.max_depth <= 0:
            return ()
        path = [*job.accepted[max(0, job.base - LONGEST) : job.base], *job.suffix]
        match = index.find(path)
        return () if match is None else self._continue(job, index.tokens, match)

    def close(self) -> None:
        """See `Proposer.close`."""
        self._lanes.clear()

    def _grown(self, job: StartDraft) -> TextIndex:
        """The index of the job's lane with all accepted tokens. What the prompt repeats says little
        about answers: nothing is learnt from it."""
        index = self._lanes.pop(job.lane, None)
        learns = index is not None
        index = index or TextIndex()
        self._lanes[job.lane] = index  # the last one used is the last to go
        while len(self._lanes) > _LANES:
            del self._lanes[next(iter(self._lanes))]
        for token in job.accepted[len(index.tokens) : job.base]:
            if learns and (match := index.find(index.tokens[-LONGEST:])) is not None:
                self.claims.learn(match, index.tokens[match.ends[0]] == token)
            index.append(token)
        return index

    def _continue(self, job: StartDraft, text: list[int], match: Match) -> tuple[Proposal, ...]:
        """What followed at the first place, and what else followed, as alternatives."""
        chain: list[Proposal] = []
        start = match.ends[0]
        ahead = list(job.suffix)  # a copy may run into the guesses, and then into itself
        for k in range(min(job.max_tokens, job.max_depth)):
            at = start + k
            token = text[at] if at < len(text) else ahead[at - len(text)]
            claim = self.claims.of(match.length + k, match.agreed)
            if token in job.stop_ids or claim < job.p_min:
                break
            chain.append(Proposal(k - 1, token, claim))
            ahead.append(token)
        if not chain:
            return ()
        others = dict.fromkeys(text[end] for end in match.ends)
        alternatives = [token for token in others
                        if token != chain[0].token and token not in job.stop_ids]
        left = 1.0 - chain[0].confidence
        return (*chain, *(Proposal(-1, token, left / (k + 2), alternative=True)
                          for k, token in enumerate(alternatives[: job.alternatives])))


SPEC = ProposerSpec("prompt-lookup", "what followed when the same tokens came up before",
                    worker=lambda _: [PromptLookup()])
