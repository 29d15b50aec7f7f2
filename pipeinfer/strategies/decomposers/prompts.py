"""From a question to a response in threads: prompts of each method, and its decomposer.

Knows tokenizers, chat templates and what a model file says of the methods that it was trained for
(`pipeinfer.decompose.*`); no cells, runs or ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.config import JobConfig, SamplingConfig, SpeculationConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ModelError, UsageError
from pipeinfer.models.locate import model_paths, open_model, open_tokenizer
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.base import Decomposer, Vocabulary
from pipeinfer.strategies.decomposers.pasta import Pasta, Positions, Spacing
from pipeinfer.strategies.decomposers.pdos import Markers, Pdos
from pipeinfer.strategies.decomposers.skeleton import Prompts, Skeleton

if TYPE_CHECKING:
    from pipeinfer.cluster.session import Session

METHODS = ("pasta", "pdos", "skeleton", "apar")
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
    """How a response begins. prompt: tokens of the main thread; decompose: makes the decomposer,
    None for an ordinary response."""

    prompt: tuple[int, ...]
    decompose: Callable[[], Decomposer] | None


def check(config: SpeculationConfig, sampling: SamplingConfig) -> None:
    """Raise UsageError for options that a decomposed response can not honour."""
    if not config.decomposer:
        return
    if sampling.grammar or sampling.grammar_file or sampling.json_schema:
        raise UsageError("--decomposer and a grammar exclude each other: the grammar would have to "
                         "describe the threads")
    if config.decomposer == "pasta":
        spacing_of(config.pasta_positions)
        if SamplingParams(
            repeat_penalty=sampling.repeat_penalty, presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty, repeat_last_n=sampling.repeat_last_n,
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


@functools.lru_cache(8)
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """What decomposers need of a tokenizer."""
    return Vocabulary(functools.lru_cache(1 << 16)(functools.partial(
        tokenizer.piece, special=True)), lambda text: tokenizer.split(text, special=True))


class Decomposition:
    """The methods for one model. texts: see `texts_of`; spacing: of PASTA's positions; overlap:
    whether every stage takes positions in any order."""

    def __init__(self, tokenizer: Tokenizer, texts: Mapping[str, str], *, n_ctx: int,
                 most: int, spacing: Spacing | None = None, overlap: bool = True) -> None:
        self._tokenizer, self._texts, self._overlap = tokenizer, texts, overlap
        self._n_ctx, self._most, self._spacing = n_ctx, most, spacing
        self._vocabulary = vocabulary_of(tokenizer)

    @classmethod
    def of(cls, session: Session, config: JobConfig) -> Decomposition:
        """As a config wants it, on a running cluster. Raises UsageError, and ModelError for a
        model without the method's tokens."""
        overlap = all(stage["backend"] == "torch" for stage in session.stages.values())
        self = cls.on(session.tokenizer, model_paths(config)[0], session.limits.n_ctx,
                      config.speculation.decompose_threads,
                      config.speculation.pasta_positions, overlap=overlap)
        self.check(config.speculation.decomposer)
        return self

    @classmethod
    def on(cls, tokenizer: Tokenizer, path: Path, n_ctx: int, most: int, positions: str, *,
           overlap: bool = True) -> Decomposition:
        """For the model at `path`. Raises UsageError."""
        return cls(tokenizer, texts_of(path), n_ctx=n_ctx, most=most,
                   spacing=spacing_of(positions), overlap=overlap)

    def check(self, method: str) -> None:
        """Raise ModelError for a method whose tokens this vocabulary does not have."""
        if method == "pdos":
            Markers.of(self._vocabulary)
        elif method == "apar":
            Apar(self._vocabulary, n_prompt=0)

    def opening(self, method: str, messages: Sequence[Mapping[str, str]]) -> Opening:
        """How to answer a conversation by a method ("" for an ordinary response).

        Raises UsageError for an unknown method.
        """
        vocabulary = self._vocabulary
        match method:
            case "":
                return Opening(self._encode(messages, "plain"), None)
            case "pasta":
                prompt = self._encode(messages, "pasta")
                return Opening(prompt, functools.partial(
                    Pasta, vocabulary, start=len(prompt), room=self._n_ctx, most=self._most,
                    spacing=self._spacing, overlap=self._overlap))
            case "pdos":
                prompt = self._encode(messages, "pdos", PDOS_TEXT)
                return Opening(prompt, functools.partial(Pdos, vocabulary, n_prompt=len(prompt)))
            case "apar":
                prompt = self._encode(messages, "apar")
                return Opening(prompt, functools.partial(Apar, vocabulary, n_prompt=len(prompt)))
            case "skeleton":
                return self._skeleton(messages)
            case _:
                raise UsageError(f"there is no decomposer {method!r}: choose from "
                                 f"{', '.join(METHODS)}")

    def _skeleton(self, messages: Sequence[Mapping[str, str]]) -> Opening:
        question, texts = messages[-1]["content"], self._texts
        trained = "sot.outline" in texts
        outline = texts.get("sot.outline", OUTLINE_TEXT)
        point = texts.get("sot.point", POINT_TEXT)

        def prompt_of(template: str, **values: Any) -> tuple[int, ...]:
            text = template
            for name, value in {"question": question, **values}.items():
                text = text.replace("{" + name + "}", str(value))
            return self._encode([*messages[:-1], {"role": "user", "content": text}], "sot.system")

        prompts = Prompts(
            self._encode(messages, "plain"),
            lambda lines, index, text: prompt_of(point, outline=lines, index=index, point=text),
            lambda index, text: "" if trained else f"{index}. {text}: ")
        return Opening(prompt_of(outline), functools.partial(
            Skeleton, self._vocabulary, prompts, most=self._most))

    def _encode(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = ""
                ) -> tuple[int, ...]:
        """A conversation as tokens, with what asks for the method: the model's own system message,
        or text behind the question."""
        asked = list(messages)
        if name in self._texts:
            asked = [m for m in asked if m["role"] != "system"]
            asked.insert(0, {"role": "system", "content": self._texts[name]})
        elif otherwise:
            asked[-1] = {**asked[-1], "content": asked[-1]["content"] + otherwise}
        chat = self._tokenizer.apply_chat(asked)
        return tuple(self._tokenizer.encode(chat, special=True))


def methods_for(config: JobConfig) -> list[str]:
    """The methods that a pipeline loaded for `config` can be asked for."""
    if not config.speculation.decomposer:
        return []
    path = model_paths(config)[0]
    tokenizer = open_tokenizer(path)
    vocabulary = Decomposition.on(tokenizer, path, 1, 1, config.speculation.pasta_positions)
    found = []
    for method in METHODS:
        if method == "pasta" and config.speculation.decomposer != "pasta":
            continue  # stages of llama.cpp are loaded for it or not
        try:
            vocabulary.check(method)
        except ModelError:
            if method == config.speculation.decomposer:
                raise
            continue
        found.append(method)
    return found


def spacing_of(text: str) -> Spacing:
    """PASTA's positions from an option: pred-10x, pred-1x, fixed or fixed:N. Raises UsageError."""
    kind, colon, count = text.partition(":")
    if kind == "fixed" and (not colon or count.isdigit()):
        return Spacing(Positions.FIXED, int(count or 40))
    if kind in ("pred-10x", "pred-1x") and not colon:
        return Spacing(Positions(kind))
    raise UsageError(f"--pasta-positions {text}: choose pred-10x, pred-1x, fixed or fixed:N")
