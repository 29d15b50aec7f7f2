"""Separates reasoning, words and function calls in an answer that arrives in pieces.

One parser reads whole and streamed answers, so that both give the same. The forms are those of
`families`. Text and JSON alone, no HTTP and no engine.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from pipeinfer.models.text.text_stream import partial
from pipeinfer.server.families import CHANNELS, QUOTE, Family
from pipeinfer.server.tools import TYPES, Call, More, Part, Thought, ToolUse, Words, types_of

_LONGEST_HEAD = 256  #: characters between an opening mark and the arguments
_BLANKS = " \t\r\n"
_OBJECT = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_BEGUN = re.compile(_OBJECT.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME = re.compile(r'\s*(?:function<[^<>]*>|functions\.)?([\w./-]+)(?::\d+)?"?'
                   r'(?:\s|```\w*|<[^<>]*>|\[[A-Z_]+\]\w*|null|"")*')
_RECIPIENT = "to=functions."
_CALLED = re.compile(r"to=(?:functions\.)?([\w./-]+)")
_MARK = re.compile(r"<[^<>]+>?|\[TOOL_CALLS\]|call:")
_PYTHON_TAG = "<|python_tag|>"
_CONSTANTS = {"true": True, "false": False, "null": None}
#: what JSON has outside of strings, and its words: of numbers, and constants as Python writes them
_SIGNS = frozenset(" \t\r\n,:[]{}\"-+.0123456789")
_LITERALS = frozenset({*_CONSTANTS, "True", "False", "None", "NaN", "Infinity", "e", "E"})
_WORD = re.compile(r"[A-Za-z]+|.", re.DOTALL)
_BRACKETS = {"{": "}", "[": "]", "(": ")"}

#: of reading: waits for more text at each `yield`
Steps: TypeAlias = Generator[None, None, Any]
Sink: TypeAlias = Callable[[str], None]


class AnswerParser:
    """Reads one answer.

    family: of the model. tools: that are offered; None: calls are words. If they are required, the
        beginning of a call that is cut off is no content.
    inside: whether the prompt has begun the reasoning.
    """

    def __init__(self, family: Family, tools: ToolUse | None = None, inside: bool = False) -> None:
        self._family, self._reads_calls, self._inside = family, tools is not None, inside
        self._most, self._forced = (tools.most, tools.required) if tools else (0, False)
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {}
                         for tool in (tools.tools if tools else ())}
        self._open, self._close, self._begin, self._end = (
            found[0] if (found := _MARK.search(text)) else ""
            for text in (family.open, family.close, family.begin, family.end))
        self._text = self._raw = ""  # not read yet; read since the last opening mark
        self._parts: list[Part] = []
        self._blank = self._pause = ""  # blanks in words and reasoning that may be dropped
        self._fresh = self._reads_calls  # whether blanks are dropped if a call follows
        self.calls, self._ended = 0, False  #: how many have been found; whether all has come
        self._steps = self._channels() if family.form == "channels" else self._marked()

    def push(self, text: str, ended: bool = False) -> list[Part]:
        """Return the parts of which it is certain what they are; all if the text has ended."""
        self._text += text
        next(self._steps, None)
        if ended:  # a step of its own, so that cuts of the text make no difference
            self._ended = True
            next(self._steps, None)
            if not self.calls and self._blank:
                self._parts.append(Words(self._blank))
        taken, self._parts = self._parts, []
        return taken

    # --- the answer -----------------------------------------------------------------------------

    def _marked(self) -> Steps:
        opened, closed = self._family.think
        self._inside = self._inside or bool((yield from self._begins(opened)))
        if self._inside:
            yield from self._skip("\n")
            yield from self._until([closed], self._think)
            yield from self._skip("\n")
        if self._reads_calls and not self._family.open:
            self._raw = ""
            yield from self._skip(_BLANKS)
            yield from self._starts(_PYTHON_TAG)
            if not (yield from self._calls()):
                self._put_back()
        # Some models leave the opening mark out.
        opens = [self._open, self._begin * (self._family.form == "tags")] * self._reads_calls
        while mark := (yield from self._until(opens, self._say))[1]:
            self._text, self._raw = mark + self._text, ""
            yield from self._starts(self._open)
            if not (yield from self._calls()):
                self._put_back()
                self._say(self._cut(len(mark)))

    def _channels(self) -> Steps:
        """Read parts with headers: `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`."""
        start, channel, message, *_ = CHANNELS
        sink: Sink | None = self._say
        head = yield from self._begins(_RECIPIENT)
        while head or (head := (yield from self._until(CHANNELS, sink))[1]):
            text, mark, sink = "", "", self._say
            if head in (start, channel, _RECIPIENT):
                text, mark = yield from self._until([message], limit=_LONGEST_HEAD)
            if mark and self._reads_calls and (called := _CALLED.search(head + text)):
                self._call(called[1])
                yield from self._json()
                sink = None
            elif "analysis" in text:
                sink, self._pause = self._think, ""
                yield from self._skip("\n")
            head = ""

    def _say(self, text: str) -> None:
        text = self._blank + text if self._fresh else text
        self._blank = text if self._fresh and not text.strip() else ""
        if text and not self._blank:
            self._fresh = False
            self._parts.append(Words(text))

    def _think(self, text: str) -> None:
        text = self._pause + text
        kept = text.rstrip()
        self._pause = text[len(kept) :]
        if kept:
            self._parts.append(Thought(kept))

    def _put_back(self) -> None:
        """Read what is no call again, as words."""
        self._text = "" if self._forced and self._is_cut else self._raw + self._text

    # --- calls ----------------------------------------------------------------------------------

    def _calls(self) -> Steps:
        """Read the calls after an opening mark; return whether there is one. What was read and is
        no call is in `_raw`."""
        found = False
        while True:
            yield from self._skip(_BLANKS + (",;]})" if found else "["))
            if self._close and (yield from self._starts(self._close)):
                return found
            is_object = self._text.startswith("{")
            if not (yield from self._object() if is_object else self._named()):
                break
            found, self._raw = True, ""
            if not self._close and not is_object:
                break
        if found and not self._is_cut:
            self._text = re.sub(r"^\s*[,;\]})]+", "", self._raw) + self._text
        return found

    def _call(self, name: str) -> None:
        self._is_kept = self.calls < self._most
        self._fresh, self._blank, self._raw = True, "", ""
        if self._is_kept:
            self.calls += 1
            self._parts.append(Call(name, ""))

    def _more(self, arguments: str) -> None:
        self._raw = ""
        if self._is_kept and arguments:
            self._parts.append(More(arguments))

    def _object(self) -> Steps:
        """Read a call that is one JSON object with its name; return whether it is one."""
        reader, seen, text = _Nested('"'), 0, ""
        while not (begun := _BEGUN.match(self._text)):
            more, read = reader.take(self._text[seen:], self._ended)
            seen, text = seen + len(read), text + more
            if reader.over or self._ended:
                break
            yield
        call = None
        if begun:
            self._cut(begun.end())
            self._call(json.loads(begun[1]))
            yield from self._json()
            mark = (yield from self._until(["}", self._close]))[1]
            self._text = mark.replace("}", "") + self._text
        else:
            self._cut(seen)
            call = parse_call(text, self._schemas)
        if call:
            self._call(call.name)
            self._more(call.arguments)
        return bool(begun or call)

    def _named(self) -> Steps:
        """Read a name and then the arguments; return whether it is a call."""
        family = self._family
        if family.form == "object" or (self._begin and not (yield from self._starts(self._begin))):
            return False
        bracket = {"python": "(", "tags": family.then.strip()[-1:] or family.pair[0]}.get(
            family.form, "{")
        head, mark = yield from self._until([bracket, self._end], limit=_LONGEST_HEAD)
        name = _NAME.fullmatch(head)
        if not name or not (mark or (name.end(1) < len(head) and name[1] in self._schemas)):
            return False
        self._call(name[1])
        if mark == self._end and mark:
            self._more("{}")
        elif mark:
            self._text = mark + self._text
            yield from {"json": self._json, "python": self._python, "gemma": self._gemma}.get(
                family.form, lambda: self._tagged(name[1]))()
            if self._end and family.form == "json":
                yield from self._skip(_BLANKS + "`}")
                yield from self._starts(self._end)
        return True

    # --- arguments ------------------------------------------------------------------------------

    def _json(self) -> Steps:
        yield from self._skip(_BLANKS)
        if self._text.startswith("{"):
            yield from self._nested('"', self._more)
        elif not self._is_cut:
            yield from self._starts("null", '""')
            self._more("{}")

    def _nested(self, quotes: str, sink: Sink) -> Steps:
        """Pass a value in brackets on; return whether it is complete."""
        reader = _Nested(quotes)
        while True:
            text, read = reader.take(self._text, self._ended)
            self._cut(len(read))
            sink(text)
            if reader.over or self._ended:
                return reader.over
            yield

    def _python(self) -> Steps:
        out: list[str] = []
        if (yield from self._nested("\"'", out.append)):
            self._more(_from_python("".join(out)))

    def _gemma(self) -> Steps:
        self._more(_from_gemma((yield from self._until([self._end]))[0]))

    def _tagged(self, function: str) -> Steps:
        """Read arguments between marks; texts are passed on as they arrive."""
        before, between, after = (part.strip() for part in self._family.pair)
        between = between[between.rfind("<") :] if "<" in between else between[-1:]
        yield from self._starts(self._family.then.strip()[-1:])
        properties = (root := self._schemas.get(function, {})).get("properties") or {}
        is_line, comma = self._family.pair[1].endswith("\n"), "{"
        while True:
            yield from self._skip(_BLANKS)
            if (yield from self._starts(before, self._end)) != before:
                break
            key, mark = yield from self._until([between], limit=_LONGEST_HEAD)
            if not mark:
                break
            name = re.split('[<>"]', key)[0].strip()
            types = {"string"} if 'string="true"' in key else types_of(properties.get(name), root)
            is_text = types == {"string"}
            self._more(f"{comma}{json.dumps(name, ensure_ascii=False)}: " + '"' * is_text)
            comma = ", "
            yield from self._starts("\n" * is_line)
            text, mark = yield from self._until(
                ["\n" * is_line + after, after], self._escape if is_text else None)
            if mark:
                self._more('"' if is_text else _converted(text, types))
        if not self._is_cut:
            self._more("{}" if comma == "{" else "}")

    def _escape(self, text: str) -> None:
        self._more(json.dumps(text, ensure_ascii=False)[1:-1])

    # --- text -----------------------------------------------------------------------------------

    @property
    def _is_cut(self) -> bool:
        """Whether the answer has ended where it should go on."""
        return self._ended and not self._text

    def _cut(self, count: int) -> str:
        text, self._text = self._text[:count], self._text[count:]
        self._raw += text
        return text

    def _skip(self, chars: str) -> Steps:
        """Leave out these characters, however many come."""
        while True:
            self._cut(len(self._text) - len(self._text.lstrip(chars)))
            if self._text or self._ended:
                return
            yield

    def _starts(self, *marks: str) -> Steps:
        """Return the mark with which the text begins, and leave it out; "" for none of them."""
        while True:
            for mark in marks:
                if mark and self._text.startswith(mark):
                    return self._cut(len(mark))
            if not any(mark.startswith(self._text) for mark in marks) or self._is_cut:
                return ""
            if self._ended:
                return self._cut(len(self._text))[:0]
            yield

    def _begins(self, mark: str) -> Steps:
        """Return the mark if the text begins with it after blanks; if not, nothing is left out."""
        self._raw = ""
        yield from self._skip(_BLANKS)
        if not (found := (yield from self._starts(mark))):
            self._text = self._raw + self._text
        return found

    def _until(self, marks: Sequence[str], sink: Sink | None = None, limit: int = 0) -> Steps:
        """Return the text before the first of the marks, and that mark; "" at the end.

        sink: gets the text as it arrives. limit: of its characters; nothing is read beyond it.
        """
        marks = [mark for mark in marks if mark]
        while True:
            at, mark = min(((at, mark) for mark in marks if (at := self._text.find(mark)) >= 0),
                           default=(len(self._text), ""))
            if not mark and not (
                    self._ended and not self._forced and sink in (self._say, self._think)):
                at -= max((partial(self._text, one) for one in marks), default=0)
            if limit and at > limit:
                return "", ""
            if sink:
                sink(self._cut(at))
                self._raw = ""
            if mark or self._ended:
                out = "" if sink else self._cut(at)
                self._cut(len(mark or self._text))
                return out, mark
            yield


class _Nested:
    """Finds the end of a value in brackets that arrives in pieces. quotes: around its strings.

    JSON ends before what cannot be JSON, such as a closing mark, and its brackets are closed then.
    """

    def __init__(self, quotes: str) -> None:
        self.over = False
        self._quotes, self._quote, self._escaped, self._closing = quotes, "", False, ""

    def take(self, text: str, ended: bool) -> tuple[str, str]:
        """Return the next piece of the value, and as it was written before control characters in
        strings were escaped. ended: whether no more text comes."""
        out, at = "", 0
        while at < len(text) and not self.over:
            char = text[at]
            if self._quote:
                out += json.dumps(char)[1:-1] if char < " " else char
                if char == self._quote and not self._escaped:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif self._quotes == '"' and char not in _SIGNS:
                word = _WORD.match(text, at)[0]  # type: ignore[index]
                begun = at + len(word) == len(text) and any(
                    one.startswith(word) for one in _LITERALS)
                if begun and not ended:
                    break  # more of it may come
                self.over = not begun and word not in _LITERALS
                if self.over:
                    return out + self._closing, text[:at]
                out += word
                at += len(word) - 1
            else:
                out += char
                self._quote = char if char in self._quotes else ""
                if char in _BRACKETS:
                    self._closing = _BRACKETS[char] + self._closing
                elif char in ")]}":
                    self._closing = self._closing[1:]
                self.over = not (self._closing or self._quote)
            at += 1
        return out, text[:at]


class _Constants(ast.NodeTransformer):
    """Replaces JSON's constants, which models write among Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant with this name. Raises KeyError for another name."""
        return ast.Constant(_CONSTANTS[node.id])


