"""The prompts of decomposed responses.

Uses tokenizers, chat templates and the texts for decomposition methods in a model's file
(`pipeinfer.decompose.*`); independent of decomposers, cells, runs and ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pipeinfer.config import JobConfig, SpeculationConfig
from pipeinfer.errors import ModelError
from pipeinfer.models.locate import model_paths, open_model, open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies import registry
from pipeinfer.strategies.decomposers.base import Specification
from pipeinfer.strategies.decomposers.factory import vocabulary_of

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
    writer = PromptWriter(tokenizer, texts)
    if not method:
        return Opening(writer.encode(messages, "plain"))
    spec = registry.decomposer(method)
    if spec.open is not None:
        return Opening(*spec.open(writer, messages))
    prompt = writer.encode(messages, method, spec.text)
    return Opening(prompt, Specification(method) if spec.make is not None else None)


class PromptWriter:
    """A `spec.Writer` on a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, str]) -> None:
        self._tokenizer, self.texts = tokenizer, texts

    def encode(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[int, ...]:
        """Return the token ids of the text that `render` returns; arguments as there."""
        text, seam = self.render(messages, name, otherwise, begun=begun)
        return tuple(self._tokenizer.encode_guarded(text, seam))

    def render(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[str, str]:
        """Return the prompt of a conversation and its seam, which marks contents that are plain
        text."""
        asked = list(messages)
        if name in self.texts:
            asked = [m for m in asked if m["role"] != "system"]
            asked.insert(0, {"role": "system", "content": self.texts[name]})
        elif otherwise:
            asked[-1] = {**asked[-1], "content": asked[-1]["content"] + otherwise}
        text, seam = self._tokenizer.guarded_chat(asked)
        return text + begun, seam


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
