"""Conversations from JSONL files, for training.

Does not know: tokens, models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.errors import UsageError
from pipeinfer_lab.training import prompts

_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Chat:
    """messages: up to the answer. answer: what the assistant says to them; None where the file has
    none. annotated: the answer with PASTA's marks."""

    messages: tuple[dict[str, str], ...]
    answer: str | None = None
    annotated: str | None = None


def read_jsonl(path: Path) -> Iterator[dict[str, str]]:
    """Records of a JSONL file; UsageError names the line that is not one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}, line {number}: {error}") from error
            if not isinstance(record, dict):
                raise UsageError(f"{path}, line {number}: is not a JSON object")
            yield record


def chat_of(record: Mapping[str, Any], where: str) -> Chat:
    """A record with `messages` ({role, content}, the last may be the answer) or `prompt` and
    `response`. Raises UsageError, which begins with `where`."""
    if isinstance(messages := record.get("messages"), list) and messages:
        told = [_message(message, where) for message in messages]
        answer = told.pop()["content"] if told[-1]["role"] == "assistant" else None
        if not told:
            raise UsageError(f"{where}: begins with an answer: add the user's message before it")
    elif isinstance(prompt := record.get("prompt"), str):
        told, answer = [{"role": "user", "content": prompt}], None
    else:
        raise UsageError(f"{where}: has neither messages nor prompt: write "
                         '{"messages": [{"role": "user", "content": "..."}, ...]}')
    response, annotated = record.get("response", answer), record.get("annotated")
    if not isinstance(response, str | None) or not isinstance(annotated, str | None):
        raise UsageError(f"{where}: response and annotated must be texts")
    return Chat(tuple(told), response, annotated)


def read_chats(path: Path) -> Iterator[Chat]:
    """The conversations of a JSONL file. Raises UsageError, which names the record."""
    for number, record in enumerate(read_jsonl(path), 1):
        yield chat_of(record, f"{path}, record {number}")


def made_up(count: int, seed: int) -> list[Chat]:
    """Questions as people ask them, without answers; the same ones for the same seed."""
    rng = random.Random(seed)
    return [Chat(({"role": "user", "content": prompts.question(rng)},)) for _ in range(count)]


def _message(message: Any, where: str) -> dict[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in _ROLES or not isinstance(content, str):
        raise UsageError(f"{where}: a message needs a role ({', '.join(_ROLES)}) and a content, "
                         "which is a text")
    return {"role": role, "content": content}
