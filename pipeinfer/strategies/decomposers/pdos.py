"""PDOS, parallel decoding in one sequence: a skeleton of titles, all steps at once, then the rest.

Stage 1: the model writes `####` title `:` for each step that can be decoded separately, and
`####%%%%` after the last. What the method prescribes after a title (an ellipsis, a line break, the
next `####`) is inserted, not decoded. Stage 2: a thread continues every step after its title, sees
the text before the block and itself, and ends with `####`. Stage 3: the steps, one after the other,
replace the skeleton, and the response goes on, maybe with another block (PDOS, section 3;
docs/algorithms.md 8). Independent of cells, runs and models.

Beyond the paper: a marker may take several tokens, and is recognised in the text. Titles are
completed only inside a block, not after every colon of ordinary prose. A response may begin with a
block. A malformed list of titles (a title that does not end, or was there before) ends with its
last valid title. A block without any title stays plain text.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field, structs

from pipeinfer.core.types import ANY
from pipeinfer.errors import ModelError
from pipeinfer.strategies.decomposers.base import (
    LONGEST_TITLE,
    MAIN,
    Action,
    Close,
    CutThread,
    Feed,
    Fork,
    TokenVocabulary,
)
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSpec

STEP, END, ELLIPSIS, BREAK = "####", "%%%%", "......", "\n\n"
_STEP, _END = STEP.encode(), END.encode()
_DOTS = (ELLIPSIS, "....", "...", "..", " ...", "\u2026")


class Markers(Struct, frozen=True):
    """The method's markers as tokens.

    dots: single tokens that must not replace a step's content
    """

    step: tuple[int, ...]
    end: tuple[int, ...]
    ellipsis: tuple[int, ...]
    line_break: tuple[int, ...]
    dots: frozenset[int]

    @classmethod
    def of(cls, vocabulary: TokenVocabulary) -> Markers:
        """Return the markers in this vocabulary. Raises ModelError where it cannot encode one by
        itself.
        """
        found = {text: _written(vocabulary, text) for text in (STEP, END, ELLIPSIS, BREAK)}
        if wrong := [repr(text) for text, tokens in found.items() if not tokens]:
            raise ModelError("--decomposer pdos needs a vocabulary with tokens for "
                             f"{', '.join(wrong)}; this model's has none")
        dots = [vocabulary.single(text) for text in _DOTS]
        return cls(found[STEP], found[END], found[ELLIPSIS], found[BREAK],
                   frozenset(t for t in dots if t is not None))

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens inserted after a title: an ellipsis, a line break, the next step's marker."""
        return (*self.ellipsis, *self.line_break, *self.step)


def _written(vocabulary: TokenVocabulary, text: str) -> tuple[int, ...]:
    """The tokens of exactly this text inside another text; empty where there are none."""
    for lead in ("", "\n"):  # some vocabularies put a blank before what comes first
        tokens = vocabulary.encode(lead + text)[len(vocabulary.encode(lead)) if lead else 0:]
        if b"".join(map(vocabulary.piece, tokens)) == text.encode():
            return tuple(tokens)
    return ()


class _Tail(Struct):
    """The texts of the newest tokens, in which markers are searched."""

    pieces: list[bytes] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        """Append a token's text."""
        self.pieces = [*self.pieces[-7:], piece]

    def marker(self, *markers: bytes) -> int:
        """Return the number of tokens of the marker (and blanks before it) at the end; 0: no
        marker.
        """
        return max(self._found(marker) for marker in markers)

    @property
    def begun(self) -> int:
        """The number of last tokens that may become a marker with the following ones."""
        count = 0
        for piece in map(bytes.lstrip, reversed(self.pieces)):
            if not piece or (piece.strip(b"#") and piece.strip(b"%")):
                break
            count += 1
        return count

    def _found(self, marker: bytes) -> int:
        text = b""
        for count, piece in enumerate(reversed(self.pieces), 1):
            text = piece + text
            if len(text) >= len(marker):
                before = text[: -len(marker)]
                return count if text.endswith(marker) and not before.strip() else 0
        return 0


class _Bullet(Struct):
    """A step: its first tokens (`####`, title, colon) and those that the model chose."""

    thread: int
    prefix: tuple[int, ...]
    body: list[int] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)
    tail: _Tail = field(default_factory=_Tail)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.stream.over


