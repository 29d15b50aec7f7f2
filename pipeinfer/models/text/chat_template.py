"""Chat templates: Jinja in a sandbox, with bounds on time and on what it makes.

A template comes with a model file, so it is not trusted: it can not reach Python's objects, numbers
and repeated texts have a largest size, and what takes longer than SECONDS or writes more than
MAX_TEXT characters is refused. Knows no model and no tokens.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeinfer.errors import RequestError

SECONDS = 3.0  #: longest that one conversation may take; templates of models take milliseconds
MAX_TEXT = 64 << 20  #: characters of a prompt, or of a text inside a template
_MAX_SOURCE = 4 << 20
_MAX_POWER = 64
_WIDEST = 4096
_WIDE = re.compile(r"[%:{,.*]\s*[^a-zA-Z%}]*\d{5}|%[^a-zA-Z%]*\*")


class _TooMuch(Exception):
    """The template is over a bound."""


def _text_of(size: int) -> None:
    """Refuse to make a text of so many characters."""
    if size > MAX_TEXT:
        raise _TooMuch(f"it makes a text of more than {MAX_TEXT} characters")


def _join(parts: Iterable[str]) -> str:
    """The parts as one text of bounded length."""
    held, total = [], 0
    for part in parts:
        total += len(part)
        _text_of(total)
        held.append(part)
    return "".join(held)


def _str_join(parts: Iterable[Any]) -> str:
    """What stands for Jinja's own, which `~` becomes."""
    return _join(map(str, parts))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounded numbers and texts."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])
    concat = staticmethod(_join)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic whose result can not be huge."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and not (abs(left) <= 2**32 and abs(right) <= _MAX_POWER):
            raise _TooMuch("a power that is too large")
        if operator == "*" and not numbers:
            _text_of(_size(left) * _size(right))
        if operator == "*" and numbers and left.bit_length() + right.bit_length() > 4096:
            raise _TooMuch("a number that is too large")
        if operator == "+" and not numbers:
            _text_of(_size(left) + _size(right))
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """A text's `format`, when its widths are bounded."""
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and getattr(value, "__name__", "") in ("format", "format_map"):
            _check_widths(owner)
        return super().wrap_str_format(value)

    def call(self, context: Any, what: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call; a text's own methods make bounded texts."""
        owner, name = getattr(what, "__self__", None), getattr(what, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(args) > 1:
                _check_replace(owner, args[0], args[1])
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])
                _text_of(sum(len(owner) + _size(part) for part in args[0]))
            elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _check_numbers(args, kwargs)
                _text_of(len(owner) * (_WIDEST if name == "expandtabs" else 1))
        return super().call(context, what, *args, **kwargs)


def _size(value: Any) -> int:
    """Elements of a text or list; the number itself, as a factor; 1 for the rest."""
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    return max(0, value) if isinstance(value, int) else 1


def _check_widths(text: str) -> None:
    if _WIDE.search(text):
        raise _TooMuch("a width that is too large")


def _check_numbers(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(a, int) and abs(a) > _WIDEST for a in (*args, *kwargs.values())):
        raise _TooMuch("a width that is too large")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _text_of(len(text) + text.count(old) * len(new))


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` makes of `variables`. Raises RequestError when it refuses them, is
    no template or goes over a bound."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = time.strftime
    _bounded(environment.filters)
    if len(template) > _MAX_SOURCE:
        raise RequestError(f"the model's chat template has {len(template)} characters")
    before = sys.gettrace()
    try:
        compiled = environment.from_string(template)
        compiled.root_render_func.__globals__["str_join"] = _str_join
        sys.settrace(_deadline(time.monotonic() + SECONDS))
        return _join(compiled.generate(dict(variables)))
    except (TemplateError, _TooMuch, ArithmeticError, AttributeError, LookupError, MemoryError,
            RecursionError, SyntaxError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise RequestError(
            f"the model's chat template refuses these messages: {reason}") from None
    finally:
        sys.settrace(before)


def _deadline(end: float) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that stops Python code, line by line, when its time is over."""
    def trace(_: FrameType, __: str, ___: Any) -> Any:
        if time.monotonic() > end:
            raise _TooMuch(f"it takes longer than {SECONDS:.0f} s")
        return trace

    return trace


def _bounded(filters: dict[str, Callable[..., Any]]) -> None:
    """Put checks before those of Jinja's filters that make text of any width."""
    def width(name: str) -> Callable[..., Any]:
        plain = filters[name]

        @functools.wraps(plain)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _check_numbers(args, kwargs)
            for arg in args:
                if name == "format" and isinstance(arg, str):
                    _check_widths(arg)
            if name == "indent":
                _text_of(sum(map(_size, args)) * 2)
            return plain(*args, **kwargs)

        return checked

    for name in ("center", "format", "indent", "tojson", "wordwrap"):
        filters[name] = width(name)
    plain_replace, plain_join = filters["replace"], filters["join"]

    @functools.wraps(plain_replace)
    def replace(context: Any, text: Any, old: Any, new: Any, *args: Any) -> Any:
        _check_replace(str(text), str(old), str(new))
        return plain_replace(context, text, old, new, *args)

    @functools.wraps(plain_join)
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        parts = list(value)
        _text_of(sum(len(d) + _size(part) for part in parts))
        return plain_join(context, parts, d, attribute)

    filters["replace"], filters["join"] = replace, join


def _raise(message: str) -> str:
    raise TemplateError(message)


def _to_json(value: Any, **how: Any) -> str:
    """What templates mean by tojson: in the order given, with nothing escaped for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **how})
