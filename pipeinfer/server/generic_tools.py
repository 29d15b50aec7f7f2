"""Tools for models whose chat template does not support them: a system message, and calls as
text.

Calls have the Hermes form (`<tool_call>` around a JSON object), which many models have been
trained on, and which a grammar can enforce. Earlier calls and their results become messages that
every template supports. If the model decides whether to call, two example exchanges show both
cases: small models follow examples better than instructions. Messages are dicts; no HTTP and no
vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can call functions. These are the functions, as JSON:
{functions}

To call a function, write its name and its arguments like this, and nothing after it:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
{rule}"""
_RULES = {
    "auto": "Call a function when it helps to answer. Otherwise answer in words.",
    "required": "Call a function now.",
}
_EXAMPLES: dict[str, Any] = {"boolean": True, "integer": 1, "number": 1, "array": [], "object": {},
                             "null": None}
_LONGEST_QUESTION = 200  #: characters


def messages_for(messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]],
                 required: bool) -> list[dict[str, Any]]:
    """Return the conversation as messages of system, user and assistant, with the functions
    described.

    required: whether the model must call a function.
    Successive results of calls become one message, because templates may require alternating
    roles.
    """
    out: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, *(_call(call) for call in calls)]))
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if out and out[-1].get("results"):
                out[-1]["content"] += f"\n{content}"
                continue
        out.append({"role": role, "content": content})
        out[-1].update({"results": True} if message["role"] == "tool" else {})
    for message in out:
        message.pop("results", None)
    if functions:
        if not required:
            start = int(bool(out) and out[0]["role"] == "system")
            out[start:start] = _shown(functions[0])
        _introduce(out, _INTRODUCTION.format(
            functions="\n".join(json.dumps(f, ensure_ascii=False) for f in functions),
            rule=_RULES["required" if required else "auto"]))
    return out


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the system text at the beginning of the first user message."""
    words = [m["content"] for m in messages if m["role"] == "system"]
    out = [dict(m) for m in messages if m["role"] != "system"]
    first = next((m for m in out if m["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(words)}, *out]
    first["content"] = "\n\n".join([*words, first["content"]])
    return out


def _shown(function: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return messages that show an answer in words and then a call; small models need this
    order."""
    question = (function.get("description") or "").strip().partition("\n")[0]
    parameters = function.get("parameters") or {}
    properties, names = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict):
        properties = {}
    if not isinstance(names, list) or not names:
        names = list(properties)
    arguments = {name: _example(name, properties.get(name))
                 for name in names if isinstance(name, str)}
    return [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "user", "content": question[:_LONGEST_QUESTION] or f"Call {function['name']}."},
        {"role": "assistant",
         "content": _call({"function": {"name": function["name"], "arguments": arguments}})},
    ]


def _example(name: str, schema: Any) -> Any:
    """Return a value for an argument. The word "some" keeps small models from copying it."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(choices := schema.get("enum"), list) and choices:
        return choices[0]
    kind = schema.get("type")
    return _EXAMPLES.get(kind, f"some {name}") if isinstance(kind, str) else f"some {name}"


def _introduce(messages: list[dict[str, Any]], text: str) -> None:
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{messages[0]['content']}\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]},
                         ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
