"""The factory of decomposers: from a specification to the decomposer of one response.

Used where tokens are decoded. It needs the vocabulary, but no chat template, cells, runs or ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

from pipeinfer.config import SpeculationConfig
from pipeinfer.errors import UsageError
from pipeinfer.models.text.marks import MarkGuard
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.base import Decomposer, Specification, TokenVocabulary
from pipeinfer.strategies.spec import DecomposerSetup


@functools.lru_cache(8)
def vocabulary_of(tokenizer: Tokenizer) -> TokenVocabulary:
    """Return the functions of a tokenizer that decomposers need."""
    @functools.lru_cache(256)
    def split(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.split(text, special=True))

    return TokenVocabulary(functools.lru_cache(1 << 16)(functools.partial(
        tokenizer.piece, special=True)), lambda text: list(split(text)))


class Decomposition:
    """The decomposition methods for one model.

    n_ctx: tokens of the context of one response
    overlap: whether every stage accepts positions in any order
    """

    def __init__(self, tokenizer: Tokenizer, config: SpeculationConfig, *, n_ctx: int,
                 overlap: bool = True) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._n_ctx, self._overlap = n_ctx, overlap
        self._vocabulary = vocabulary_of(tokenizer)

    def factory(self, wanted: Specification, n_prompt: int) -> Callable[[], Decomposer]:
        """Return a function that makes the decomposer of a response.

        wanted: the specification of the response
        n_prompt: tokens of its prompt
        Raises UsageError for an unknown method, and ModelError for one whose tokens this vocabulary
        does not have.
        """
        spec = registry.decomposer(wanted.method)
        if spec.make is None:
            raise UsageError(f"--decomposer {spec.name} has no threads: it is a prompt")
        spec.check(self._vocabulary)
        setup = DecomposerSetup(
            self._vocabulary, n_prompt, self._n_ctx, self._overlap,
            registry.values_of(spec, self._config), wanted, self._encode)
        return functools.partial(spec.make, setup)

    def _encode(self, text: str, seam: str, values: Mapping[str, str]) -> tuple[int, ...]:
        guard = MarkGuard(self._tokenizer.marks, seam)
        holes = re.compile("|".join(map(re.escape, values)))
        filled = holes.sub(lambda found: str(guard.value(values[found[0]])), text)
        return tuple(self._tokenizer.encode_guarded(filled, seam))