class Pdos(Reader):
    """The decomposer of PDOS.

    vocabulary: has to have tokens for the markers; ModelError otherwise
    n_prompt: tokens of the prompt
    """

    def __init__(self, vocabulary: TokenVocabulary, *, n_prompt: int) -> None:
        super().__init__()
        self._vocabulary, self._marks = vocabulary, Markers.of(vocabulary)
        self._n_prompt = self._index = n_prompt
        self._numbers = 0
        self._tail = _Tail()
        self._branches: list[_Bullet] = []  #: of the block at hand
        self._threads: dict[int, _Bullet] = {}
        self._titles: list[list[int]] | None = None  #: of the skeleton that is being written
        self._block_index = 0  #: of the skeleton's first token

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """The bans of the main thread: the end of a block, or dots, at the start; a step right
        after a step.
        """
        marks, first = self._marks, self._n_prompt - 1
        start = {marks.end[0], *marks.dots}
        breaks = set(marks.line_break) if len(marks.line_break) == 1 else set()
        after = marks.step[-1]
        return (*((ANY, first, token) for token in sorted(start | breaks)),
                *((after, ANY, token) for token in sorted({marks.step[0]} | breaks)
                  if len(marks.step) == 1))

    @property
    def complete(self) -> bool:
        """Whether the response is over."""
        return self._main.over and all(branch.over for branch in self._branches)

    def accepted(self, thread: int, token: int) -> list[Action]:
        """Handle the thread's next token, which the model chose."""
        if thread != MAIN:
            return self._branch_token(self._threads[thread], token)
        main, piece = self._main, self._vocabulary.piece(token)
        self._index += 1
        main.add(MAIN, self._numbers, piece)
        self._numbers += 1
        if self._titles is not None:
            main.held += 1
            return self._title_token(self._titles, token, piece)
        self._tail.add(piece)
        main.held = self._tail.begun
        if found := self._tail.marker(_STEP):
            self._titles, self._block_index, main.held = [[]], self._index - found, found
            self._tail = _Tail()
        return []

    def ended(self, thread: int) -> list[Action]:
        """Handle the end of a thread by the model; the stop token is not part of it."""
        if thread != MAIN:
            return self._over(self._threads[thread])
        self._main.over, self._titles = True, None
        return []

    def _title_token(self, titles: list[list[int]], token: int, piece: bytes) -> list[Action]:
        """Handle a token of a title, or of the end of the skeleton."""
        title, done = titles[-1], titles[:-1]
        title.append(token)
        text = self._text(title)
        name = text.strip()
        if name.startswith(_END) and done:
            return self._fan_out(done)
        colon = text.rstrip(b" \n*").endswith(b":")
        if colon and len(name.strip(b"*:")) > 0 and name not in map(self._name, done):
            titles.append([])
            self._index += len(self._marks.forced)
            self._main.edit(-1, piece + self._text(self._marks.forced))
            return [Feed(MAIN, self._marks.forced)]
        if not (colon or b"\n" in text or name.startswith(_END) or _STEP in text
                or len(title) > LONGEST_TITLE):
            return []
        if done:
            return self._fan_out(done)
        if name.startswith(_END) and self._threads:  # the model repeats the last block's end
            for k in range(1, self._main.held + 1):
                self._main.edit(-k, b"")
        self._titles, self._main.held = None, 0
        return []

    def _fan_out(self, titles: list[list[int]]) -> list[Action]:
        """Begin stage 2: cut the skeleton off and fork a thread for each title."""
        main, first = self._main, len(self._threads) + 1
        self._branches = [_Bullet(first + k, (*self._marks.step, *title))
                          for k, title in enumerate(titles)]
        self._threads |= {branch.thread: branch for branch in self._branches}
        for k in range(1, main.held + 1):
            main.edit(-k, b"")
        main.parts += [branch.stream for branch in self._branches]
        main.held, self._titles, self._index = 0, None, self._block_index
        return [CutThread(MAIN, self._block_index), *(
            Fork(b.thread, MAIN, self._block_index, b.prefix,
                 tuple((b.prefix[-1], ANY, dots) for dots in sorted(self._marks.dots)))
            for b in self._branches)]

    def _branch_token(self, branch: _Bullet, token: int) -> list[Action]:
        stream, piece = branch.stream, self._vocabulary.piece(token)
        lead = b"" if stream.parts else self._text((*self._marks.line_break, *branch.prefix))
        stream.add(branch.thread, len(stream.parts), lead + piece)
        branch.body.append(token)
        branch.tail.add(piece)
        stream.held = branch.tail.begun
        if found := branch.tail.marker(_STEP, _END):
            for k in range(1, found + 1):
                stream.edit(-k, b"")
            if found == len(branch.body):
                stream.edit(0, self._text((*self._marks.line_break, *branch.prefix)))
            del branch.body[-found:]
            return self._over(branch)
        return []

    def _over(self, branch: _Bullet) -> list[Action]:
        branch.stream.over = True
        actions: list[Action] = [Close(branch.thread)]
        if all(other.over for other in self._branches):
            tail = [token for other in self._branches
                    for token in (*self._marks.line_break, *other.prefix, *other.body)]
            self._index += len(tail)
            actions.append(Feed(MAIN, tuple(tail)))
        return actions

    def _name(self, title: Sequence[int]) -> bytes:
        return self._text(title).strip()

    def _text(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._vocabulary.piece, tokens))


