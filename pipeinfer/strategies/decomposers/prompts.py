"""From a question to a response in threads: the prompts of each method.

Knows tokenizers, chat templates and what a model file says of the methods that it was trained for
(`pipeinfer.decompose.*`); no decomposers, cells, runs or ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeinfer.config import Config
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import model_paths, open_model, open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies.decomposers import factory
from pipeinfer.strategies.decomposers.base import Specification
from pipeinfer.strategies.decomposers.factory import METHODS, hole, spacing_of, vocabulary_of

_PREFIX = "pipeinfer.decompose."

#: for models that were not trained for the method (PDOS, appendix A, in our words)
PDOS_TEXT = """

When parts of your answer do not depend on each other, write them as parallel steps: begin each with
"####", then its title and a colon, and write only "......" instead of its content. After the last
step write "####%%%%". Examples:

####Check the first item:......

####Check the second item:......

####%%%%

####Cost:......

####Quality:......

####%%%%

####Alice:......

####Bob:......

####Carol:......

####%%%%

Everything else is written as usual, without "####"."""
OUTLINE_TEXT = """You only write the skeleton of an answer, not the answer. Give it as a numbered
list of 3 to 10 points of 3 to 5 words each, and nothing else.

Question: {question}"""
POINT_TEXT = """You continue one point of the answer to a question, and nothing else.

Question: {question}

Skeleton of the answer:
{outline}

Write point {index} ("{point}") in one or two short sentences. Do not write the other points."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a response begins. prompt: tokens of the main thread; decompose: how it goes on, None
    for an ordinary response."""

    prompt: tuple[int, ...]
    decompose: Specification | None = None


def check(config: Config) -> None:
    """Raise UsageError for options that a decomposed response can not honour."""
    if not config.decomposer:
        return
    if config.grammar or config.grammar_file or config.json_schema:
        raise UsageError("--decomposer and a grammar exclude each other: the grammar would have to "
                         "describe the threads")
    if config.decomposer == "pasta":
        spacing_of(config.pasta_positions)
        if SamplingParams(
            repeat_penalty=config.repeat_penalty, presence_penalty=config.presence_penalty,
            frequency_penalty=config.frequency_penalty, repeat_last_n=config.repeat_last_n,
        ).uses_history:
            raise UsageError("--decomposer pasta and penalties for repetition exclude each other: "
                             "what a token repeats depends on threads that may be ahead of it")


@functools.lru_cache(8)
def texts_of(path: Path) -> dict[str, str]:
    """What a model file says of the methods: system messages and templates by name."""
    model: Any = open_model(path)
    if path.is_dir():
        return {}
    return {key[len(_PREFIX):]: str(model.get(key)) for key in model.meta_keys()
            if key.startswith(_PREFIX)}


def opening(tokenizer: Tokenizer, texts: Mapping[str, str], method: str,
            messages: Sequence[Mapping[str, str]]) -> Opening:
    """How to answer a conversation by a method ("" for an ordinary response).

    texts: see `texts_of`. Raises UsageError for an unknown method, and RequestError when the
    template refuses the messages.
    """
    writer = _Writer(tokenizer, texts)
    match method:
        case "":
            return Opening(writer.encode(messages, "plain"))
        case "pasta" | "apar":
            return Opening(writer.encode(messages, method), Specification(method))
        case "pdos":
            return Opening(writer.encode(messages, "pdos", PDOS_TEXT), Specification(method))
        case "skeleton":
            return writer.skeleton(messages)
        case _:
            raise UsageError(f"there is no decomposer {method!r}: choose from "
                             f"{', '.join(METHODS)}")


class _Writer:
    """Writes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts

    def skeleton(self, messages: Sequence[Mapping[str, str]]) -> Opening:
        """The prompt that asks for the outline, and what the points' prompts are made of.

        The outline is not there yet: holes in the rendered text stand for it, so that the template
        is not needed once it is.
        """
        question, texts = messages[-1]["content"], self._texts

        def asking(template: str) -> list[Mapping[str, str]]:
            holes = {name: hole(name) for name in ("outline", "index", "point")}
            text = re.sub(r"\{(question|outline|index|point)\}",
                          lambda found: ({"question": question} | holes)[found[1]], template)
            return [*messages[:-1], {"role": "user", "content": text}]

        point = self.render(asking(texts.get("sot.point", POINT_TEXT)), "sot.system")
        return Opening(
            self.encode(asking(texts.get("sot.outline", OUTLINE_TEXT)), "sot.system"),
            Specification("skeleton", self.encode(messages, "plain"), point,
                          lead="sot.outline" not in texts))

    def encode(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = ""
               ) -> tuple[int, ...]:
        """`render`, as tokens."""
        return tuple(self._tokenizer.encode(self.render(messages, name, otherwise), special=True))

    def render(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "") -> str:
        """A conversation with what asks for the method: the model's own system message, or text
        behind the question."""
        asked = list(messages)
        if name in self._texts:
            asked = [m for m in asked if m["role"] != "system"]
            asked.insert(0, {"role": "system", "content": self._texts[name]})
        elif otherwise:
            asked[-1] = {**asked[-1], "content": asked[-1]["content"] + otherwise}
        return self._tokenizer.apply_chat(asked)


def methods_for(config: Config) -> list[str]:
    """The methods that a pipeline loaded for `config` can be asked for."""
    if not config.decomposer:
        return []
    path = model_paths(config)[0]
    tokenizer = open_tokenizer(path)
    spacing_of(config.pasta_positions)
    vocabulary = vocabulary_of(tokenizer)
    found = []
    for method in METHODS:
        if method == "pasta" and config.decomposer != "pasta":
            continue  # stages of llama.cpp are loaded for it or not
        try:
            factory.check(method, vocabulary)
        except ModelError:
            if method == config.decomposer:
                raise
            continue
        found.append(method)
    return found
