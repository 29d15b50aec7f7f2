"""Converts texts to token ids and checks that they fit the context. Uses the vocabulary only."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel

from pipeinfer.errors import RequestError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.errors import TooLong, bad
from pipeinfer.server.schema_requests import MediaPart

_log = logging.getLogger("pipeinfer.server")
SHORT = 64 * 1024  #: characters up to which a text is tokenised in any case
_SHRINKS = 4  #: how much a tokenizer's normalisation shortens a text at most
_noted: set[str] = set()  # a client must not fill the log


def encode(tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
    """Return the token ids of a text. Raises ApiError."""
    try:
        return tokenizer.encode(text, **how)
    except RequestError as error:
        raise bad(str(error), "prompt") from error


def check_tokens(tokens: list[int], tokenizer: Tokenizer, param: str = "prompt") -> list[int]:
    """Return the same tokens. Raises ApiError for one outside the vocabulary."""
    if tokens and max(tokens) >= tokenizer.n_vocab:
        raise bad(f"token {max(tokens)} is outside the vocabulary of {tokenizer.n_vocab}", param)
    return tokens


def check_size(text: object, tokenizer: Tokenizer, n_ctx: int, param: str = "prompt") -> None:
    """Raise ApiError for a text that certainly exceeds the context (context_length_exceeded), as
    tokenising it could keep other requests waiting for seconds.

    text: what the prompt is made of: strings in lists and mappings.
    """
    size = characters(text)
    if size > SHORT and size > _SHRINKS * tokenizer.longest * n_ctx:
        raise TooLong(-(-size // (_SHRINKS * tokenizer.longest)), n_ctx, param)


def characters(value: object) -> int:
    """Return the number of characters of all strings in a value of JSON, or of a
    request's parts, whose texts are not copied. Pictures are not text."""
    if isinstance(value, MediaPart):
        return 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | BaseModel):
        return sum(map(characters, dict(value).values()))
    return sum(map(characters, value)) if isinstance(value, list) else 0


def check_lengths(prompts: list[list[int]], n_ctx: int, param: str = "prompt") -> None:
    """Raise ApiError if a prompt is empty or leaves no space for a token
    (context_length_exceeded).

    n_ctx: context in tokens. param: the field that the prompts were made of.
    """
    for prompt in prompts:
        if not prompt:
            raise bad("the prompt is empty", param)
        if len(prompt) >= n_ctx:
            raise TooLong(len(prompt), n_ctx, param)


def prompts_of(prompt: Any, tokenizer: Tokenizer, special: bool
               ) -> tuple[list[str], list[list[int]]]:
    """Return texts ("" if token ids were given) and token ids of each prompt.

    special: whether control tokens in a text are recognised. If not, the log notes that once.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if isinstance(prompt[0], int):
        return [""], [check_tokens(prompt, tokenizer)]
    if isinstance(prompt[0], str):
        if not special:
            _note_marks(tokenizer, prompt)
        return list(prompt), [encode(tokenizer, text, special=special) for text in prompt]
    return [""] * len(prompt), [check_tokens(p, tokenizer) for p in prompt]


def _note_marks(tokenizer: Tokenizer, texts: list[str]) -> None:
    mark = "" if _noted else next(filter(None, map(tokenizer.marks.first, texts)), "")
    if mark:
        _noted.add(mark)
        _log.warning("note: a prompt of /v1/completions holds %s, which is a control token of this "
                     "model but is taken as text: parse_special: true makes it the token, "
                     "/v1/chat/completions applies the chat template (said once)", mark)
