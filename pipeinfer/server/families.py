"""The forms in which families of models write function calls and reasoning: one declaration each.

A family is recognised by the model's chat template. The parser and the grammar of forced calls
read this table; neither has code for a single model. Text alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """How models of a family write calls. Blanks at the ends of a text may be missing in answers.

    signs: texts that the chat template of this family contains, all of them.
    form: of the arguments. object: name and arguments are fields of a JSON object. json: a JSON
        object after the name. tags: a pair of marks around each. python: keyword arguments.
        gemma: JSON with other quotes. channels: json, with a header before each part of the
        answer.
    open, close: around the calls. between: two calls, "" for none, None: only one is possible.
    begin, then, end: before the name, between name and arguments, after the arguments.
    pair: before the name of an argument, between name and value, after the value.
    comma: between two arguments. think: around reasoning.
    """

    name: str
    signs: tuple[str, ...]
    form: Literal["object", "json", "tags", "python", "gemma", "channels"]
    open: str = ""
    close: str = ""
    between: str | None = ""
    begin: str = '{"name": "'
    then: str = '", "arguments": '
    end: str = "}"
    pair: tuple[str, str, str] = ("", "", "")
    comma: str = ""
    think: tuple[str, str] = ("<think>", "</think>")


QUOTE = '<|"|>'  #: around texts, in Gemma's form
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HERMES = Family("hermes", ("<tool_call>",), "object", "<tool_call>\n", "\n</tool_call>",
                "\n</tool_call>\n<tool_call>\n")


def _deepseek(words: str) -> str:
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_CALLS, _CALL, _SEPARATOR = map(_deepseek, ("tool calls begin", "tool call begin", "tool sep"))
_CALL_END, _CALLS_END = map(_deepseek, ("tool call end", "tool calls end"))
_DSML = "\uff5cDSML\uff5c"
#: the first whose signs are all in a template
FAMILIES = (
    Family("gpt-oss", ("<|channel|>",), "channels", "", "", None,
           "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
    Family("gemma", ("<|tool_call>",), "gemma", "<|tool_call>", "", "<|tool_call>", "call:", "{",
           "}<tool_call|>", ("", ":", ""), ","),
    Family("deepseek-v3.2", (_DSML,), "tags", f"<{_DSML}function_calls>\n",
           f"</{_DSML}function_calls>", "", f'<{_DSML}invoke name="', '">\n',
           f"</{_DSML}invoke>\n", (f'<{_DSML}parameter name="', '">', f"</{_DSML}parameter>\n")),
    Family("deepseek-v3", (_CALLS, "```json"), "json", _CALLS, _CALLS_END, "\n",
           f"{_CALL}function{_SEPARATOR}", "\n```json\n", f"\n```{_CALL_END}"),
    Family("deepseek-v3.1", (_CALLS,), "json", _CALLS, _CALLS_END, "", _CALL, _SEPARATOR,
           _CALL_END),
    Family("kimi", ("<|tool_call_begin|>",), "json", "<|tool_calls_section_begin|>",
           "<|tool_calls_section_end|>", "", "<|tool_call_begin|>functions.",
           ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    Family("minimax", ("<minimax:tool_call>",), "tags", "<minimax:tool_call>\n",
           "</minimax:tool_call>", "", '<invoke name="', '">\n', "</invoke>\n",
           ('<parameter name="', '">', "</parameter>\n")),
    Family("mistral", ("[TOOL_CALLS]", "[ARGS]"), "json", "[TOOL_CALLS]", "", "[TOOL_CALLS]",
           "", "[ARGS]", ""),
    Family("mistral-list", ("[TOOL_CALLS]",), "object", "[TOOL_CALLS][", "]", ", "),
    Family("granite", ("<|tool_call|>",), "object", "<|tool_call|>[", "]", ", "),
    Family("lfm2", ("<|tool_call_start|>",), "python", "<|tool_call_start|>[",
           "]<|tool_call_end|>", ", ", "", "(", ")", ("", "=", ""), ", "),
    Family("qwen-xml", ("<function=",), "tags", "<tool_call>\n", "\n</tool_call>",
           "\n</tool_call>\n<tool_call>\n", "<function=", ">\n", "</function>",
           ("<parameter=", ">\n", "\n</parameter>\n")),
    Family("glm", ("<arg_key>",), "tags", "<tool_call>", "", "\n<tool_call>", "", "\n",
           "</tool_call>", ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    HERMES,
    Family("llama", (), "object", between="; ", then='", "parameters": '),
)
_THINK = (("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"),
          ("◁think▷", "◁/think▷"), ("<think>", "</think>"))


def knows_tools(template: str) -> bool:
    """Whether a chat template describes tools itself."""
    return "tools" in template


@functools.lru_cache(maxsize=16)
def family_of(template: str) -> Family:
    """Return the family of models with this chat template; without tools in it the form is
    Hermes's, which the server then describes."""
    found = next(f for f in FAMILIES if all(sign in template for sign in f.signs))
    if not knows_tools(template) and found.form != "channels":
        found = HERMES
    think = next((pair for pair in _THINK if pair[0] in template), _THINK[-1])
    return replace(found, think=think)
