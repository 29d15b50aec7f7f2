"""A grammar that allows nothing but function calls, in the form of the model's family.

Uses the table of families, JSON schemas and text; no vocabulary and no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeinfer.models.text.grammar import closed
from pipeinfer.server.families import QUOTE, Family
from pipeinfer.server.tools import NONE, types_of

#: a pattern for the whole of a text; others are not enforced where texts have no quotes
_WHOLE = re.compile(r"\^(?:[^|]*|\([^()]*\))(?<!\\)\$")
#: any value in Gemma's notation; {q}: its quotes
_GEMMA_VALUE = """
any: quoted | %json {{"type": ["number", "boolean", "null"]}}
  | "[" (any ("," any)*)? "]" | "{{" (field ("," field)*)? "}}"
field: NAME ":" any
NAME: /[A-Za-z0-9_.$-]+/
{quoted}"""


class CallGrammar:
    """Writes grammars in the form of a family. marks: the tokens among its texts, by their text."""

    def __init__(self, family: Family, marks: Mapping[str, int]) -> None:
        self._family, self._marks = family, marks
        longest = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest or ["\0"])) + ")")

    def of(self, functions: Sequence[Mapping[str, Any]], most: int = 1, words: bool = False
           ) -> str:
        """Return a lark grammar of one to `most` calls of the functions.

        words: whether words may come before the calls, or instead of them; the form must be
            Hermes's.
        Raises RequestError for parameters that are nested too deeply.
        """
        family = self._family
        rules = ["call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            name, counter, then = family.then.partition(":0")
            if counter:  # of all calls of the conversation
                head = (self._written(f"{family.begin}{function['name']}{name}:") + " /[0-9]+/ "
                        + self._written(then))
            else:
                head = self._written(family.begin + function["name"] + name)
            rules.append(f"call{i}: {head} given{i} {self._written(family.end)}")
            schema = closed(function.get("parameters") or NONE)
            rules += self._given(i, schema) if family.pair[1] else [
                f"given{i}: %json {json.dumps(schema)}"]
        if family.form == "gemma":
            rules.append(_GEMMA_VALUE.format(quoted=self._text("quoted", QUOTE, QUOTE)))
        most = most if family.between is not None else 1
        rest = "" if most == 1 else f" ({self._written(family.between or '')} call){{0,{most - 1}}}"
        calls = f"call{rest} {self._written(family.close)}"
        first, _, after = family.open.partition("\n")
        opened = self._written(family.open)
        start = [f"start: {opened} {calls}"]
        if words and first in self._marks:
            start = [f"start: WORDS | WORDS? {opened} {calls}", "WORDS: /(.|\\n)+/"]
        elif words:
            start = [f'start: WORDS | opened "\\n{after}" {calls}',
                     f'opened[suffix="{first}"]: /(.|\\n)*/',
                     f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{first}(.|\\n)*/"]
        return "\n".join(start + rules)

    def _written(self, text: str) -> str:
        """Return a text in the grammar's notation, its marks as tokens."""
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks
            else json.dumps(part, ensure_ascii=False) for part in self._pattern.split(text) if part)

    def _text(self, rule: str, before: str, after: str) -> str:
        """Return the rules of any text between two marks."""
        first, *rest = [part for part in self._pattern.split(after) if part]
        if first in self._marks:
            return (f"{rule}: {self._written(before)} ANY_{rule.upper()}? {self._written(after)}\n"
                    f"ANY_{rule.upper()}: /(.|\\n)+/")
        return (f"{rule}: {self._written(before)} until_{rule} {self._written(''.join(rest))}\n"
                f"until_{rule}[suffix={json.dumps(first, ensure_ascii=False)}]: /(.|\\n)*/")

    def _given(self, function: int, schema: Mapping[str, Any]) -> list[str]:
        """Return the rules of arguments that are written one by one, those required first."""
        before, between, after = self._family.pair
        properties = schema.get("properties") or {}
        listed = [name for name in schema.get("required") or () if name in properties]
        needed = len(listed)
        listed += [name for name in properties if name not in listed]
        names = [f"given{function}_{number}" for number in range(len(listed))]
        rules = [f"{rule}: {self._written(before + name + between)} {rule}v\n"
                 + self._value(f"{rule}v", properties[name], schema, after)
                 for rule, name in zip(names, listed, strict=True)]
        comma = self._written(self._family.comma)

        def optional(start: int) -> str:
            return "".join(f" ({comma} {name})?" for name in names[start:])

        choices = [f" {comma} ".join(names[:needed]) + optional(needed)] if needed else [
            '""', *(name + optional(i + 1) for i, name in enumerate(names))]
        return [f"given{function}: {' | '.join(choices)}", *rules]

    def _value(self, rule: str, schema: Any, root: Mapping[str, Any], after: str) -> str:
        family, types = self._family, types_of(schema, root)
        shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
        schema = schema if isinstance(schema, dict) else {}
        value = f"%json {json.dumps({**schema, **shared})}"
        if family.form == "python" or "string" not in types:
            if family.form == "gemma" and types != {"number"} and types & {"object", "array"}:
                value = "any"
            return f"{rule}: {value} {self._written(after)}"
        quote = QUOTE if family.form == "gemma" else ""
        choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if choices:
            texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
            return f"{rule}: " + " | ".join(
                self._written(f"{quote}{text}{quote}{after}") for text in texts)
        pattern = schema.get("pattern", "")
        if _WHOLE.fullmatch(pattern) and types == {"string"}:
            regex = re.sub(r"(?<!\\)/", r"\/", pattern[1:-1])
            after = self._written(quote + after)
            return (f"{rule}: {self._written(quote)} {rule.upper()} {after}\n"
                    f"{rule.upper()}: /{regex}/")
        return self._text(rule, quote, f"{quote}{after}")
