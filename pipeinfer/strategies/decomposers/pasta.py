"""PASTA-LANG: threads decode promised blocks while the main thread goes on.

    response := (text | promise | sync)*
    promise  := <promise topic="..." tokens=N/>       N: expected length in units of ten, or absent
    sync     := <sync/>

When the main thread completes a promise, a thread begins with `<async>`, sees what the main thread
had written up to the promise, and ends with `</async>`. The main thread goes on at once, at a
position that is moved on by the promised length. `<sync/>` waits for all threads and makes their
cells visible to the main thread (PASTA, section 3). There may be any number of promises; the
scheduler lets their threads wait for room. Malformed tags are plain text. A block that has run on
for four times its promised length is ended. Independent of cells,
runs and models.
"""

from __future__ import annotations

import enum
import re

from msgspec import Struct, field
from typing_extensions import override

from pipeinfer.config import Option, OwnOption
from pipeinfer.core.types import ANY
from pipeinfer.errors import UsageError
from pipeinfer.strategies.decomposers.base import (
    MAIN,
    Action,
    Close,
    Feed,
    Fork,
    GiveUp,
    Halt,
    Join,
    Skip,
    TokenVocabulary,
)
from pipeinfer.strategies.decomposers.reading_order import Reader, Stream
from pipeinfer.strategies.spec import DecomposerSpec

ASYNC, END_ASYNC, SYNC = b"<async>", b"</async>", b"<sync/>"
UNIT = 10  #: tokens that the attribute counts in
LONGEST = 4  #: a block ends at so many times the length that its promise names
_TAGS = re.compile(rb'(?P<promise><promise\s+topic=(?:"[^"<>]*"|\'[^\'<>]*\')'
                   rb'(?:\s+tokens=(?P<quote>["\']?)(?P<n>[0-9]{1,6})(?P=quote))?\s*/>)|<sync/>')
_OPENING = b"<promise"
_LONGEST_TAG = 256  #: bytes after which an unfinished tag is text


class Positions(enum.StrEnum):
    """Rules for the main thread's position after a promise (docs/algorithms.md 7.3; paper section
    6.2).

    pred-10x: leave 10 N positions free
    pred-1x: leave N free, for models whose attribute is the exact length
    fixed: leave a given number free
    oracle: leave the block's true length free; needs the lengths of an earlier run
    oracle-10x: the same, rounded to tens
    """

    PRED_10X = "pred-10x"
    PRED_1X = "pred-1x"
    FIXED = "fixed"
    ORACLE = "oracle"
    ORACLE_10X = "oracle-10x"


class Spacing(Struct, frozen=True):
    """A rule for positions with its parameters.

    kind: the rule
    count: positions for `fixed`, and after a promise without `tokens`
    lengths: tokens of each block, tags included, for the oracles; further blocks are given the room
        that their promises name
    """

    kind: Positions = Positions.PRED_10X
    count: int = 40
    lengths: tuple[int, ...] = ()

    def after(self, block: int, attribute: int | None) -> int:
        """Return the number of positions to leave free for a block.

        block: number of the block, from 0
        attribute: N of its promise; None without
        """
        match self.kind:
            case Positions.PRED_1X if attribute is not None:
                return attribute
            case Positions.FIXED:
                return self.count
            case Positions.ORACLE if block < len(self.lengths):
                return self.lengths[block]
            case Positions.ORACLE_10X if block < len(self.lengths):
                return UNIT * max(1, round(self.lengths[block] / UNIT))
        return self.count if attribute is None else UNIT * attribute


class _Block(Struct):
    """A promise and its thread.

    length: tokens, tags included
    start: position of the first token
    room: the length at which it is ended
    """

    thread: int
    length: int
    start: int
    room: int
    stream: Stream = field(default_factory=Stream)
    settled: bool = False
    joined: bool = False


