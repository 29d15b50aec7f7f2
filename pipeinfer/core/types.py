"""Plain data that every layer of pipeinfer shares: rows, sequence operations, requests.

Independent of models, transports, clocks and policies. All position ranges are half-open, `[p0,
p1)`, and `END` stands for "to the end of the sequence".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

END = 2**31 - 1  #: upper bound of a position range that reaches to the end of a sequence
ALL_SEQS = -1  #: `SeqRemove.seq_id` meaning every sequence id
ANY = -1  #: in `SamplingParams.bans`: every token, every position
NO_TOKEN = -1  #: `Choice.token` where the sampling rule allows no token
#: most rows of a run that replays output: backends take longer runs without outputs for prompts,
#: which some compute in other arithmetic
REPLAYED_ROWS = 16

IntArray: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Pooling: TypeAlias = Literal["last", "mean", "cls"]  #: rows of a prompt that are its embedding


class Columns(NamedTuple):
    """Tokens, positions and output flags of n rows, as lists."""

    tokens: list[int]
    positions: list[int]
    outputs: list[bool]


class Media(Struct, frozen=True, eq=False):
    """Rows of a picture or of sound, which the first stage reads in place of tokens.

    n_pos: how many positions all of it takes of the text that follows
    causal: whether a row sees only those before it; else all of them see each other
    places: int32[3, n], time, row and column of each where a model has positions in sections
        (M-RoPE), from the model's position of the first row on; None elsewhere
    rows: float32[n, w], as wide as the first stage reads them; None behind it
    digest: of all that cells depend on; b"" in a run
    start: place of the first row in its prompt
    offset, total: which of the rows these are, and how many there are; 0: these are all
    """

    n_pos: int
    causal: bool = True
    places: IntArray | None = None
    rows: FloatArray | None = None
    digest: bytes = b""
    start: int = 0
    offset: int = 0
    total: int = 0

    @property
    def stop(self) -> int:
        """The place after its last row."""
        assert self.rows is not None
        return self.start + len(self.rows)

    @property
    def whole(self) -> bool:
        """Whether cells can be shared only with all of it: its rows see each other, or they stand
        at one position."""
        return not self.causal or self.places is not None

    def part(self, first: int, stop: int) -> Media:
        """Return rows `[first, stop)`, for a run."""
        assert self.rows is not None
        places = None if self.places is None else np.ascontiguousarray(self.places[:, first:stop])
        return Media(self.n_pos, self.causal, places, self.rows[first:stop], offset=first,
                     total=len(self.rows))

    def likeness(self) -> tuple[Any, ...]:
        """Return what two of them share if they are alike, rows left out."""
        places = None if self.places is None else self.places.tobytes()
        return self.n_pos, self.causal, places, self.offset, self.total


class Rows:
    """The rows of one run, column by column; treated as immutable.

    tokens: int32[n], vocabulary ids
    positions: int32[n], in tokens from the start of the text
    seq_ids: n non-empty tuples; a row's cell is stored under all of them
    outputs: bool[n], rows whose choice (or logits) is wanted
    views: n non-empty tuples, the ids whose cells a row attends to; None: those that it is stored
        under (llama.cpp uses the first of these; with the leaf-id encoding used here both readings
        see the same cells). Only backends with `separate_views` accept anything but None
    media: of rows of a picture, whose tokens are NO_TOKEN; a run holds those of one picture only

    The columns exist as arrays and as lists. Each form is made at its first use, because numpy
    takes microseconds for a single row. Raises ValueError for columns that differ in length.
    """

    __slots__ = ("_arrays", "_lists", "media", "seq_ids", "views")

    def __init__(
        self, tokens: IntArray, positions: IntArray, seq_ids: tuple[tuple[int, ...], ...],
        outputs: BoolArray, views: tuple[tuple[int, ...], ...] | None = None,
        media: Media | None = None,
    ) -> None:
        self._arrays: tuple[IntArray, IntArray, BoolArray] | None = tokens, positions, outputs
        self._lists: Columns | None = None
        self.seq_ids, self.views, self.media = seq_ids, views, media
        if not len(tokens) == len(positions) == len(seq_ids) == len(outputs):
            raise ValueError("columns of Rows differ in length")
        self._check_views()

    @classmethod
    def of(cls, columns: Columns, seq_ids: tuple[tuple[int, ...], ...],
           views: tuple[tuple[int, ...], ...] | None = None, media: Media | None = None) -> Rows:
        """Make rows from lists, which must not be changed afterwards.

        columns: tokens, positions and output flags of n rows
        seq_ids: n non-empty tuples
        views, media: as in the class
        Raises ValueError if `views` and `seq_ids` differ in length.
        """
        rows = cls.__new__(cls)
        rows._arrays, rows._lists, rows.seq_ids, rows.views = None, columns, seq_ids, views
        rows.media = media
        rows._check_views()
        return rows

    def _check_views(self) -> None:
        if self.views is not None and len(self.views) != len(self.seq_ids):
            raise ValueError("columns of Rows differ in length")

    @property
    def lists(self) -> Columns:
        """Tokens, positions and output flags as lists."""
        if self._lists is None:
            tokens, positions, outputs = self._made()
            self._lists = Columns(tokens.tolist(), positions.tolist(), outputs.tolist())
        return self._lists

    @property
    def tokens(self) -> IntArray:
        """The vocabulary ids, int32[n]."""
        return self._made()[0]

    @property
    def positions(self) -> IntArray:
        """The positions, int32[n]."""
        return self._made()[1]

    @property
    def outputs(self) -> BoolArray:
        """The output flags, bool[n]."""
        return self._made()[2]

    def _made(self) -> tuple[IntArray, IntArray, BoolArray]:
        if self._arrays is None:
            tokens, positions, outputs = self.lists
            self._arrays = (np.array(tokens, np.int32), np.array(positions, np.int32),
                            np.array(outputs, np.bool_))
        return self._arrays

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __repr__(self) -> str:
        return f"Rows({self.lists}, {self.seq_ids}, {self.views})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        mine, theirs = (one and one.likeness() for one in (self.media, other.media))
        return (self.lists, self.seq_ids, self.views, mine) == (
            other.lists, other.seq_ids, other.views, theirs)

    __hash__ = None  # type: ignore[assignment]

    def first_positions(self) -> dict[int, int]:
        """The lowest position written under each sequence id, by id."""
        first: dict[int, int] = {}
        for pos, ids in zip(self.lists.positions, self.seq_ids, strict=True):
            for seq_id in ids:
                first[seq_id] = min(pos, first.get(seq_id, pos))
        return first


def make_rows(rows: Sequence[tuple[int, int, tuple[int, ...], bool]],
              views: tuple[tuple[int, ...], ...] | None = None, media: Media | None = None) -> Rows:
    """Make rows from `(token, position, sequence ids, output)` tuples; the rest as in `Rows`."""
    return Rows.of(Columns([r[0] for r in rows], [r[1] for r in rows], [r[3] for r in rows]),
                   tuple([r[2] for r in rows]), views, media)


class SeqRemove(Struct, frozen=True):
    """Remove `seq_id` (ALL_SEQS: every id) from the cells at `[p0, p1)`; a cell without ids is
    free.
    """

    seq_id: int
    p0: int
    p1: int = END


class SeqCopy(Struct, frozen=True):
    """Add id `dst` to the cells that carry `src` at positions in `[p0, p1)`.

    A copy never removes cells. The issuer has to remove that range of `dst` first: otherwise one
    sequence holds two cells at one position, and attention counts both.
    """

    src: int
    dst: int
    p0: int
    p1: int


class SeqKeep(Struct, frozen=True):
    """Remove every other id from every cell; a cell that does not carry `seq_id` becomes free."""

    seq_id: int


class SeqJoin(Struct, frozen=True):
    """Add id `dst` to all cells of `src`, as *joined* cells.

    Joined cells are those that did not carry `dst` before. Every row that attends to one of their
    ids sees them, whatever the positions. They belong to the start of the sequence: copies and
    removals include them if the range begins at 0. Only backends with `separate_views` support
    joins.

    order: from 1; of several joined cells at one position, those of a lower order are read first. A
        cell retains the order of its first join.
    """

    src: int
    dst: int
    order: int = 1


SeqOp: TypeAlias = SeqRemove | SeqCopy | SeqKeep | SeqJoin


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """How the target chooses a token; see `sampling.choose` for the order of the steps.

    temperature: 0 is greedy
    top_k: only the k likeliest tokens; 0: all
    top_p: only the likeliest tokens of this total probability; 1: all
    min_p: only tokens of this probability relative to the likeliest; 0: all
    repeat_penalty: divisor of the logits of repeated tokens; 1 changes nothing
    presence_penalty: subtracted from the logits of repeated tokens
    frequency_penalty: subtracted from a token's logit per repetition
    repeat_last_n: penalty window in tokens; 0: none, -1: the whole history
    logit_bias: (token id, added logit) pairs
    key: 64-bit key of the noise
    n_logprobs: how many top log-probabilities to report per token; -1: none at all
    grammar: compiled grammar that the output must follow (`grammar.compile_grammar`); "" for none
    grammar_start: position of the grammar's first token
    bans: (after, at, token) triples: `token` may not follow the token `after` (ANY: any token) at
        position `at` (ANY: any position)
    embed: whether the result after the prompt is its embedding in place of a token
    pooling: which of the prompt's rows are its embedding: the last, the first (cls), or their mean
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    key: int = 0
    n_logprobs: int = -1
    grammar: str = ""
    grammar_start: int = 0
    bans: tuple[tuple[int, int, int], ...] = ()
    embed: bool = False
    pooling: Pooling = "last"

    @property
    def reads_prompt(self) -> bool:
        """Whether the result depends on other rows of the prompt than the last: all of them have
        to be computed, whatever the cache holds."""
        return self.embed and self.pooling != "last"

    @property
    def reads_path(self) -> bool:
        """Whether the choice depends on tokens of the path, beyond logits and position."""
        return bool(self.grammar or self.bans) or self.uses_history

    @property
    def uses_history(self) -> bool:
        """Whether a penalty applies, so that the choice depends on earlier tokens of the path."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Choice(Struct, frozen=True):
    """The target's choice after one row.

    token: its id; NO_TOKEN where a grammar allows no token, or the row's path is not in the grammar
    logprob: its log-probability before sampling parameters apply; None if none was requested
    top: (token id, log-probability) of the most likely tokens, the likeliest first; with
        `SamplingParams.embed` (number, element) of the row's embedding
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Request(Struct, frozen=True):
    """One prompt to continue.

    request_id: the number by which events and instructions refer to it
    prompt: token ids
    max_tokens: most output tokens
    params: how the target chooses tokens
    eos_ids: tokens that end the output, of which they are no part
    ignore_eos: whether `eos_ids` do not end the output
    pool: the answer pool; prompt lookup may copy from other answers of the same pool. 0: none
    stores: whether cells of its prompt may be kept on disks
    media: its pictures, in order; the prompt has a token below 0 for each of their rows
    salt: requests share cells of prompts with those of the same salt only
    """

    request_id: int
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    pool: int = 0
    stores: bool = True
    media: tuple[Media, ...] = ()
    salt: bytes = b""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end this request's output."""
        return frozenset() if self.ignore_eos else self.eos_ids


CURVE_ROWS = (2, 3, 4, 5, 8, 16)  #: rows of the runs whose times form the measured curve
