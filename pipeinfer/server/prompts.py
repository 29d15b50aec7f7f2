"""From texts to token ids, and whether they fit the context. Knows the vocabulary only."""

from __future__ import annotations

import asyncio
from typing import Any

from pipeinfer.errors import RequestError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server.errors import bad

_LONG = 4096  #: characters above which a text is tokenised beside the event loop


async def encode(tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
    """Token ids of a text; a long one does not hold up the event loop. Raises ApiError."""
    try:
        if len(text) > _LONG:
            return await asyncio.to_thread(tokenizer.encode, text, **how)
        return tokenizer.encode(text, **how)
    except RequestError as error:
        raise bad(str(error), "prompt") from error


def check_tokens(tokens: list[int], tokenizer: Tokenizer, param: str = "prompt") -> list[int]:
    """The same tokens. Raises ApiError for one outside the vocabulary."""
    if tokens and max(tokens) >= tokenizer.n_vocab:
        raise bad(f"token {max(tokens)} is outside the vocabulary of {tokenizer.n_vocab}", param)
    return tokens


def check_lengths(prompts: list[list[int]], n_ctx: int) -> None:
    """Raises ApiError (context_length_exceeded) when a prompt leaves no room for a token."""
    for prompt in prompts:
        if not prompt:
            raise bad("the prompt is empty", "prompt")
        if len(prompt) >= n_ctx:
            raise bad(f"the prompt has {len(prompt)} tokens, but the context holds {n_ctx}: "
                      "shorten the prompt", "prompt", "context_length_exceeded")


async def prompts_of(prompt: Any, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts (empty where token ids were given) and token ids of each prompt."""
    if isinstance(prompt, str):
        return [prompt], [await encode(tokenizer, prompt)]
    if isinstance(prompt[0], int):
        return [""], [check_tokens(prompt, tokenizer)]
    if isinstance(prompt[0], str):
        return list(prompt), [await encode(tokenizer, text) for text in prompt]
    return [""] * len(prompt), [check_tokens(p, tokenizer) for p in prompt]
