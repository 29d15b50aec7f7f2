"""From a conversation to a prompt: the model's template, tools, answers in threads.

Uses templates and the vocabulary; no sampling, no HTTP and no engine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import RequestError
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import generic_tools, tools
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.call_grammar import CallGrammar
from pipeinfer.server.errors import bad
from pipeinfer.server.families import CHANNELS, QUOTE, Family, family_of, knows_tools
from pipeinfer.server.grammars import Grammars
from pipeinfer.server.pictures import Shown
from pipeinfer.server.settings import Settings
from pipeinfer.server.tools import ToolUse
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.base import Specification
from pipeinfer.strategies.decomposers.prompts import opening, texts_of

T = TypeVar("T")
_MARK_TOKENS = 8  #: of the end of a prompt, in which the mark of reasoning is looked for
MOST_CALLS = 16  #: of one answer: a weak model would call functions forever


def prompt_of(request: schema.ChatRequest, settings: Settings, tokenizer: Tokenizer,
              params: SamplingParams, offered: ToolUse | None, shown: Shown
              ) -> tuple[list[int], Specification | None]:
    """Return the prompt as tokens, and how the answer is decomposed, None if it is not.

    shown: the pictures of the conversation.
    Control tokens in contents stay text. Raises ApiError.
    """
    method = _method_of(request, settings, params, offered)
    if not method:
        return _templated(shown.encoder(tokenizer), request, tokenizer, offered, shown), None
    messages = [{"role": m.role, "content": _text(m.content, shown)} for m in request.messages]
    try:
        opened = opening(tokenizer, texts_of(Path(settings.model)), method, messages)
    except RequestError as error:
        raise bad(str(error), "messages") from error
    return list(opened.prompt), opened.decompose


def tokens_of(request: schema.ChatRequest, tokenizer: Tokenizer, grammars: Grammars,
              shown: Shown) -> list[int]:
    """Return the prompt of a conversation that one thread answers, however long. Raises
    ApiError."""
    offered, _ = tools_of(request, tokenizer, grammars)
    return _templated(shown.encoder(tokenizer), request, tokenizer, offered, shown)


def _method_of(request: schema.ChatRequest, settings: Settings, params: SamplingParams,
               offered: ToolUse | None) -> str:
    """Return the method that decomposes the answer, "" for none.

    Raises ApiError if a request names a method that it cannot have. The server's default method is
    dropped instead.
    """
    asked_for = request.decomposer
    if asked_for == "none" or (asked_for is None and not settings.decomposer):
        return ""
    method = asked_for or settings.decomposer
    problem = "it cannot continue a message" if continues(request) else ""
    if method not in settings.decomposers:
        problem = "this server was not started with it: see --decomposer"
    elif (params.grammar or offered) and registry.decomposer(method).make is not None:
        problem = "it cannot follow a grammar or call tools"
    elif not registry.decomposer(method).penalties and params.uses_history:
        problem = "it does not support repetition penalties"
    elif request.has_media:
        problem = "threads of an answer cannot share pictures"
    if problem and asked_for is not None:
        raise bad(f"decomposer {method}: {problem}", "decomposer")
    return "" if problem else method


def render(
    request: schema.Conversation, tokenizer: Tokenizer, tools: ToolUse | None, shown: Shown,
) -> str:
    """Return the prompt of a conversation as text. Raises ApiError when the template refuses it."""
    return shown.displayed(_templated(tokenizer.apply_chat, request, tokenizer, tools, shown))


def continues(request: schema.Conversation) -> bool:
    """Return whether the answer goes on with the last message. Raises ApiError if it cannot."""
    last, wanted = request.messages[-1], request.continue_final_message
    can = last.role == "assistant" and not last.tool_calls and bool(last.content)
    if wanted is None:
        return can and request.add_generation_prompt is None
    if wanted and (not can or request.add_generation_prompt):
        raise bad("continue_final_message needs a last message of the assistant with a content and "
                  "without calls, and no add_generation_prompt", "continue_final_message")
    return wanted


def _templated(
    make: Callable[..., T], request: schema.Conversation, tokenizer: Tokenizer,
    tools: ToolUse | None, shown: Shown,
) -> T:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    template = tokenizer.chat_template or ""
    messages = [_message(m, "developer" in template, shown) for m in request.messages]
    offered = tools.tools if tools else None
    if family_of(template).form == "channels":
        messages = _one_call_each(messages)
    if family_of(template).name == "kimi":
        _number_calls(messages)
    generic = not knows_tools(template)
    calls = any(m.tool_calls for m in request.messages)
    if generic and (tools or calls or any(m.role == "tool" for m in request.messages)):
        functions = [tool["function"] for tool in offered or ()]
        messages = generic_tools.messages_for(
            messages, functions, tools is not None and tools.required)
        offered = None
    tries = [messages]
    if any(m["role"] == "system" for m in messages[1:]):
        tries.append(_one_system(messages))
    if calls and not generic:
        tries += [[_written(m) for m in tried] for tried in tries]
    if generic and tools and request.messages[0].role not in ("system", "developer"):
        tries.append(generic_tools.without_system(messages))  # the template has no system role
    errors = []
    for tried in tries:
        try:
            return make(tried, request.add_generation_prompt is not False, tools=offered,
                        variables=variables, continued=continues(request))
        except RequestError as error:
            errors.append(error)
    raise bad(str(errors[0]), "messages") from errors[0]


def marks_of(family: Family, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens among the texts that a family writes around reasoning and calls."""
    tokens = tokenizer.encode(f"{family} {CHANNELS} {QUOTE}", add_bos=False, special=True)
    return {tokenizer.piece(token, special=True).decode("utf-8", "replace"): token
            for token in tokens if tokenizer.is_markup(token)}


