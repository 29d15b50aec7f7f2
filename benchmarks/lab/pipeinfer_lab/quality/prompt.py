"""A prompt, and the rules by which an answer to it is scored. Knows no files, models or ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeinfer_lab.quality import scores


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question, and how good an answer to it is.

    kind: of question, for tables; empty where there is but one
    reference: a good answer, for ROUGE and for a judge; empty where there is none
    score: text to 0 .. 1 (None: unknown)
    exact: whether the answer is right in every item
    before: messages of the conversation before the question
    follows: whether it continues the conversation of the prompt before it, behind that answer
    """

    question: str
    score: Callable[[str], float] | None = None
    exact: Callable[[str], bool] | None = None
    reference: str = ""
    kind: str = ""
    before: Sequence[Mapping[str, str]] = ()
    follows: bool = False

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The conversation that ends with the question."""
        return [*self.before, {"role": "user", "content": self.question}]

    def rouge(self, text: str) -> dict[str, float]:
        """ROUGE-1, -2 and -L against the reference; empty without one."""
        if not self.reference:
            return {}
        return {"rouge1": scores.rouge_n(1, text, self.reference),
                "rouge2": scores.rouge_n(2, text, self.reference),
                "rougeL": scores.rouge_l(text, self.reference)}


def by_answer(question: str, answers: Sequence[str], *, reference: str = "", kind: str = ""
              ) -> Prompt:
    """Right is a text that contains every answer; exact, one that is the only answer."""
    wanted = [answer.strip() for answer in answers]
    return Prompt(question, lambda text: scores.contained(wanted, text),
                  lambda text: [text.strip()] == wanted, reference or " ".join(wanted), kind)


def by_pattern(question: str, pattern: re.Pattern[str], *, reference: str = "", kind: str = ""
               ) -> Prompt:
    """Right is a text in which the pattern occurs."""
    return Prompt(question, lambda text: float(pattern.search(text) is not None),
                  lambda text: pattern.fullmatch(text.strip()) is not None, reference, kind)