#: the paper's appendix A (arXiv 2503.20533), appended to the question
TEXT = """

When you need to sequentially handle multiple parallel steps (the steps are individual, for \
example, analyzing multiple individual documents, planning multiple branches, evaluating multiple \
aspects) during the reasoning process, you must strictly adhere to the following format: You need \
to prefix each step with '####', followed by the step's title, and then a colon ':' (an English \
colon). After all the steps are completed, you need to output '####%%%%', and only then can you \
proceed with the subsequent reasoning process.

Example 1:
Question: [Resumes of A, B, C, D] Please analyze which of the four individuals best meets the \
requirements.
Answer: Let us analyze the strengths of each person based on their resumes.
####Strengths of A:......
####Strengths of B:......
####Strengths of C:......
####Strengths of D:......
####%%%% Therefore, I believe that A's resume best meets the requirements.

Example 2:
Question: [document 1,2,3,4] Based on the information in the documents, what is the birthday of \
Jack?
Answer: Let us analyze each documents.
####document 1:......
####document 2:......
####document 3:......
####document 4:......
####%%%% Therefore, Jack's birthday is 5th, May, 2000.

Example 3:
Question: Please analyze the development status of China from the aspects of economy, politics, \
culture, and society.
Answer: Let us analyze from four aspects.
####Economy:......
####Politics:......
####Culture:......
####Society:......
####%%%% Therefore, we can conclude that the development status of China is......

Note that the examples is only used to illustrate the format; the specific content should closely \
revolve around the specific task requirements.

If you see that the part after the colon in a certain step is replaced with an ellipsis, it means \
that the specific content does not need to be provided for this reasoning step, only the title is \
required, and you should directly proceed to the next parallel step. Otherwise, give a complete \
and clear analysis for this step.

Please be careful, do not forget any necessary steps.

Note that only a branch step should start with ####. If it is a stem or general step, you should \
not add ####."""

SPEC = DecomposerSpec(
    "pdos", "steps that are named first and written at once, in one sequence",
    lambda setup: Pdos(setup.vocabulary, n_prompt=setup.n_prompt), text=TEXT, check=Markers.of,
    baseline="pdos-plain")

#: steps that are drafts, the fifth row of the paper's Table 1. The paper does not print how it
#: joins the two prompts. Chain-of-Draft's separator is the marker of PDOS, so only its rule for the
#: length of a step is used.
DRAFTS = structs.replace(
    SPEC, name="cod-pdos", help="pdos with Chain-of-Draft's rule: 5 words for each step",
    text=TEXT + """

Only keep a minimum draft for each step, with 5 words at most.""")

#: Chain-of-Draft: reasoning in a few words per step (arXiv 2502.18600; a baseline). The text is
#: appended to the question, as published; the response is an ordinary one.
CHAIN_OF_DRAFT = DecomposerSpec(
    "cod", "Chain-of-Draft: a prompt that asks for short steps", None, text="""

Think step by step, but only keep a minimum draft for each thinking step, with 5 words at most. \
Return the answer at the end of the response after a separator ####.""")

#: the "Normal" of the paper (section 4.1): the prompt of PDOS, decoded in sequence. Speed-ups are
#: the paper's over this one; over the bare question they would charge PDOS for its longer prompt,
#: and compare answers of other lengths and formats.
PLAIN = DecomposerSpec(
    SPEC.baseline, "the prompt of pdos, decoded in sequence: what pdos is compared with", None,
    open=lambda writer, messages: (writer.encode(messages, "pdos", TEXT), None))