def reading_of(prompt: list[int], offered: ToolUse | None, grammar: str, tokenizer: Tokenizer
               ) -> dict[str, Any]:
    """Return how the answer is to be read: `shown`, `inside` and `thought` of EngineRequest.

    grammar: of the answer; unless it can end reasoning that the template has begun, there is none.
    """
    family = family_of(tokenizer.chat_template or "")
    marks = marks_of(family, tokenizer)
    opened, closed = family.think
    is_free = not grammar or (offered is not None and offered.grammar and not offered.required)
    inside = tokenizer.decode(prompt[-_MARK_TOKENS:], True).rstrip().endswith(opened) and bool(
        is_free or closed in grammar or f"<[{marks.get(closed)}]>" in grammar)
    thought = ("" if inside else opened, closed) if family.form != "channels" else (
        "<|channel|>analysis", "<|end|>")
    return {"inside": inside, "thought": thought,
            "shown": [i for i in marks.values() if tokenizer.is_control(i)]}


def offered_by(request: schema.Conversation, tokenizer: Tokenizer) -> ToolUse | None:
    """Return the tools that a request offers, if the model decides about calls; None without
    tools."""
    if not request.tools:
        return None
    template = tokenizer.chat_template or ""
    most = 1 if request.parallel_tool_calls is False else MOST_CALLS
    offered = [tool.model_dump(exclude_none=True) for tool in request.tools]
    for function in (tool["function"] for tool in offered):
        function["parameters"] = function.get("parameters") or tools.NONE
        if knows_tools(template):  # most of these templates append it
            function.setdefault("description", "")
    return ToolUse(offered, most)


def tools_of(request: schema.ChatRequest, tokenizer: Tokenizer, grammars: Grammars
             ) -> tuple[ToolUse | None, list[str]]:
    """Return the tools for the model, with a grammar if calls are to be enforced, and notes on
    parameters that it does not hold. Raises ApiError."""
    choice = request.tool_choice
    offered = offered_by(request, tokenizer)
    if offered is None and choice not in (None, "none", "auto"):
        raise bad("tool_choice asks for a call, but tools is empty", "tool_choice")
    if offered is None or choice == "none":
        return None, []
    if isinstance(choice, schema.AllowedChoice):
        offered, choice = _allowed(offered, choice.allowed_tools), choice.allowed_tools.mode
    functions, required, most = [tool["function"] for tool in offered.tools], False, offered.most
    if choice in (None, "auto"):
        free = (request.response_format is None or request.response_format.type == "text")
        knows = knows_tools(tokenizer.chat_template or "")
        if knows or request.grammar or request.ignore_eos or not free:
            return offered, []
    else:
        required = True
        most = most if request.parallel_tool_calls else 1
    if isinstance(choice, schema.NamedTool):
        functions = [f for f in functions if f["name"] == choice.function.name]
        if not functions:
            raise bad(f"tool_choice names {choice.function.name!r}, which is not in tools",
                      "tool_choice")
    family = family_of(tokenizer.chat_template or "")
    functions, notes = _held(functions, grammars)
    try:
        grammar = CallGrammar(family, marks_of(family, tokenizer)).of(
            functions, most, words=not required)
    except RequestError as error:
        raise bad(f"the parameters of a tool cannot be used: {error}", "tools") from error
    return replace(offered, most=most, required=required, grammar=grammar), notes


