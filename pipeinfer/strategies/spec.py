"""The specification of a strategy: its name, its factory, its requirements and its own options.

A strategy is one file with a specification in it, and one line: in `registry.BUILT_IN`, or as an
entry point of the group `pipeinfer.strategies` in another package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from pipeinfer.config import OwnOption
from pipeinfer.strategies.decomposers.base import Decomposer, Specification, TokenVocabulary
from pipeinfer.strategies.proposers.base import InlineProposer, Proposer

if TYPE_CHECKING:
    from pipeinfer.backends.base import Backend
    from pipeinfer.models.bita_adapter import BitaAdapter
    from pipeinfer.models.text.tokenizer import Tokenizer
    from pipeinfer.models.text.vocabulary import Vocabulary as GrammarVocabulary


def _anything(_: object) -> None:
    """Accept any value."""


def _none(_: object) -> int:
    """Return 0."""
    return 0


class ProposerSetup(Struct, frozen=True):
    """The arguments of a proposer's factory.

    options: values of its own options
    n_vocab: the target's vocabulary; learned tokens have ids from there on
    backend: what it evaluates, loaded; None: nothing
    paths: how many paths that has in its cache
    vocabulary: for grammars; None where there are none
    adapter: the weights that were learned for it
    prompt_id: sequence id of learned prompts
    given: names of its own options that the user has set
    cost: measured time of a run of so many rows, relative to one row; None where the proposer is
        not to be tuned by it
    width: most rows of a verifying run; 0: no bound
    """

    options: Mapping[str, Any]
    n_vocab: int = 0
    backend: Backend | None = None
    paths: int = 1
    vocabulary: GrammarVocabulary | None = None
    adapter: BitaAdapter | None = None
    prompt_id: int = 0
    given: frozenset[str] = frozenset()
    cost: Callable[[int], float] | None = None
    width: int = 0


class ProposerSpec(Struct, frozen=True):
    """A proposer. It has either `worker` or `inline`.

    name: value of --proposer
    help: text after its name in the list of proposers
    worker: makes a proposer of the draft's thread
    inline: makes a proposer that the scheduler queries itself, and that adds hint rows to runs
    options: its own options, by name
    resource: where the class of what it evaluates is, `module:Class` (see `strategies.resources`);
        empty: nothing
    usual: its place among the proposers of a job whose user names none, the quickest first; 0: such
        a job does not use it
    adapter: the option that names its adapter's file, where it needs one
    backends: kinds of stages that it works on if its adapter has prompts; empty: all
    why: the reason shown to the user where it does not work
    synchronous: whether steps follow one another unless the user requests another policy, because
        it can propose little before the last token is accepted
    branches: by its own options, how many paths of an evaluation it has in its draft's cache; a
        draft whose layers keep a state has none
    Raises ValueError if `worker` and `inline`, or `adapter` and `options`, contradict each other.
    """

    name: str
    help: str
    worker: Callable[[ProposerSetup], Proposer] | None = None
    inline: Callable[[ProposerSetup], InlineProposer] | None = None
    options: Mapping[str, OwnOption] = field(default_factory=dict)
    resource: str = ""
    usual: int = 0
    adapter: str = ""
    backends: frozenset[str] = frozenset()
    why: str = ""
    synchronous: bool = False
    branches: Callable[[Mapping[str, Any]], int] = _none

    def __post_init__(self) -> None:
        if (self.worker is None) == (self.inline is None):
            raise ValueError(f"proposer {self.name} needs either `worker` or `inline`")
        if self.adapter and self.adapter not in self.options:
            raise ValueError(f"proposer {self.name} has no option that names its adapter")


class DecomposerSetup(Struct, frozen=True):
    """The arguments of the factory of one response's decomposer.

    vocabulary: of the model
    n_prompt: tokens of the prompt
    room: tokens of the context
    overlap: whether every stage accepts positions in any order
    options: values of its own options
    wanted: the specification that came with the prompt
    encode: converts a text of `Writer.render`, its seam, and the values of its placeholders to
        tokens
    """

    vocabulary: TokenVocabulary
    n_prompt: int
    room: int
    overlap: bool
    options: Mapping[str, Any]
    wanted: Specification
    encode: Callable[[str, str, Mapping[str, str]], tuple[int, ...]]


class Writer(Struct, frozen=True):
    """Writes prompts for one model.

    tokenizer: the model's, with its chat template
    texts: what the model's file contains for the methods, by name
    """

    tokenizer: Tokenizer
    texts: Mapping[str, str]

    def encode(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[int, ...]:
        """Return the token ids of the text that `render` returns; arguments as there."""
        text, seam = self.render(messages, name, otherwise, begun=begun)
        return tuple(self.tokenizer.encode_guarded(text, seam))

    def render(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[str, str]:
        """Return the prompt of a conversation and its seam, which marks contents that are plain
        text.

        messages: of the conversation
        name: of the method; its text in `texts` replaces the system message
        otherwise: appended to the question where `texts` has no such name
        begun: the beginning of the answer, which the model continues
        """
        asked = list(messages)
        if name in self.texts:
            asked = [m for m in asked if m["role"] != "system"]
            asked.insert(0, {"role": "system", "content": self.texts[name]})
        elif otherwise:
            asked[-1] = {**asked[-1], "content": asked[-1]["content"] + otherwise}
        text, seam = self.tokenizer.guarded_chat(asked)
        return text + begun, seam


class DecomposerSpec(Struct, frozen=True):
    """A decomposition method.

    name: value of --decomposer
    help: text after its name in the list of decomposers
    make: makes the decomposer of one response; None where the method is only a prompt, and the
        response is an ordinary one
    text: appended to the question where the model's file has no text for the method
    open: writes the prompt and the specification, where that takes more than `text`
    baseline: the method that decodes such a prompt in sequence, with which `compare` compares, too
    check: raises ModelError for a vocabulary without the method's tokens
    validate: raises UsageError for values of its own options
    options: its own options, by name
    gaps: whether positions may leave gaps, so that stages of llama.cpp have to be loaded for it
    penalties: whether it supports repetition penalties
    """

    name: str
    help: str
    make: Callable[[DecomposerSetup], Decomposer] | None
    text: str = ""
    open: Callable[[Writer, Sequence[Mapping[str, str]]],
                   tuple[tuple[int, ...], Specification | None]] | None = None
    baseline: str = ""
    check: Callable[[TokenVocabulary], object] = _anything
    validate: Callable[[Mapping[str, Any]], object] = _anything
    options: Mapping[str, OwnOption] = field(default_factory=dict)
    gaps: bool = False
    penalties: bool = True