class Pasta(Reader):
    """The decomposer of PASTA.

    start: position of the first token
    room: a promise that would move the main thread beyond this many positions is plain text
    spacing: rule for positions
    overlap: whether the main thread may have lower positions than what is joined to it. Otherwise
        it moves behind the longest block at a sync (not in the paper; llama.cpp takes positions in
        order only)
    """

    def __init__(self, vocabulary: TokenVocabulary, *, start: int, room: int,
                 spacing: Spacing | None = None, overlap: bool = True) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._spacing, self._overlap = spacing or Spacing(), overlap
        self._room, self._pos = room, start
        self._index = start
        self._begin = tuple(vocabulary.encode(ASYNC.decode()))
        self._end = tuple(vocabulary.encode(END_ASYNC.decode()))
        self._block_bans = _banned(vocabulary, b"<promise", b'<promise topic="', b'" tokens=',
                                   SYNC, ASYNC)
        self._numbers = 0
        self._blocks: dict[int, _Block] = {}
        self._waiting = False

    @property
    def bans(self) -> tuple[tuple[int, int, int], ...]:
        """The bans of the main thread: the tags that this class inserts."""
        return _banned(self._vocabulary, ASYNC, END_ASYNC)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each block, tags included, in the order of the promises."""
        return tuple(block.length for block in self._blocks.values())

    @property
    def complete(self) -> bool:
        """Whether the response is over."""
        return self._main.over and all(block.stream.over for block in self._blocks.values())

    def accepted(self, thread: int, token: int) -> list[Action]:
        """Handle the thread's next token, which the model chose."""
        if thread != MAIN:
            return self._block_token(self._blocks[thread], token)
        main = self._main
        self._index += 1
        self._pos += 1
        main.add(MAIN, self._numbers, self._vocabulary.piece(token))
        self._numbers += 1
        main.held += 1
        start = len(main.parts) - main.held
        text = main.text(start)
        found = _TAGS.search(text)
        if found is None:
            at = text.rfind(b"<")
            if at < 0 or not _may_be_tag(text[at:]):
                main.held = 0
            return []
        actions: list[Action] = []
        skip = 0
        if not found.group("promise"):
            if any(not block.joined for block in self._blocks.values()):
                actions = self._sync()
        else:
            attribute = None if found.group("n") is None else int(found.group("n"))
            promised = self._skip(attribute)
            if promised is None:  # no room for the block: the promise stays plain text
                main.held = 0
                return []
            skip = promised
        _strip(main, start, found.start(), len(text) - found.end())
        main.held = 0
        return self._promise(attribute, skip) if found.group("promise") else actions

    def ended(self, thread: int) -> list[Action]:
        """Handle the end of a thread by the model; the stop token is not part of it."""
        if thread == MAIN:
            self._main.over = True
            return []
        return self._end_block(self._blocks[thread])

    @override
    def settled(self, thread: int) -> list[Action]:
        self._blocks[thread].settled = True
        return self._join()

    # --- the main thread ----------------------------------------------------------------------

    def _skip(self, attribute: int | None) -> int | None:
        """Positions to leave free for the next block; None: there is no room, so the promise is
        text.
        """
        skip = self._spacing.after(len(self._blocks), attribute)
        return skip if self._pos + skip < self._room else None

    def _promise(self, attribute: int | None, skip: int) -> list[Action]:
        thread = len(self._blocks) + 1
        unit = 1 if self._spacing.kind is Positions.PRED_1X else UNIT
        room = self._room if attribute is None else LONGEST * max(attribute * unit, UNIT)
        block = _Block(thread, len(self._begin), self._pos, room)
        self._blocks[thread] = block
        self._main.parts.insert(len(self._main.parts) - 1, block.stream)
        self._pos += skip
        return [Fork(thread, MAIN, self._index, self._begin, self._block_bans), Skip(MAIN, skip)]

    def _sync(self) -> list[Action]:
        self._waiting = True
        return [Halt(MAIN), *self._join()]

    def _join(self) -> list[Action]:
        """Join all blocks and continue, if a sync waits and every block is settled."""
        loose = [block for block in self._blocks.values() if not block.joined]
        if not self._waiting or not all(block.settled for block in loose):
            return []
        self._waiting = False
        for block in loose:
            block.joined = True
        skip = 0
        if not self._overlap:
            behind = max(block.start + block.length for block in loose)
            skip = max(behind - (self._pos - 1), 0)
            self._pos += skip
        return [Join(MAIN, tuple(block.thread for block in loose)), Feed(MAIN, skip=skip)]

    # --- blocks -------------------------------------------------------------------------------

    def _block_token(self, block: _Block, token: int) -> list[Action]:
        stream = block.stream
        block.length += 1
        stream.add(block.thread, len(stream.parts), self._vocabulary.piece(token))
        text = stream.text(-2 * len(END_ASYNC))
        if text.endswith(END_ASYNC):
            _cut_tail(stream, len(END_ASYNC))
            return self._over(block)
        stream.held = _unsure(stream, text)
        if block.length >= block.room:
            return [GiveUp(block.thread), *self._end_block(block)]
        return []

    def _end_block(self, block: _Block) -> list[Action]:
        """Write the closing tag that the model has not written."""
        block.length += len(self._end)
        return [Feed(block.thread, self._end), *self._over(block)]

    def _over(self, block: _Block) -> list[Action]:
        block.stream.over = True
        return [Close(block.thread, evaluate=True)]


