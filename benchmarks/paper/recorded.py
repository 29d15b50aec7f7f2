"""Texts of a real pair of models, recorded and played back in virtual time.

A `Text` holds a prompt, the target's answer, and what the draft names at each position of it. On
the recorded path both models are the real ones; below a wrong guess, where nothing was recorded
and nothing can be accepted, the draft names arbitrary tokens with claims that it made elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeinfer.core.types import FloatArray
from pipeinfer.emulation.synthetic import TAIL, mixed
from tests.kit.plain_loop import PlainLoop

NAMED = 4  #: tokens that the draft names at a position
_OTHERS = 32
_SHORTEST = 48  #: shorter answers say little
_CIRCLE = 24  #: tokens that come a second time within four times as many are a circle


@dataclass(frozen=True)
class Text:
    """kind: of prompt. prompt, answer: token ids. names, claims: [len(answer), NAMED], what the
    draft names before each token of the answer, the likeliest first, and its probabilities."""

    kind: str
    prompt: npt.NDArray[np.int32]
    answer: npt.NDArray[np.int32]
    names: npt.NDArray[np.int32]
    claims: FloatArray

    @property
    def acceptance(self) -> float:
        """Share of the answer's tokens that the draft named first."""
        return float(np.mean(self.names[:, 0] == self.answer))


def record(target: PlainLoop, draft: PlainLoop, kind: str, prompt: list[int],
           most: int = 192) -> Text | None:
    """The greedy answer to one prompt, None where it is too short.

    A row at a time, so that no setting of a pipeline plays a part. A small model that decodes
    greedily ends up in circles, which are easy to foresee: answers end where one begins.
    """
    tokens = list(prompt)
    logits = target.decode(tokens, 0)
    while len(tokens) < len(prompt) + most:
        token = int(np.argmax(logits))
        if target.is_eog(token):
            break
        tokens.append(token)
        if circles(tokens[len(prompt):]):
            del tokens[-_CIRCLE:]
            break
        logits = target.decode([token], len(tokens) - 1)
    target.reset()
    if len(tokens) < len(prompt) + _SHORTEST:
        return None
    answers = list(draft.logits_after(prompt, tokens[len(prompt):]))[: len(tokens) - len(prompt)]
    names = np.zeros((len(answers), NAMED), np.int32)
    claims = np.zeros((len(answers), NAMED), np.float32)
    for row, scores in enumerate(answers):
        best = np.argsort(-scores, kind="stable")[:NAMED]
        shares = np.exp(scores - scores[best[0]])
        names[row], claims[row] = best, shares[best] / shares.sum()
    return Text(kind, np.array(prompt, np.int32), np.array(tokens[len(prompt):], np.int32), names,
                claims)


def circles(answer: list[int]) -> bool:
    """Whether the last `_CIRCLE` tokens repeat what was there shortly before."""
    end, at = answer[-_CIRCLE:], len(answer) - _CIRCLE
    return at > 0 and any(answer[k : k + _CIRCLE] == end
                          for k in range(max(0, at - 4 * _CIRCLE), at))


class RecordedPair:
    """The pair of models for one text; see `synthetic.SyntheticPair`, whose place it takes.

    Tokens are numbered anew, so that logits stay short. What the draft leaves to tokens that were
    not recorded is shared out among `_OTHERS` that never come up.
    """

    by_depth = ()

    def __init__(self, text: Text) -> None:
        used = np.unique(np.concatenate([text.prompt, text.answer, text.names.ravel()]))
        self.n_vocab = len(used) + _OTHERS
        self._others = list(range(len(used), self.n_vocab))
        self.acceptance = text.acceptance
        self._tokens = np.searchsorted(used, np.concatenate([text.prompt, text.answer])).tolist()
        self._n_prompt = len(text.prompt)
        self._names = np.searchsorted(used, text.names).tolist()
        rest = np.maximum(1.0 - text.claims.sum(axis=1, keepdims=True), 0.0)
        self._claims = np.hstack([text.claims, rest.repeat(_OTHERS, axis=1) / _OTHERS]).tolist()

    @property
    def n_answer(self) -> int:
        """Tokens of the answer."""
        return len(self._names)

    def prompt(self, count: int, request: int) -> tuple[int, ...]:
        """The recorded prompt. Raises ValueError for another length or request."""
        if count != self._n_prompt or request:
            raise ValueError(f"the text has one prompt, of {self._n_prompt} tokens")
        return tuple(self._tokens[:count])

    def token(self, path: tuple[int, ...], pos: int) -> int:
        """The target's token after the row at `pos`, whose path ends with `path`."""
        if self._follows(path, pos):
            return int(self._tokens[pos + 1])
        return mixed(0, pos, path, 1) % self.n_vocab

    def guesses(self, path: tuple[int, ...], pos: int) -> tuple[list[int], list[float]]:
        """The draft's best tokens there, and the confidences that it claims."""
        if self._follows(path, pos):
            row = pos + 1 - self._n_prompt
            return self._names[row] + self._others, self._claims[row]
        draw = mixed(0, pos, path, 2)
        names = [(draw + 7 * k) % self._others[0] for k in range(NAMED)]
        return names + self._others, self._claims[draw % len(self._claims)]

    def plain(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """What plain decoding gives."""
        assert len(prompt) == self._n_prompt
        return list(self._tokens[self._n_prompt : self._n_prompt + count])

    def _follows(self, path: tuple[int, ...], pos: int) -> bool:
        """Whether the text goes on behind a path of which `pos` is the last position."""
        first = pos + 1 - len(path)
        return self._n_prompt <= pos + 1 < len(self._tokens) \
            and self._tokens[max(first, 0) : pos + 1] == list(path)[-TAIL:]
