"""From a chat request to a prompt: the model's template, tools, grammars.

Knows templates and the vocabulary, no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import RequestError
from pipeinfer.models.text.grammar import Vocabulary, compile_grammar
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import requests, tools
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.server.requests import Asked
from pipeinfer.server.settings import Settings
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.prompts import Opening, opening, texts_of


class Grammars:
    """Compiles grammars against one vocabulary, beside the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    async def compile(self, kind: str, text: Any, param: str) -> str:
        """The compiled grammar. Raises ApiError naming `param` when it can not be used."""
        try:
            return await asyncio.to_thread(self._compile, kind, text)
        except RequestError as error:
            raise bad(str(error), param, "invalid_grammar") from error

    def _compile(self, kind: str, text: Any) -> str:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.of(self._tokenizer)
        return compile_grammar(kind, text, self._vocabulary)


@dataclass(frozen=True, slots=True)
class Chat:
    """A checked chat request. hermes: style of calls to look for, None for no tools."""

    asked: Asked
    hermes: bool | None


async def constrain(
    request: schema.Sampling, grammars: Grammars, forced: str = "",
) -> str:
    """The compiled grammar that a request asks for, empty for none. Raises ApiError.

    forced: a grammar (lark) that a tool choice asks for.
    """
    wanted = request.response_format
    kind, param = "", ""
    text: Any = None
    if wanted is not None and wanted.type != "text":
        kind, param = wanted.type, "response_format"
        if kind == "json_schema":
            if wanted.json_schema is None:
                raise bad("response_format json_schema needs json_schema", "response_format")
            text = wanted.json_schema.json_schema
    if request.grammar:
        if kind:
            raise bad("give either grammar or response_format", "grammar")
        kind, text, param = "gbnf", request.grammar, "grammar"
    if forced:
        if kind:
            raise bad(f"tool_choice asks for a call and {param} for something else", "tool_choice")
        kind, text, param = "lark", forced, "tools"
    if not kind:
        return ""
    if request.ignore_eos:
        raise bad(f"ignore_eos with {param}: a grammar says where the text ends", "ignore_eos")
    return await grammars.compile(kind, text, param)


async def chat(
    request: schema.ChatRequest, settings: Settings, tokenizer: Tokenizer, grammars: Grammars,
    n_ctx: int,
) -> Chat:
    """Check a chat request. Raises ApiError."""
    max_tokens, n_logprobs = requests.chat_limits(request, n_ctx)
    params = requests.sampling(request, settings, tokenizer, n_logprobs)
    template = tokenizer.chat_template or ""
    offered, forced = _tools(request, template, tokenizer)
    params = dataclasses.replace(params, grammar=await constrain(request, grammars, forced))
    method = _method(request, settings, params, offered)
    decompose = None
    if method:
        opened = await _opening(method, request, settings, tokenizer)
        prompt, decompose = list(opened.prompt), opened.decompose
    else:
        text = await render(request, tokenizer, offered)
        prompt = await requests.encode(tokenizer, text, special=True)
    requests.check_lengths([prompt], n_ctx)
    return Chat(
        Asked([prompt], [""], max_tokens=max_tokens, params=params, logprobs=n_logprobs >= 0,
              decompose=decompose, **requests.common(request, settings)),
        tools.is_hermes(template) if offered else None,
    )


def _method(request: schema.ChatRequest, settings: Settings, params: SamplingParams,
            offered: list[dict[str, Any]] | None) -> str:
    """How the answer is decomposed, empty for not at all. Raises ApiError where a request names a
    method that it can not have; the server's own choice gives way instead."""
    asked_for = request.decomposer
    if asked_for == "none" or (asked_for is None and not settings.decomposer):
        return ""
    method = asked_for or settings.decomposer
    problem = ""
    if method not in settings.decomposers:
        problem = "this server was not started for it: see --decomposer"
    elif params.grammar or offered:
        problem = "it can not follow a grammar or call tools"
    elif not registry.decomposer(method).penalties and params.uses_history:
        problem = "it knows no penalties for repetition"
    if problem and asked_for is not None:
        raise bad(f"decomposer {method}: {problem}", "decomposer")
    return "" if problem else method


async def _opening(method: str, request: schema.ChatRequest, settings: Settings,
                   tokenizer: Tokenizer) -> Opening:
    """The main thread's prompt and how the answer goes on. Raises ApiError."""
    messages = [{"role": m.role, "content": _text(m.content)} for m in request.messages]

    def open_it() -> Opening:
        return opening(tokenizer, texts_of(Path(settings.model)), method, messages)

    try:
        return await asyncio.to_thread(open_it)
    except RequestError as error:
        raise bad(str(error), "messages") from error


async def render(
    request: schema.Conversation, tokenizer: Tokenizer, offered: list[dict[str, Any]] | None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation. Raises ApiError when the template refuses it."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    knows_developer = "developer" in (tokenizer.chat_template or "")
    messages = [_message(m, knows_developer) for m in request.messages]
    try:
        return await asyncio.to_thread(
            tokenizer.apply_chat, messages, add_generation_prompt, tools=offered,
            variables=variables)
    except RequestError as error:
        raise bad(str(error), "messages") from error


def tool_list(request: schema.Conversation, template: str) -> list[dict[str, Any]] | None:
    """The tools as a template wants them. Raises ApiError when it knows none."""
    if not request.tools:
        return None
    if "tools" not in template:
        raise bad("this model's chat template knows no tools", "tools")
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def _tools(request: schema.ChatRequest, template: str, tokenizer: Tokenizer
           ) -> tuple[list[dict[str, Any]] | None, str]:
    """The tools for the template, and a grammar that forces a call."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice asks for a call and there are no tools", "tool_choice")
        return None, ""
    offered = tool_list(request, template)
    if choice == "none" or offered is None:
        return None, ""
    if choice in (None, "auto"):
        return offered, ""
    functions = [tool["function"] for tool in offered]
    if isinstance(choice, schema.NamedTool):
        functions = [f for f in functions if f["name"] == choice.function.name]
        if not functions:
            raise bad(f"tool_choice names {choice.function.name!r}, which is not in tools",
                      "tool_choice")
    marks = tokenizer.encode(tools.OPEN, add_bos=False, special=True)
    is_token = len(marks) == 1 and tokenizer.is_markup(marks[0])
    return offered, tools.forced_grammar(functions, tools.is_hermes(template), is_token)


def _message(message: schema.Message, knows_developer: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.role == "developer" and not knows_developer:
        out["role"] = "system"
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [{
            "id": call.id, "type": "function",
            "function": {"name": call.function.name,
                         "arguments": _arguments(call.function.arguments)},
        } for call in message.tool_calls]
    return out


def _text(content: str | list[schema.TextPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves: they want the object."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