def _may_be_tag(text: bytes) -> bool:
    if len(text) > _LONGEST_TAG:
        return False
    whole = (SYNC, _OPENING)
    return any(tag.startswith(text) for tag in whole) or (
        text.startswith(_OPENING) and b">" not in text and b"<" not in text[1:])


def _strip(main: Stream, first: int, start: int, tail: int) -> None:
    """Hide a tag in the parts from `first` on: from byte `start` to `tail` bytes before the end."""
    for k in range(first, len(main.parts)):
        text = main.text(k)[: len(main.text(k)) - len(main.text(k + 1))]
        kept = text[:start]
        if k == len(main.parts) - 1 and tail:
            kept += text[-tail:]
        main.edit(k, kept)
        start = max(start - len(text), 0)


def _unsure(stream: Stream, text: bytes) -> int:
    """The number of a block's last pieces that may be part of an unfinished closing tag."""
    held = next((n for n in range(len(END_ASYNC) - 1, 0, -1) if text.endswith(END_ASYNC[:n])), 0)
    count = 0
    while held > len(stream.text(len(stream.parts) - count)):
        count += 1
    return count


def _cut_tail(stream: Stream, count: int) -> None:
    """Remove the last `count` bytes of a stream's text."""
    for k in range(len(stream.parts) - 1, -1, -1):
        if not count:
            return
        text = stream.text(k)
        taken = min(count, len(text))
        stream.edit(k, text[: len(text) - taken])
        count -= taken


def _banned(vocabulary: TokenVocabulary, *tags: bytes) -> tuple[tuple[int, int, int], ...]:
    """Bans of those tags that are single tokens, at any place."""
    return tuple((ANY, ANY, token) for tag in tags
                 if (token := vocabulary.single(tag.decode())) is not None)


def spacing_of(text: str) -> Spacing:
    """Return the rule for an option's text: pred-10x, pred-1x, fixed, fixed:N, oracle:N,N... or
    oracle-10x:N,N...

    Raises UsageError for any other text.
    """
    kind, colon, count = text.partition(":")
    if kind in ("oracle", "oracle-10x") and re.fullmatch(r"\d{1,6}(,\d{1,6})*", count):
        return Spacing(Positions(kind), lengths=tuple(map(int, count.split(","))))
    if kind == "fixed" and (not colon or count.isdigit()):
        return Spacing(Positions.FIXED, int(count or 40))
    if kind in ("pred-10x", "pred-1x") and not colon:
        return Spacing(Positions(kind))
    raise UsageError(f"--pasta-positions {text}: choose pred-10x, pred-1x, fixed, "
                     "fixed:N, or oracle:N,N... with the lengths of all blocks (compare "
                     "--pasta-oracle finds them)")


SPEC = DecomposerSpec(
    "pasta", "promises with attributes, whose blocks are written at once",
    lambda setup: Pasta(
        setup.vocabulary, start=setup.n_prompt, room=setup.room,
        spacing=spacing_of(setup.options["pasta_positions"]), overlap=setup.overlap),
    validate=lambda options: spacing_of(options["pasta_positions"]),
    options={"pasta_positions": OwnOption("pred-10x", Option(
        ("--pasta-positions",), "str",
        "How many positions the main thread leaves free for a promise: pred-10x (ten times its "
        "tokens attribute), pred-1x, fixed, fixed:N, or oracle:N,N... (blocks' true lengths)."))},
    gaps=True, penalties=False)