def _allowed(offered: ToolUse, allowed: schema.AllowedTools) -> ToolUse:
    names = {tool.function.name for tool in allowed.tools}
    tools = [tool for tool in offered.tools if tool["function"]["name"] in names]
    if len(tools) < len(names):
        raise bad("allowed_tools names a function that is not in tools", "tool_choice")
    return replace(offered, tools=tools)


def _held(functions: list[dict[str, Any]], grammars: Grammars
          ) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions with the parameters that a grammar can hold, and notes on the rest."""
    out, notes = [], []
    for function in functions:
        parameters, found = grammars.enforceable(function["parameters"], f"tool {function['name']}",
                                          "tools", function.get("strict"))
        if "$ref" not in parameters:
            parameters = {"type": "object"} | parameters
        out.append({**function, "parameters": parameters})
        notes += found
    return out, notes


def _message(message: schema.Message, knows_developer: bool, shown: Shown) -> dict[str, Any]:
    content = _text(message.content or message.refusal, shown)
    out: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "developer" and not knows_developer:
        out["role"] = "system"
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            out[name] = value
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:  # gpt-oss has the second name for it
        out["reasoning_content"] = out["thinking"] = reasoning
    if message.tool_calls:
        out["tool_calls"] = [{
            "id": call.id, "type": "function",
            "function": {"name": call.function.name,
                         "arguments": _arguments(call.function.arguments)},
        } for call in message.tool_calls]
    return out


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of agents for a template that allows one system message, at the beginning:
    those at the beginning as one, later ones as the user's."""
    first = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    joined = [{**first[0], "content": "\n\n".join(m["content"] for m in first)}] if first else []
    return joined + [{**m, "role": "user"} if m["role"] == "system" else m
                     for m in messages[len(first):]]


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as gpt-oss's template reads them: of a message's calls only the first, with
    its reasoning or its text. Each call gets a message, which its result follows."""
    out: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        first = next((call for call in waiting
                      if call["tool_calls"][0]["id"] == message.get("tool_call_id")), None)
        if message["role"] != "tool":
            out += waiting
            waiting = []
        elif first is not None:
            waiting.remove(first)
            out.append(first)
        if calls := message.get("tool_calls"):
            thought = "\n\n".join(filter(None, (message.get("thinking"), message["content"])))
            waiting = [{"role": "assistant", "content": "", "thinking": "" if i else thought,
                        "tool_calls": [call]} for i, call in enumerate(calls)]
        else:
            out.append(message)
    return out + waiting


def _number_calls(messages: list[dict[str, Any]]) -> None:
    """Give calls the ids that Kimi was trained with: the function and a number that rises over the
    conversation."""
    ids: dict[str, str] = {}
    count = itertools.count()
    for message in messages:
        for call in message.get("tool_calls", ()):
            name = f"functions.{call['function']['name']}:{next(count)}"
            ids[call["id"]] = call["id"] = name
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]


def _written(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text, which some templates
    append."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": _json(
            call["function"]["arguments"])}} for call in message["tool_calls"]]}


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _text(content: str | list[schema.ContentPart] | None, shown: Shown) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(
        part.text if isinstance(part, schema.TextPart) else shown.mark(part) for part in content)


def _arguments(text: str) -> Any:
    """Return arguments as an object, because templates write them as JSON themselves."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
