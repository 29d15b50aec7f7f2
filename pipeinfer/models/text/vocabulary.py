"""The vocabulary as grammars need it: the bytes of every token, and the tokens that end a text."""

from __future__ import annotations

import base64
import contextlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeinfer.errors import ProtocolError, UsageError
from pipeinfer.models.text.helper import Helper

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer

_SPECIAL = b"\xff"  #: llguidance's mark of a token that is no text


def llguidance() -> Any:
    """Return the module. Raises UsageError where it is not installed."""
    try:
        import llguidance as found
    except ImportError as error:
        raise UsageError("grammars and JSON schemas need llguidance: pip install llguidance"
                         ) from error
    return found


def _limits() -> Any:
    """Limits on the work for one grammar and one mask; see LLParserLimits for their units."""
    return llguidance().LLParserLimits(
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

    def token_id(self, text: str) -> int | None:
        """Return the token that is written exactly so, of several one that is no text."""
        raw = text.encode()
        return next((self.tokens.index(token) for token in (_SPECIAL + raw, raw)
                     if token in self.tokens), None)

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
        return llguidance().LLMatcher(self._tokenizer, compiled, log_level=0, limits=_limits())

    def complaint(self, compiled: str) -> str:
        """Return llguidance's error message for a grammar; empty for a valid one."""
        found: str = llguidance().LLMatcher.validate_grammar(
            compiled, self._tokenizer, limits=_limits())
        return "" if found.startswith("WARNING") else found

    def warnings(self, compiled: str) -> list[str]:
        """Return what llguidance ignores of a valid grammar, each once."""
        _, found = llguidance().LLMatcher.validate_grammar_with_warnings(
            compiled, self._tokenizer, limits=_limits())
        return list(dict.fromkeys(found))

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
        lib = llguidance()
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
