"""Decomposed responses at both ends: their prompts, and the factory of their decomposers.

Uses tokenizers, chat templates and the texts for decomposition methods in a model's file
(`pipeinfer.decompose.*`); independent of cells, runs and ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import model_paths, open_model, open_tokenizer
from pipeinfer.models.text.marks import MarkGuard
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.base import Decomposer, Specification, TokenVocabulary
from pipeinfer.strategies.spec import DecomposerSetup, Writer


@functools.lru_cache(8)
def vocabulary_of(tokenizer: Tokenizer) -> TokenVocabulary:
    """Return the functions of a tokenizer that decomposers need."""
    @functools.lru_cache(256)
    def split(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.split(text, special=True))

    return TokenVocabulary(functools.lru_cache(1 << 16)(functools.partial(
        tokenizer.piece, special=True)), lambda text: list(split(text)))


def decomposer_factory(tokenizer: Tokenizer, config: SpeculationConfig, wanted: Specification,
                       n_prompt: int, *, n_ctx: int, overlap: bool = True
                       ) -> Callable[[], Decomposer]:
    """Return a function that makes the decomposer of a response.

    wanted: the specification of the response
    n_prompt: tokens of its prompt
    n_ctx: tokens of the context of one response
    overlap: whether every stage accepts positions in any order
    Raises UsageError for an unknown method, and ModelError for one whose tokens this vocabulary
    does not have.
    """
    spec = registry.decomposer(wanted.method)
    if spec.make is None:
        raise UsageError(f"--decomposer {spec.name} has no threads: it is a prompt")
    vocabulary = vocabulary_of(tokenizer)
    spec.check(vocabulary)

    def encode(text: str, seam: str, values: Mapping[str, str]) -> tuple[int, ...]:
        guard = MarkGuard(tokenizer.marks, seam)
        holes = re.compile("|".join(map(re.escape, values)))
        filled = holes.sub(lambda found: str(guard.value(values[found[0]])), text)
        return tuple(tokenizer.encode_guarded(filled, seam))

    return functools.partial(spec.make, DecomposerSetup(
        vocabulary, n_prompt, n_ctx, overlap, registry.values_of(spec, config), wanted, encode))



_PREFIX = "pipeinfer.decompose."

class Opening(Struct, frozen=True):
    """The beginning of a response.

    prompt: tokens of the main thread
    decompose: how the response is decomposed; None for an ordinary response
    """

    prompt: tuple[int, ...]
    decompose: Specification | None = None


def validate(config: SpeculationConfig) -> None:
    """Raise UsageError for values of the decomposer's own options that it cannot use."""
    if config.decomposer:
        spec = registry.decomposer(config.decomposer)
        spec.validate(registry.values_of(spec, config))


@functools.lru_cache(8)
def texts_of(path: Path) -> dict[str, str]:
    """Return the texts for decomposition methods in a model's file, by name; none for a folder."""
    model: Any = open_model(path)
    if path.is_dir():
        return {}
    return {key[len(_PREFIX):]: str(model.get(key)) for key in model.meta_keys()
            if key.startswith(_PREFIX)}


def opening(tokenizer: Tokenizer, texts: Mapping[str, str], method: str,
            messages: Sequence[Mapping[str, str]]) -> Opening:
    """Return the prompt and the decomposition for a conversation.

    tokenizer: of the model
    texts: as from `texts_of`
    method: name of the decomposer; "" for an ordinary response
    messages: of the conversation
    Raises UsageError for an unknown method, and RequestError when the template refuses the
    messages.
    """
    writer = Writer(tokenizer, texts)
    if not method:
        return Opening(writer.encode(messages, "plain"))
    spec = registry.decomposer(method)
    if spec.open is not None:
        return Opening(*spec.open(writer, messages))
    prompt = writer.encode(messages, method, spec.text)
    return Opening(prompt, Specification(method) if spec.make is not None else None)


def methods_for(config: JobConfig) -> list[str]:
    """Return the decomposition methods that clients may request of a pipeline loaded for `config`.

    Raises UsageError for wrong options, and ModelError if the configured method's tokens are
    missing.
    """
    if not config.speculation.decomposer:
        return []
    vocabulary = vocabulary_of(open_tokenizer(model_paths(config)[0]))
    found = []
    for spec in registry.decomposers().values():
        chosen = spec.name == config.speculation.decomposer
        if spec.gaps and not chosen:
            continue  # stages of llama.cpp are loaded for it or not
        try:
            spec.validate(registry.values_of(spec, config.speculation))
            spec.check(vocabulary)
        except ModelError:
            if chosen:
                raise
            continue
        found.append(spec.name)
    return found
