"""Chat templates: Jinja in a sandbox, in a process of its own with limits on time and memory.

A template comes with a model file, so it is not trusted. It cannot access Python's objects, and it
is refused if it takes longer than SECONDS or more memory than the process may use. Run as a module,
this is that process. Independent of models and tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from pipeinfer.errors import RequestError
from pipeinfer.models.text.helper import Helper, HelperDied, HelperLate, serve

SECONDS = 3.0  #: longest that one conversation may take; templates of models take milliseconds
MAX_TEXT = 64 << 20  #: characters of a prompt
_MAX_SOURCE = 4 << 20
_MEMORY_BYTES = 1 << 30
_helper = Helper("pipeinfer.models.text.chat_template", dict)


def prepare() -> None:
    """Start the rendering process without waiting for it.

    It is started early because a process that uses MPI must not fork, and because the first
    conversation would have to wait for it.
    """
    _helper.start()


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that `template` renders from `variables`, which JSON must be able to
    represent.

    Raises RequestError when the template refuses them, is invalid or exceeds a limit. Thread-safe.
    """
    if len(template) > _MAX_SOURCE:
        raise RequestError(f"the model's chat template is too long: it has {len(template)} "
                           "characters")
    try:
        answer = _helper.ask({"template": template, "variables": dict(variables)}, SECONDS)
        return str(answer["text"])
    except HelperLate:
        reason = f"it takes longer than {SECONDS:g} s"
    except HelperDied:
        reason = "it needs more memory than it is allowed, or is nested too deeply"
    except RequestError as error:
        reason = str(error)
    raise RequestError(f"the model's chat template refuses these messages: {reason}")


# --- in the process that renders --------------------------------------------------------------


@functools.lru_cache(4)
def _compiled(source: str) -> Any:
    from jinja2.sandbox import SandboxedEnvironment

    # Not the immutable one: templates append to lists, which are a copy for one conversation.
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _generation()])
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = environment.filters["fromjson"] = json.loads
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _generation() -> Any:
    """Return Jinja's extension for `{% generation %}`, which marks what a model was trained on."""
    from jinja2.ext import Extension

    class TrainedMark(Extension):
        tags = {"generation"}  # noqa: RUF012 (an instance's, to the library)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return TrainedMark


def _render_here(question: dict[str, Any]) -> dict[str, Any]:
    from jinja2 import TemplateError

    try:
        text = _compiled(question["template"]).render(question["variables"])
    except (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError,
            RecursionError, SyntaxError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise RequestError(reason) from None
    if len(text) > MAX_TEXT:
        raise RequestError(f"its text exceeds {MAX_TEXT} characters")
    return {"text": text}


def _raise(message: str) -> str:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: Any = None, sort_keys: bool = False) -> str:
    """The filter tojson as transformers has it: keys in their order, nothing escaped for HTML."""
    if isinstance(value, Iterator):  # what `map` and `selectattr` give
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                      separators=separators and tuple(separators), sort_keys=sort_keys)


def _begin(_: dict[str, Any]) -> Any:
    _compiled("")  # imports Jinja now, so that the first conversation need not wait
    return _render_here


if __name__ == "__main__":
    serve(_begin, _MEMORY_BYTES)
