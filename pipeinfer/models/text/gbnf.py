"""Conversion of llama.cpp's grammar language (GBNF) to the dialect that llguidance reads.

llguidance contains a converter. This module first rewrites a grammar to the part of the language
that the converter handles correctly: characters instead of escapes, and rule names that stay
different in lower case. Independent of parsers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pipeinfer.errors import RequestError

_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]",
                  "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PARTS = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<string>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<klass>\[(?:[^\]\\]|\\.)*\])|(?P<name>[\w-]+)"""
    r"""|(?P<token>!?<[^>]*>)|(?P<other>.)""", re.DOTALL)
_COUNT = re.compile(r"\{\s*\d+\s*(,\s*\d*\s*)?\}")


def to_lark(text: str, token_id: Callable[[str], int | None], end_ids: Sequence[int]) -> str:
    """Return the grammar in llguidance's dialect, from rule `root`.

    token_id: returns the token with exactly this text, None if there is none
    end_ids: tokens that end a generation
    Raises RequestError with the place of a mistake.
    """
    normal, references = _normalise(text)
    tokens = {name: _token(written, token_id, end_ids) for written, name in references.items()}
    try:
        return _convert(normal, tokens)
    except RecursionError as error:
        raise RequestError("it is nested too deeply") from error
    except Exception as error:  # the converter raises plain exceptions for what users get wrong
        raise RequestError(" ".join(str(error).split()) or "it is not a grammar") from error


def _convert(text: str, tokens: dict[str, str]) -> str:
    from llguidance import gbnf_to_lark as library

    class TokenReference(library.LiteralNode):
        """A reference to tokens, as the dialect writes it."""

        def is_terminal(self) -> bool:
            return False

        def __str__(self) -> str:
            return self.value

    class Repeated(library.RepetitionNode):
        """A repetition that is put in parentheses before it is repeated itself."""

        def is_atomic(self) -> bool:
            return False

    class Parser(library.GrammarParser):
        def _parse_repetition(self, pos: library.Position, nodes: list[library.ASTNode]
                              ) -> library.Position:
            pos = super()._parse_repetition(pos, nodes)
            if nodes and isinstance(last := nodes[-1], library.RepetitionNode):
                nodes[-1] = (library.LiteralNode("") if last.max_times == 0
                             else Repeated(last.node, last.min_times, last.max_times))
            return pos

    rules = Parser().parse(text)
    for name, token in tokens.items():
        rules[name] = library.RuleNode(name, TokenReference(token), "")
    library.resolve(rules)
    return "\n".join(map(str, sorted(rules.values(), key=lambda rule: rule.order)))


def _token(written: str, token_id: Callable[[str], int | None], end_ids: Sequence[int]) -> str:
    """A reference like `<think>` or `!<[2]>` in the dialect of llguidance."""
    inner = written.removeprefix("!")
    given = re.fullmatch(r"<\[(\d{1,9})\]>", inner)
    number = int(given[1]) if given else token_id(inner)
    if number is None:
        raise RequestError(f"{inner[:40]} is not one token of this model's vocabulary")
    if inner == written:
        return f"<[{number}]>"
    return f"<[^{','.join(map(str, sorted({number, *end_ids})))}]>"


def _normalise(text: str) -> tuple[str, dict[str, str]]:
    """The same grammar without comments, with literal characters and unambiguous names, and the
    names of the rules that stand for its references to tokens.
    """
    out: list[str] = []
    names, taken = {"root": "root"}, {"root", "start"}
    tokens: dict[str, str] = {}
    at = 0
    while at < len(text):
        if text[at] == "{" and (count := _COUNT.match(text, at)):
            out.append(count.group())
            at = count.end()
            continue
        found = _PARTS.match(text, at)
        assert found is not None
        part, at = found.group(), found.end()
        match found.lastgroup:
            case "comment":
                pass
            case "string":
                chars = (char for char, _ in _characters(part[1:-1]))
                out.append('"' + "".join(map(_in_string, chars)) + '"')
            case "token":
                if part not in tokens:
                    tokens[part] = _fresh("token", taken)
                out.append(f" {tokens[part]} ")
            case "klass":
                out.append(_class(part[1:-1]))
            case "name":
                if part not in names:
                    names[part] = _fresh(part, taken)
                out.append(names[part])
            case _:
                out.append(part)
    return "".join(out), tokens


def _fresh(name: str, taken: set[str]) -> str:
    """A new lower-case name that no other rule has, nor the converter's own `start`."""
    plain = re.sub("[^a-z0-9_]", "_", name.lower())
    if not plain[0].isalpha():
        plain = "r" + plain
    number, candidate = 1, plain
    while candidate in taken:
        number += 1
        candidate = f"{plain}_{number}"
    taken.add(candidate)
    return candidate


def _characters(text: str) -> list[tuple[str, bool]]:
    """The characters that a literal denotes, and whether each is escaped.

    Raises RequestError for an unknown escape.
    """
    out, at = [], 0
    while at < len(text):
        char, at = text[at], at + 1
        escaped = char == "\\" and at < len(text)
        if escaped:
            kind, at = text[at], at + 1
            if kind in _HEX_DIGITS:
                digits = text[at : at + _HEX_DIGITS[kind]]
                at += len(digits)
                char = _by_code(kind, digits)
            elif kind in _PLAIN_ESCAPES:
                char = _PLAIN_ESCAPES[kind]
            else:
                raise RequestError(f"unknown escape \\{ascii(kind)[1:-1]}")
        out.append((char, escaped))
    return out


def _by_code(kind: str, digits: str) -> str:
    whole = len(digits) == _HEX_DIGITS[kind] and re.fullmatch("[0-9a-fA-F]+", digits)
    code = int(digits, 16) if whole else -1
    if not 0 <= code < 0x110000 or 0xD800 <= code < 0xE000:
        raise RequestError(f"\\{kind}{digits} is not a character")
    return chr(code)


def _in_string(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}.get(char) or (
        char if char.isprintable() or ord(char) > 0xFF else f"\\x{ord(char):02x}")


def _in_class(char: str) -> str:
    """A character in a form that a regular expression's class reads literally."""
    if (char.isalnum() and char.isascii()) or ord(char) > 0xFF:
        return char
    return f"\\x{ord(char):02x}"


def _class(inside: str) -> str:
    """`[...]` with every character escaped so that only ranges and a leading ^ have a meaning."""
    negated = inside.startswith("^")
    raw = inside[negated:]
    marks = _characters(raw)
    out, at = [], 0
    while at < len(marks):
        if at + 2 < len(marks) and marks[at + 1] == ("-", False):
            low, high = marks[at][0], marks[at + 2][0]
            if low > high:
                raise RequestError(f"[{low}-{high}] is an empty range")
            out.append(f"{_in_class(low)}-{_in_class(high)}")
            at += 3
        else:
            out.append(_in_class(marks[at][0]))
            at += 1
    return "[" + "^" * negated + "".join(out) + "]"
