"""What a strategy says of itself: its name, how it is made, what it needs, its own options.

A strategy is one file with a `SPEC` in it, and one line: in `registry.BUILT_IN`, or as an entry
point of the group `pipeinfer.strategies` in another package.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct, field

from pipeinfer.config import OwnOption
from pipeinfer.strategies.decomposers.base import Decomposer, Specification, Vocabulary
from pipeinfer.strategies.proposers.base import InlineProposer, Proposer

if TYPE_CHECKING:
    from pipeinfer.backends.base import Backend
    from pipeinfer.models.bita_adapter import BitaAdapter
    from pipeinfer.models.text.grammar import Vocabulary as GrammarVocabulary


def _anything(_: object) -> None:
    """Nothing is wrong with it."""


class Need(enum.Enum):
    """What must be there before a proposer can be made."""

    DRAFT = "draft"  #: loaded draft models, in `ProposerSetup.drafts`
    ADAPTER = "adapter"  #: the file that its option `ProposerSpec.adapter` names


class ProposerSetup(Struct, frozen=True):
    """What a proposer is made of.

    options: values of its own options
    n_vocab: the target's vocabulary; learned tokens have ids from there on
    drafts: loaded draft models, in the order in which they are asked
    paths: how many paths each of them keeps in its cache
    vocabulary: for grammars; None where there are none
    adapter: what was learned for it
    prompt_id: sequence id of learned prompts
    given: names of its own options that the user has set
    cost: time of a run of so many rows in times of one row, as measured; None where nothing is to
        be tuned by it
    width: rows of a run that verifies, at most; 0: no bound
    """

    options: Mapping[str, Any]
    n_vocab: int = 0
    drafts: Sequence[Backend] = ()
    paths: int = 1
    vocabulary: GrammarVocabulary | None = None
    adapter: BitaAdapter | None = None
    prompt_id: int = 0
    given: frozenset[str] = frozenset()
    cost: Callable[[int], float] | None = None
    width: int = 0


class ProposerSpec(Struct, frozen=True):
    """A way to guess. It has either `worker` or `inline`.

    name: value of --proposer
    help: what follows its name in the list of proposers
    worker: makes what the draft's thread asks (several are asked in turn, a draft model each)
    inline: makes what the scheduler asks, and gives rows of its own
    options: its own options, by name
    needs: see `Need`
    adapter: the option that names its adapter's file, where it needs one
    backends: kinds of stages that it works on, with an adapter that has prompts if it takes
        adapters; empty for all
    why: what a user is told where it does not work
    synchronous: a step follows the other unless another policy is asked for, since it has little to
        name before the last token is accepted
    replicable: its rows can be shared out to ranks that each hold the whole model
    """

    name: str
    help: str
    worker: Callable[[ProposerSetup], Sequence[Proposer]] | None = None
    inline: Callable[[ProposerSetup], InlineProposer] | None = None
    options: Mapping[str, OwnOption] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()
    adapter: str = ""
    backends: frozenset[str] = frozenset()
    why: str = ""
    synchronous: bool = False
    replicable: bool = False

    def __post_init__(self) -> None:
        if (self.worker is None) == (self.inline is None):
            raise ValueError(f"proposer {self.name} needs either `worker` or `inline`")
        if (Need.ADAPTER in self.needs) != (self.adapter in self.options):
            raise ValueError(f"proposer {self.name} has no option that names its adapter")


class DecomposerSetup(Struct, frozen=True):
    """What the decomposer of one response is made of.

    vocabulary: of the model
    n_prompt: tokens of the prompt
    room: tokens of the context
    overlap: whether every stage accepts positions in any order
    options: values of its own options
    wanted: what the prompt was made with
    encode: a text of `Writer.render`, its seam, and what stands in for parts of it: tokens
    """

    vocabulary: Vocabulary
    n_prompt: int
    room: int
    overlap: bool
    options: Mapping[str, Any]
    wanted: Specification
    encode: Callable[[str, str, Mapping[str, str]], tuple[int, ...]]


class Writer(Protocol):
    """Writes prompts for one model. texts: what its file says of the methods."""

    texts: Mapping[str, str]

    def encode(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[int, ...]:
        """The token ids of what `render` gives."""

    def render(self, messages: Sequence[Mapping[str, str]], name: str, otherwise: str = "", *,
               begun: str = "") -> tuple[str, str]:
        """A conversation with what asks for the method `name`: the model's own system message, or
        the text `otherwise` behind the question. Also the seam that keeps contents text.

        begun: how the answer begins, which the model goes on from.
        """


class DecomposerSpec(Struct, frozen=True):
    """A way to split a response into threads.

    name: value of --decomposer
    help: what follows its name in the list of decomposers
    make: the decomposer of one response; None where the prompt alone makes the method, and the
        response is an ordinary one
    text: put behind the question where the model's file says nothing of the method
    open: writes the prompt and what goes with it, where that takes more than `text`
    check: raises ModelError for a vocabulary without the method's tokens
    validate: raises UsageError for values of its own options
    options: its own options, by name
    gaps: positions may leave gaps, so stages of llama.cpp have to be loaded for it
    penalties: whether penalties for repetition can be honoured
    """

    name: str
    help: str
    make: Callable[[DecomposerSetup], Decomposer] | None
    text: str = ""
    open: Callable[[Writer, Sequence[Mapping[str, str]]], tuple[tuple[int, ...], Specification]] \
        | None = None
    check: Callable[[Vocabulary], object] = _anything
    validate: Callable[[Mapping[str, Any]], object] = _anything
    options: Mapping[str, OwnOption] = field(default_factory=dict)
    gaps: bool = False
    penalties: bool = True
