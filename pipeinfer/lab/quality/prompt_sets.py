"""Sets of prompts: own lines, conversations, and files in the forms of MT-Bench and AlpacaEval.

A prompt knows by which rules an answer to it is scored. Knows no models and no ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer.lab.quality import scores
from pipeinfer.lab.training.adapt.chats import chat_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question, and how good an answer to it is.

    kind: of question, for tables; empty where there is but one
    reference: a good answer, for ROUGE and for a judge; empty where there is none
    score: text to 0 .. 1 (None: unknown)
    exact: whether the answer is right in every item
    before: messages of the conversation before the question
    """

    question: str
    score: Callable[[str], float] | None = None
    exact: Callable[[str], bool] | None = None
    reference: str = ""
    kind: str = ""
    before: Sequence[Mapping[str, str]] = ()

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


def file_prompts(path: Path) -> list[Prompt]:
    """A prompt per line, JSON lines, or a JSON list. Raises UsageError.

    Objects: "question" (or AlpacaEval's "instruction" and "input", or MT-Bench's "turns", of which
    the first is asked); maybe "answer" (a text or a list: all must occur), "pattern" (a regular
    expression), "reference" or "output" (a good answer), "kind", "category" or "dataset".
    Conversations as for training: "messages", or "prompt" and maybe "response".
    """
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            found = [json.loads(line) if line.lstrip().startswith("{") else {"question": line}
                     for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = [_prompt(f"{path}: prompt {number}", entry) for number, entry in enumerate(found, 1)]
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _prompt(where: str, entry: Any) -> Prompt:
    if not isinstance(entry, dict):
        raise UsageError(f'{where} is no object with a "question"')
    if "messages" in entry or "prompt" in entry:
        chat = chat_of(entry, where)
        *before, last = chat.messages
        return Prompt(last["content"], reference=chat.answer or "", before=before)
    question = _question(entry)
    if not question:
        raise UsageError(f'{where} has no "question" ("instruction", "turns")')
    kind = str(entry.get("kind") or entry.get("category") or entry.get("dataset") or "")
    reference = _first(entry.get("reference")) or _first(entry.get("output"))
    answer, pattern = entry.get("answer"), entry.get("pattern")
    if pattern is not None:
        try:
            return by_pattern(question, re.compile(str(pattern)), reference=reference, kind=kind)
        except re.error as error:
            raise UsageError(f"{where}: its pattern is no regular expression: {error}") from error
    if answer is not None and answer != []:
        answers = [str(one) for one in (answer if isinstance(answer, list) else [answer])]
        return by_answer(question, answers, reference=reference, kind=kind)
    return Prompt(question, reference=reference, kind=kind)


def _question(entry: Mapping[str, Any]) -> str:
    if "turns" in entry:
        return _first(entry["turns"])
    if "instruction" in entry:
        more = str(entry.get("input") or "")
        return str(entry["instruction"]) + (f"\n\n{more}" if more else "")
    question = entry.get("question")
    return question if isinstance(question, str) else ""


def _first(value: Any) -> str:
    """A text, or the first of a list of texts."""
    if isinstance(value, list):
        value = value[0] if value else ""
    return value if isinstance(value, str) else ""
