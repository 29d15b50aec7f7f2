"""Grammars: which tokens may follow a path of output tokens.

A grammar is compiled once, where a request arrives, to a text that is sent with the lane's sampling
parameters. The code that chooses or drafts tokens makes a `Constraint` of it. The mask after a path
is a function of (vocabulary, grammar, path) and of nothing else, so speculation, branches and
cancellations cannot change what a grammar allows. Independent of models, ranks, policies and
sampling. The parser is llguidance, loaded with the first grammar.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeinfer.errors import ProtocolError, RequestError, UsageError
from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.gbnf import to_lark
from pipeinfer.models.text.json_schema import closed
from pipeinfer.models.text.sandbox import Helper, serve

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer

MAX_BYTES = 256 * 1024  #: longest accepted grammar or schema, as UTF-8
KINDS = ("json_object", "json_schema", "gbnf", "regex", "lark")
_SPECIAL = b"\xff"  #: llguidance's mark of a token that is no text
_HEADER = '%llguidance {"no_forcing": true}\n'
#: white space between the parts of a JSON text, as in llama.cpp: without a bound, weak models may
#: generate nothing else
_JSON_SPACE = r"( |\n{1,2}[ \t]{0,20})?"


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("grammars and JSON schemas need llguidance: pip install llguidance"
                         ) from error
    return llguidance


def _limits() -> Any:
    """Limits on the work for one grammar and one mask; see LLParserLimits for their units."""
    return _llguidance().LLParserLimits(
        initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
        max_lexer_states=20_000, max_grammar_size=250_000, verbose_errors=False,
    )


class Vocabulary:
    """The data of a tokenizer that grammars need: the bytes of every token, and the end tokens.

    tokens: bytes by id; tokens that are no text begin with 0xff
    end_ids: tokens that end a generation
    Immutable after construction: threads may share one. Raises UsageError without a valid end
    token.
    """

    def __init__(self, tokens: Sequence[bytes], end_ids: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.end_ids = tuple(sorted(end_ids))
        if not self.end_ids or not all(0 <= i < len(self.tokens) for i in self.end_ids):
            raise UsageError("grammars need a model with an end-of-text token in its vocabulary")
        self._lock = threading.Lock()
        self.compiler = Helper("pipeinfer.models.text.grammar", self.to_json)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Return the vocabulary of a tokenizer."""
        tokens = [
            (_SPECIAL if tokenizer.is_markup(i) else b"") + tokenizer.piece(i, special=True)
            for i in range(tokenizer.n_vocab)
        ]
        return cls(tokens, sorted(tokenizer.eog_ids))

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.tokens == other.tokens and self.end_ids == other.end_ids

    def __hash__(self) -> int:
        return hash((len(self.tokens), self.end_ids))

    def to_json(self) -> dict[str, Any]:
        """Return a form that JSON can represent, about 5 bytes per token."""
        sizes = np.array([len(t) for t in self.tokens], "<u4").tobytes()
        packed = zlib.compress(sizes + b"".join(self.tokens), 6)
        return {"count": len(self.tokens), "end_ids": list(self.end_ids),
                "packed": base64.b64encode(packed).decode("ascii")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Vocabulary:
        """Return the vocabulary that `to_json` encoded. Raises ProtocolError for damaged data."""
        try:
            count = int(data["count"])
            raw = zlib.decompress(base64.b64decode(data["packed"], validate=True))
            sizes = np.frombuffer(raw, "<u4", count)
            ends = 4 * count + np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            if ends[-1] != len(raw):
                raise ValueError("its lengths do not add up")
            tokens = [raw[a:b] for a, b in zip(ends.tolist(), ends[1:].tolist(), strict=False)]
            return cls(tokens, [int(i) for i in data["end_ids"]])
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ProtocolError(f"the vocabulary cannot be read: {error}") from error

    def matcher(self, compiled: str) -> Any:
        """Return a new llguidance matcher; it may be in its error state."""
        return _llguidance().LLMatcher(self._tokenizer, compiled, log_level=0, limits=_limits())

    def complaint(self, compiled: str) -> str:
        """Return llguidance's error message for a grammar; empty for a valid one."""
        found: str = _llguidance().LLMatcher.validate_grammar(
            compiled, self._tokenizer, limits=_limits())
        return "" if found.startswith("WARNING") else found

    def prepare(self) -> None:
        """Build llguidance's tokenizer in a thread, so that the first grammar need not wait up to a
        second.
        """
        def run() -> None:
            with contextlib.suppress(UsageError):  # the first use raises it again
                _ = self._tokenizer

        threading.Thread(target=run, name="vocabulary").start()

    @property
    def _tokenizer(self) -> Any:
        with self._lock:  # two threads must not build it twice: a large one takes a second
            return self._made

    @cached_property
    def _made(self) -> Any:
        lib = _llguidance()
        return lib.LLTokenizer(lib.TokenizerWrapper(_Plain(self)), n_vocab=len(self.tokens),
                               eos_token=list(self.end_ids))


class _Plain:
    """The vocabulary in the form that llguidance expects.

    llguidance never requests a tokenisation: grammars are compiled without forced tokens, which
    would leave out other spellings of the same text.
    """

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.end_ids[0]

    def __call__(self, _: bytes) -> list[int]:
        return []


# --- compiling --------------------------------------------------------------------------------


def compile_grammar(kind: str, text: str | Mapping[str, Any] | bool, vocabulary: Vocabulary) -> str:
    """Compile a grammar to a text for `Constraint`.

    kind: json_object (any JSON object), json_schema, gbnf (llama.cpp's, from rule `root`), regex
        (the whole output matches) or lark (llguidance's dialect)
    text: the grammar; for json_schema the schema, as text or as an object; unused for json_object
    vocabulary: of the model
    Terminals take the longest match. Thread-safe; takes `sandbox.SECONDS` at most, and longer in
    the first call. Raises RequestError when the grammar cannot be used.
    """
    match kind:
        case "json_object":
            written = json.dumps({"type": "object"})
        case "json_schema":
            written = _written(text)
        case "gbnf" | "regex" | "lark" if isinstance(text, str):
            written = text
        case _:
            raise RequestError(f"a grammar must be a text of kind {', '.join(KINDS)}")
    _check_size(written)
    return _compile_once(kind, written, vocabulary)


@functools.lru_cache(maxsize=64)
def _compile_once(kind: str, text: str, vocabulary: Vocabulary) -> str:
    _llguidance()
    try:
        compiled: str = vocabulary.compiler.ask({"kind": kind, "text": text})["compiled"]
    except RequestError as error:
        raise RequestError(f"the {_name(kind)} cannot be used: {error}") from error
    return compiled


def compile_here(kind: str, text: str, vocabulary: Vocabulary) -> str:
    """Compile as `compile_grammar` does, but in this process, which a hostile grammar can end."""
    body = _schema(text) if kind.startswith("json") else from_text(kind, text)
    compiled = _HEADER + body
    if complaint := vocabulary.complaint(compiled):
        raise RequestError(_short(complaint))
    first = Constraint(vocabulary, compiled)
    allowed = first.allowed(())
    if first.failure or allowed is None or not allowed.any():
        raise RequestError(_short(first.failure) or "no text satisfies it")
    return compiled


def from_text(kind: str, text: str) -> str:
    if kind == "gbnf":
        return to_lark(text)
    if kind == "regex":
        return f"start: /{_llguidance().regex_to_lark(text, 'd')}/"
    if "%llguidance" in text:
        raise RequestError("%llguidance is not allowed: its options are fixed")
    return text


def _written(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema cannot be written as JSON: {error}") from error


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not valid JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError("it is not an object like {\"type\": \"object\", ...}")
    schema = closed(schema)
    schema.setdefault("x-guidance", {"whitespace_pattern": _JSON_SPACE})
    return f"start: %json {json.dumps(schema)}"


def _check_size(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"a grammar must be valid Unicode text: {error}") from error
    if size > MAX_BYTES:
        raise RequestError(f"a grammar of {size} bytes is too big: at most {MAX_BYTES} bytes are "
                           "allowed")


def _name(kind: str) -> str:
    return "JSON schema" if kind.startswith("json") else "regular expression" \
        if kind == "regex" else "grammar"


def _short(complaint: str) -> str:
    """llguidance's message on one line, without its position in the wrapped text."""
    text = re.sub(r"^(at )?\d+\(\d+\): ", "", complaint)
    text = re.split(r"\n\s+\d+ \| |<state>|<non-verbose/>", text)[0]
    text = " ".join(text.removeprefix("failed to compile JSON schema: ").split())
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    return text if len(text) < 400 else text[:400] + " ..."


# --- masks ------------------------------------------------------------------------------------


def _serve(hello: dict[str, Any]) -> Any:
    vocabulary = Vocabulary.from_json(hello)
    return lambda question: {
        "compiled": compile_here(question["kind"], question["text"], vocabulary)}


if __name__ == "__main__":
    serve(_serve)