def parse_call(text: str, known: Mapping[str, Any] = {}) -> Call | None:
    """Return the call in a JSON text, None if it is none.

    known: functions by name; a call without arguments, or cut off before, must be of one of them.
    """
    try:
        data = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        name = _OBJECT.match(text)
        return Call(found, "") if name and (found := json.loads(name[1])) in known else None
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return None
    given = data.keys() & {"arguments", "parameters"} or name in known
    arguments = object_of(data.get("arguments", data.get("parameters")))
    return None if arguments is None or not given else Call(
        name, json.dumps(arguments, ensure_ascii=False))


def object_of(arguments: Any) -> dict[str, Any] | None:
    """Return a call's arguments as an object, also from its JSON text; {} for null and blanks,
    None for anything else."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}", strict=False)
        except (ValueError, RecursionError):
            return None
    found = {} if arguments is None else arguments
    return found if isinstance(found, dict) else None


def _from_python(text: str) -> str:
    """Return keyword arguments in parentheses as JSON; the same text if they are none."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        values = {word.arg: ast.literal_eval(_Constants().visit(word.value))
                  for word in call.keywords}  # type: ignore[attr-defined]
        return json.dumps(values, ensure_ascii=False)
    except (AttributeError, KeyError, MemoryError, RecursionError, SyntaxError, TypeError,
            ValueError):
        return text


def _from_gemma(text: str) -> str:
    """Return an object in Gemma's notation, which may be cut off, as JSON."""
    text = re.sub(r"(?<=[{,])[\w.$-]+$", "", text[: len(text) - partial(text, QUOTE)])
    parts = text.split(QUOTE)
    return "".join(
        json.dumps(part, ensure_ascii=False)[: None if i < len(parts) - 1 else -1] if i % 2
        else re.sub(r'(?<![\w".$-])([\w.$-]+)\s*:', r'"\1":', part) for i, part in enumerate(parts))


def _converted(text: str, types: set[str]) -> str:
    """Return an argument that is written without quotes as JSON of one of these types."""
    try:
        value = json.loads({"True": "true", "False": "false", "None": "null"}.get(
            text.strip(), text), strict=False)
    except (ValueError, RecursionError):
        value = text
    if "string" in types and not TYPES[type(value)] & types - {"string"}:
        value = text
    return json.dumps(value, ensure_ascii=False)
