"""The grammar of a request's answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pipeinfer.errors import RequestError
from pipeinfer.models.text.grammar import compile_grammar, loosely
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad


class Grammars:
    """Compiles grammars for one vocabulary; threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # the vocabulary takes seconds to build: one thread does it, the others wait
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def compile(self, kind: str, text: Any, param: str) -> str:
        """Return the compiled grammar. Raises ApiError with `param` when it cannot be used."""
        try:
            return compile_grammar(kind, text, self._known())
        except RequestError as error:
            raise bad(str(error), param, "invalid_grammar") from error

    def enforceable(self, schema: dict[str, Any], owner: str, param: str, strict: bool | None
             ) -> tuple[dict[str, Any], list[str]]:
        """Return the part of a JSON schema that a grammar can hold, and notes on the rest.

        owner: in these notes, whose schema it is.
        Raises ApiError with `param` if all of it is wanted (strict) and something is left out.
        """
        try:
            found, left_out = loosely(schema, self._known())
        except RequestError as error:
            raise bad(f"{owner}: {error}", param, "invalid_grammar") from error
        if strict and left_out:
            raise bad(f"{owner}: {', '.join(left_out)} cannot be enforced here: leave it out, or "
                      "leave out strict: true, and the rest is enforced", param, "invalid_grammar")
        return found, [f"{owner}: {one} is not enforced" for one in left_out]

    def _known(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary.of(self._tokenizer)
            return self._vocabulary


def constrain(request: schema.Sampling, grammars: Grammars, forced: str = ""
              ) -> tuple[str, Sequence[str]]:
    """Return the compiled grammar that a request needs, "" for none, and notes on parts of it that
    are not held. Raises ApiError.

    forced: a lark grammar that a tool choice needs.
    """
    notes: Sequence[str] = ()
    wanted = request.response_format
    kind, param = "", ""
    text: Any = None
    if wanted is not None and wanted.type != "text":
        kind, param, given = wanted.type, "response_format", wanted.json_schema
        if wanted.bare_schema is not None and given is None:
            kind, given = "json_schema", schema.JsonSchema(name=None, schema=wanted.bare_schema)
        if kind == "json_schema":
            if given is None:
                raise bad("response_format of type json_schema needs the "
                          "field json_schema", "response_format")
            text, notes = grammars.enforceable(given.json_schema, param, param, given.strict)
    if request.grammar:
        if kind:
            raise bad("give either grammar or response_format", "grammar")
        kind, text, param = "gbnf", request.grammar, "grammar"
    if forced:
        if kind:
            raise bad(f"tool_choice asks for a tool call and {param} for another format: leave one "
                      "out", "tool_choice")
        kind, text, param = "lark", forced, "tools"
    if not kind:
        return "", ()
    if request.ignore_eos:
        raise bad(f"ignore_eos cannot be combined with {param}: a grammar decides where the text "
                  "ends", "ignore_eos")
    return grammars.compile(kind, text, param), notes
