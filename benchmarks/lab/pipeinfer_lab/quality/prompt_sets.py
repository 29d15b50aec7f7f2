"""Sets of prompts: own lines, conversations, and files in the forms of public data sets.

Knows no models and no ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer_lab.quality.data_sets import prompts_of
from pipeinfer_lab.quality.prompt import Prompt, by_answer, by_pattern
from pipeinfer_lab.training.adapt.chats import chat_of


def file_prompts(path: Path) -> list[Prompt]:
    """Prompts of lines, JSON lines, or a JSON list. Raises UsageError.

    Objects: those of `data_sets`; "question" (or AlpacaEval's "instruction" and "input"); maybe
    "answer" (a text or a list: all must occur), "pattern" (a regular expression), "reference" or
    "output" (a good answer), "kind", "category" or "dataset". Conversations as for training:
    "messages", or "prompt" and maybe "response".
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            # not splitlines: JSON may have other ends of lines, such as U+2028, in its texts
            found = [json.loads(line) if line.lstrip().startswith("{") else {"question": line}
                     for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read prompts from {path}: {error}") from error
    prompts = [prompt for number, entry in enumerate(found, 1)
               for prompt in _prompts(f"{path}: prompt {number}", entry)]
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _prompts(where: str, entry: Any) -> list[Prompt]:
    if not isinstance(entry, dict):
        raise UsageError(f'{where} is no object with a "question"')
    return prompts_of(entry, where) or [_prompt(where, entry)]


def _prompt(where: str, entry: Mapping[str, Any]) -> Prompt:
    if "messages" in entry or "prompt" in entry:
        chat = chat_of(entry, where)
        *before, last = chat.messages
        return Prompt(last["content"], reference=chat.answer or "", before=before)
    question = _question(entry)
    if not question:
        raise UsageError(f'{where} has no "question" ("instruction", "turns", "prompt")')
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
