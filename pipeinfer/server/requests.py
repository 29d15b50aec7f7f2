"""From a request to what the engine gets: sampling fields, stop strings, prompts as tokens.

Checks what shapes alone can not say (the vocabulary, the context, fields that exclude each
other). Knows the vocabulary and the defaults, no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import RequestError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.server.settings import Settings
from pipeinfer.strategies.decomposers.base import Specification

_LONG = 4096  #: characters above which a text is tokenised beside the event loop
_COMPLETION_TOKENS = 16  #: max_tokens of /v1/completions when it is left out, as in the OpenAI API
NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
          "frequency_penalty", "repeat_last_n")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request. params: of every choice, without its key. n: choices per prompt.
    decompose: for a response in threads."""

    prompts: list[list[int]]
    texts: list[str]
    n: int
    max_tokens: int
    params: SamplingParams
    seed: int
    stops: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    stream: bool = False
    usage: bool = False
    detail: bool = False
    logprobs: bool = False
    echo: bool = False
    decompose: Specification | None = None

    @property
    def count(self) -> int:
        """Choices in all."""
        return len(self.prompts) * self.n

    def params_of(self, index: int, n_prompt: int) -> SamplingParams:
        """The params of choice number `index`, with its noise and where its grammar begins."""
        start = n_prompt if self.params.grammar else 0
        return dataclasses.replace(
            self.params, key=noise_key(self.seed, index % self.n), grammar_start=start)


def sampling(
    request: schema.Sampling, settings: Settings, tokenizer: Tokenizer, n_logprobs: int,
) -> SamplingParams:
    """The sampling side of a request; defaults of the server where it says nothing.

    Raises ApiError for biases of tokens that are none.
    """
    values: dict[str, Any] = {name: given for name in NAMES
                              if (given := getattr(request, name)) is not None}
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias, tokenizer)
    return dataclasses.replace(settings.defaults, n_logprobs=n_logprobs, **values)


def common(request: schema.Sampling, settings: Settings) -> dict[str, Any]:
    """Fields of Asked that both kinds of request share. Raises ApiError."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad("best_of other than n is not supported", "best_of")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options needs stream: true", "stream_options")
    stop = request.stop
    seed = request.seed
    if seed is None:
        seed = settings.seed if settings.seed >= 0 else secrets.randbits(31)
    return {
        "n": request.n or 1, "seed": seed, "ignore_eos": bool(request.ignore_eos),
        "stops": [stop] if isinstance(stop, str) else list(stop or ()),
        "stream": bool(request.stream),
        "usage": bool(request.stream_options and request.stream_options.include_usage),
        "detail": bool(request.pipeinfer and request.pipeinfer.detail),
    }


async def completion(
    request: schema.CompletionRequest, settings: Settings, tokenizer: Tokenizer, n_ctx: int,
) -> Asked:
    """Check a completion request. Raises ApiError."""
    texts, prompts = await _prompts(request.prompt, tokenizer)
    check_lengths(prompts, n_ctx)
    if request.echo and request.logprobs is not None:
        raise bad("echo with logprobs is not supported: prompts are not scored", "echo")
    n_logprobs = -1 if request.logprobs is None else request.logprobs
    if request.echo:
        texts = [t or tokenizer.decode(p) for t, p in zip(texts, prompts, strict=True)]
    max_tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return Asked(
        prompts, texts, max_tokens=max_tokens, logprobs=n_logprobs >= 0, echo=bool(request.echo),
        params=sampling(request, settings, tokenizer, n_logprobs), **common(request, settings))


def chat_limits(request: schema.ChatRequest, n_ctx: int) -> tuple[int, int]:
    """max_tokens and n_logprobs of a chat request. Raises ApiError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    n_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    given = (request.max_tokens, request.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise bad("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    return next((g for g in given if g is not None), n_ctx), n_logprobs


def check_lengths(prompts: list[list[int]], n_ctx: int) -> None:
    """Raises ApiError (context_length_exceeded) when a prompt leaves no room for a token."""
    for prompt in prompts:
        if not prompt:
            raise bad("the prompt is empty", "prompt")
        if len(prompt) >= n_ctx:
            raise bad(f"the prompt has {len(prompt)} tokens and the context holds {n_ctx}: "
                      "shorten the prompt", "prompt", "context_length_exceeded")


async def encode(tokenizer: Tokenizer, text: str, **how: Any) -> list[int]:
    """Token ids of a text; a long one does not hold up the event loop. Raises ApiError."""
    try:
        if len(text) > _LONG:
            return await asyncio.to_thread(tokenizer.encode, text, **how)
        return tokenizer.encode(text, **how)
    except RequestError as error:
        raise bad(str(error), "prompt") from error


async def _prompts(prompt: Any, tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """Texts (empty where token ids were given) and token ids of each prompt."""
    if isinstance(prompt, str):
        return [prompt], [await encode(tokenizer, prompt)]
    if isinstance(prompt[0], int):
        return [""], [check_tokens(prompt, tokenizer)]
    if isinstance(prompt[0], str):
        return list(prompt), [await encode(tokenizer, text) for text in prompt]
    return [""] * len(prompt), [check_tokens(p, tokenizer) for p in prompt]


def check_tokens(tokens: list[int], tokenizer: Tokenizer, param: str = "prompt") -> list[int]:
    """The same tokens. Raises ApiError for one outside the vocabulary."""
    if tokens and max(tokens) >= tokenizer.n_vocab:
        raise bad(f"token {max(tokens)} is outside the vocabulary of {tokenizer.n_vocab}", param)
    return tokens


def _biases(given: dict[str, float] | list[list[int | float]], tokenizer: Tokenizer
            ) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, dict) else given
    biases: dict[int, float] = {}
    for token, bias in pairs:
        text = str(token)
        is_id = text.isascii() and text.isdigit() and len(text) < 10
        if not is_id or int(text) >= tokenizer.n_vocab:
            raise bad(f"logit_bias names {text[:40]!r}, which is no token id of this vocabulary of "
                      f"{tokenizer.n_vocab}", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad("a bias is outside -100 to 100", "logit_bias")
        biases[int(text)] = float(bias)
    return tuple(biases.items())
