"""Converts a client's request to the engine's form: sampling fields, stop strings, prompts as
tokens, tools, a grammar.

`request_of` checks what the schema cannot express (the vocabulary, the context, fields that exclude
each other), with `prompts`, `chat` and `grammars`. It uses no HTTP and no engine.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.media import Pictures
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import chat, prompts
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.server.grammars import Grammars, constrain
from pipeinfer.server.keys import METER, NO_KEY
from pipeinfer.server.pictures import File, Shown
from pipeinfer.server.settings import Settings
from pipeinfer.server.tools import ToolUse
from pipeinfer.strategies.decomposers.base import Specification

_COMPLETION_TOKENS = 16  #: max_tokens of /v1/completions when it is left out, as in the OpenAI API
NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty",
          "frequency_penalty", "repeat_last_n")


class ServedModel(NamedTuple):
    """The model for which requests are checked. n_ctx: its context in tokens. pictures: its
    projector; None without one."""

    settings: Settings
    tokenizer: Tokenizer
    grammars: Grammars
    n_ctx: int
    pictures: Pictures | None = None

    def shown(self, conversation: schema.Conversation) -> Shown:
        """Return the pictures of a conversation. Raises ApiError."""
        return Shown(conversation.messages, self.pictures, self.settings.serve.image_urls)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request with all of its choices. The journal stores it.

    prompts: token ids of each. texts: of each, "" if it was given as tokens.
    n: choices per prompt. params: of every choice, without its key. seed: of the noise.
    usage, detail: whether the answer includes these. progress: whether its stream says how much of
        the prompt is computed. decompose: for a response in threads.
    tools: whose calls are to be parsed, None for no tools.
    shown: control tokens that are text to the parser of the answer.
    inside: whether the answer begins within reasoning. thought: marks of reasoning, see StopText.
    marked: whether reasoning is a part of the content, between its marks.
    stores: whether cells of its prompts may be kept on disks (--kv-disk).
    files: pictures of the prompt, whose rows are computed when the answer has begun.
    salt: requests share cells of prompts with those of the same salt only.
    notes: on parts of the request that are not honoured, for the answer.
    """

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
    tools: ToolUse | None = None
    shown: list[int] = field(default_factory=list)
    inside: bool = False
    thought: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    progress: bool = False
    marked: bool = False
    stores: bool = True
    files: list[File] = field(default_factory=list)
    salt: bytes = b""

    def text_of(self, tokenizer: Tokenizer) -> TextStream:
        """Return the text of a choice, which is empty so far."""
        return TextStream(tokenizer, self.stops, self.shown, self.thought)

    @property
    def count(self) -> int:
        """The number of choices of the request: prompts times n."""
        return len(self.prompts) * self.n

    def choice(self, index: int) -> tuple[list[int], SamplingParams]:
        """Return the prompt and the params of choice number `index`, with its noise key and the
        start of its grammar."""
        prompt = self.prompts[index // self.n]
        return prompt, structs.replace(
            self.params, key=noise_key(self.seed, index % self.n),
            grammar_start=len(prompt) if self.params.grammar else 0)


def request_of(body: schema.CompletionRequest | schema.ChatRequest, server: ServedModel
               ) -> EngineRequest:
    """Return a client's request in the engine's form.

    Templates, long texts and grammars take time, so call it outside the event loop.
    Raises ApiError.
    """
    if isinstance(body, schema.ChatRequest):
        return _conversation(body, server)
    return _completion(body, server)


def _completion(request: schema.CompletionRequest, server: ServedModel) -> EngineRequest:
    tokenizer = server.tokenizer
    prompts.check_size(request.prompt, tokenizer, server.n_ctx)
    texts, tokens = prompts.prompts_of(request.prompt, tokenizer, bool(request.parse_special))
    prompts.check_lengths(tokens, server.n_ctx)
    if request.echo and request.logprobs is not None:
        raise bad("echo with logprobs is not supported: prompts are not scored", "echo")
    n_logprobs = -1 if request.logprobs is None else request.logprobs
    if request.echo:
        texts = [t or tokenizer.decode(p) for t, p in zip(texts, tokens, strict=True)]
    max_tokens = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    max_tokens = server.n_ctx if max_tokens == -1 else max_tokens
    params = _sampling(request, server, n_logprobs)
    shared = _common(request, server.settings)
    grammar, notes = constrain(request, server.grammars)
    params = structs.replace(params, grammar=grammar)
    return EngineRequest(tokens, texts, max_tokens=max_tokens, logprobs=n_logprobs >= 0,
                         echo=bool(request.echo), params=params, notes=list(notes), **shared)


def _conversation(request: schema.ChatRequest, server: ServedModel) -> EngineRequest:
    settings, tokenizer = server.settings, server.tokenizer
    max_tokens, n_logprobs = _chat_limits(request, server.n_ctx)
    prompts.check_size(request.messages, tokenizer, server.n_ctx, "messages")
    params = _sampling(request, server, n_logprobs)
    offered, notes = chat.tools_of(request, tokenizer, server.grammars)
    grammar, more = constrain(request, server.grammars, offered.grammar if offered else "")
    params = structs.replace(params, grammar=grammar)
    shown = server.shown(request)
    prompt, decompose = chat.prompt_of(request, settings, tokenizer, params, offered, shown)
    prompts.check_lengths([prompt], server.n_ctx, "messages")
    return EngineRequest([prompt], [""], max_tokens=max_tokens, params=params,
                         logprobs=n_logprobs >= 0, decompose=decompose, tools=offered,
                         files=shown.files, notes=[*notes, *more], marked="none" == (
                             request.reasoning_format or settings.serve.reasoning_format),
                         **chat.reading_of(prompt, offered, grammar, tokenizer),
                         **_common(request, settings))


def _sampling(request: schema.Sampling, server: ServedModel, n_logprobs: int) -> SamplingParams:
    """Return the sampling params of a request, with the server's defaults for missing fields.

    Raises ApiError for a bias of a token outside the vocabulary.
    """
    values: dict[str, Any] = {name: given for name in NAMES
                              if (given := getattr(request, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias, server.tokenizer)
    return structs.replace(server.settings.defaults, n_logprobs=n_logprobs, **values)


def _common(request: schema.Sampling, settings: Settings) -> dict[str, Any]:
    """Return the fields that both kinds of request share. Raises ApiError."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad("best_of other than n is not supported", "best_of")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options is allowed only with stream: true", "stream_options")
    stop = request.stop
    seed = settings.seed if request.seed is None else request.seed
    if seed == -1:
        seed = secrets.randbits(31)
    return {
        "n": request.n or 1, "seed": seed, "ignore_eos": bool(request.ignore_eos),
        "stops": [stop] if isinstance(stop, str) else list(stop or ()),
        "stream": bool(request.stream),
        "usage": bool(request.stream_options and request.stream_options.include_usage),
        "detail": bool(request.pipeinfer and request.pipeinfer.detail),
        "progress": bool(request.return_progress), "stores": request.store is not False,
        "salt": METER.get(NO_KEY).salt,
    }


def _chat_limits(request: schema.ChatRequest, n_ctx: int) -> tuple[int, int]:
    """Return max_tokens and n_logprobs of a chat request. Raises ApiError."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs needs logprobs: true", "top_logprobs")
    n_logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    given = (request.max_tokens, request.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise bad("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    most = next((g for g in given if g is not None), -1)
    return n_ctx if most == -1 else most, n_logprobs


def _biases(given: dict[str, float] | list[list[int | float]], tokenizer: Tokenizer
            ) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, dict) else given
    biases: dict[int, float] = {}
    for token, bias in pairs:
        text = str(token)
        is_id = text.isascii() and text.isdigit() and len(text) < 10
        if not is_id or int(text) >= tokenizer.n_vocab:
            raise bad(f"logit_bias names {text[:40]!r}, which is not a token id of this vocabulary "
                      f"of {tokenizer.n_vocab}", "logit_bias")
        if not -100 <= bias <= 100:
            raise bad("a bias must be from -100 to 100", "logit_bias")
        biases[int(text)] = float(bias)
    return tuple(biases.items())
