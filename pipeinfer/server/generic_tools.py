"""Tools for models whose chat template knows none: a system message, and calls as plain text.

Calls have the Hermes form (`<tool_call>` around a JSON object), which many models have seen, and
which a grammar can hold them to. Earlier calls and their results become turns that every template
knows. Knows messages as dicts, no HTTP and no vocabulary.
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


def messages_for(messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]],
                 required: bool) -> list[dict[str, Any]]:
    """The conversation in turns of system, user and assistant, with the functions described.

    Results of calls that follow one another become one turn, because templates may want turns to
    alternate.
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
        _introduce(out, _INTRODUCTION.format(
            functions="\n".join(json.dumps(f, ensure_ascii=False) for f in functions),
            rule=_RULES["required" if required else "auto"]))
    return out


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with the system's words at the beginning of the first user's turn."""
    words = [m["content"] for m in messages if m["role"] == "system"]
    out = [dict(m) for m in messages if m["role"] != "system"]
    first = next((m for m in out if m["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(words)}, *out]
    first["content"] = "\n\n".join([*words, first["content"]])
    return out


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
