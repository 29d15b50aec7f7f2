"""The encoding of messages between nodes.

One transaction is one message: a fixed header, then columns, then (for a run that has passed a
stage) the activations, all little-endian and readable in place. There is no pickle and no begin
marker. Every count and length of a frame is checked before it is used; ProtocolError otherwise.
Independent of transports, ranks, clocks and models.

    header  magic "PIPE", version, op, flags, run id, parent run id,
            rows, sequence ids, operations, hidden size, payload bytes, spans   (48 bytes)
    DECODE  spans f64[s,3] tokens i32[n] positions i32[n] lanes i32[n] offsets i32[n+1] ids i32[m]
            ops i32[k,5] outputs u8[n] (padded to 4) [views: offsets i32[n+1] ids i32[m']]
            [media: positions causal offset total placed i32 [places i32[3,n]]]
            hidden f32[n,d] [taps: rows i32 elements i32 f32 or f16[n,t]]
            [pieces: saves i32 loads i32 loaded i32, of each key u8[16] id start stop state i32]
    CONTROL JSON: the messages that are rare (`ControlMessage`)
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Collection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pipeinfer.core import messages
from pipeinfer.core.control import pack, unpack_by
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.types import (
    ALL_SEQS,
    Choice,
    Media,
    Rows,
    SeqCopy,
    SeqJoin,
    SeqKeep,
    SeqOp,
    SeqRemove,
)
from pipeinfer.errors import ProtocolError

MAGIC = b"PIPE"
VERSION = 22

_HEADER = struct.Struct("<4sBBHqqIIIIII")
HEADER_BYTES = _HEADER.size
_CHOICE = np.dtype([("token", "<i4"), ("n_top", "<i4"), ("logprob", "<f8")])
_TOP = np.dtype([("token", "<i4"), ("pad", "<i4"), ("logprob", "<f8")])
# Header flags of a DECODE frame (plain integers: an enum costs a microsecond each time)
_SKIPPED = 1  # an earlier stage skipped the run: apply its operations and pass it on
_SPECULATIVE = 2  # look for a cancellation at layer boundaries
_HIDDEN = 4  # activations follow the columns
_VIEWS = 8  # rows attend to other ids than they are stored under
_TAPS = 16  # inputs of layers follow, also in a RUN_FINISHED frame
_HALF_TAPS = 32  # in float16
_PIECES = 64  # pieces to save or load follow
_MEDIA = 128  # rows of a picture: where they stand, and whether they see each other
_FLAGS = 255  # all of them
_PIECE = np.dtype([("key", "V16"), ("seq_id", "<i4"), ("start", "<i4"), ("stop", "<i4"),
                   ("state", "<i4")])
_PART = int(messages.Op.PART)
_control: msgspec.json.Decoder[messages.ControlMessage] = msgspec.json.Decoder(
    messages.ControlMessage)
_VERDICTS = tuple(messages.Verdict)
_FLOAT, _HALF = np.dtype("<f4"), np.dtype("<u2")
_SHORT = 4  # flag of a PART frame: numbers of 16 bits; the two lower bits hold the verdict
_MAX_SECONDS = 1e11  # since the epoch
_MAX_COUNT = 1 << 24
_MAX_PAYLOAD = 1 << 30


def encode(message: messages.Message) -> bytes:
    """Return the frame of `message`, header and body.

    Raises ProtocolError for an object that is not a message, and for one over the size limit.
    """
    match message:
        case messages.Decode():
            return _encode_decode(message)
        case messages.RunFinished(run_id, choices, spans, taps, loaded):
            flags, column = _encode_taps(taps)
            return _frame(messages.Op.RUN_FINISHED, _encode_spans(spans), _encode_choices(choices),
                          *column, flags=flags, run_id=run_id, n_rows=len(choices),
                          n_ids=loaded, n_spans=len(spans))
        case messages.Part(member, number, run_id, place, verdict, data):
            flags = verdict | (0 if data.dtype == _FLOAT else _SHORT)
            return _HEADER.pack(MAGIC, VERSION, _PART, flags, run_id, number, member, 0, place,
                                data.size, data.nbytes, 0) + data.tobytes()
        case messages.RunCancelled(run_id, spans):
            return _frame(messages.Op.RUN_CANCELLED, _encode_spans(spans), run_id=run_id,
                          n_spans=len(spans))
        case messages.CacheOps(ops, saves):
            return _frame(messages.Op.CACHE_OPS, _ops_array(ops).tobytes(),
                          *_encode_pieces(saves, (), 0), n_ops=len(ops),
                          flags=_PIECES if saves else 0)
        case messages.ShardChunk(offset, chunk):
            return _frame(messages.Op.SHARD_CHUNK, chunk, run_id=offset)
        case FeedDraft(lane, index, rows):
            flags, column = _encode_taps(rows)
            return _frame(messages.Op.FEED_DRAFT, *column, flags=flags, run_id=index,
                          parent_id=lane)
    if isinstance(message, messages.ControlMessage):
        return _frame(messages.Op.CONTROL, pack(message))
    raise ProtocolError(f"cannot encode {type(message).__name__}")


def decode(frame: bytes | bytearray | memoryview) -> messages.Message:
    """Return the message in `frame`; its arrays are views into the frame.

    Raises ProtocolError for a damaged frame and for another protocol version.
    """
    view = memoryview(frame)
    if len(view) < HEADER_BYTES:
        raise ProtocolError(f"a frame of {len(view)} bytes is shorter than its header")
    (magic, version, op, flags, run_id, parent_id, n_rows, n_ids, n_ops, d, size, n_spans
     ) = _HEADER.unpack_from(view)
    if magic != MAGIC or flags > _FLAGS:
        raise ProtocolError("a frame does not start with pipeinfer's header")
    if version != VERSION:
        raise ProtocolError(
            f"a message of protocol version {version} arrived, this rank speaks {VERSION}: install "
            "the same pipeinfer on every host"
        )
    body = view[HEADER_BYTES:]
    if len(body) != size or max(n_rows, n_ids, n_ops, d, n_spans) > _MAX_COUNT:
        raise ProtocolError(f"a frame announces {size} bytes and carries {len(body)}")
    if op == _PART:  # first, because about two hundred such frames arrive per token
        if size != d * (2 if flags & _SHORT else 4) or n_ids or n_spans or flags > 7:
            raise ProtocolError(f"a part of a sum announces {d} numbers in {size} bytes")
        return messages.Part(n_rows, parent_id, run_id, n_ops, _VERDICTS[flags & 3],
                    np.frombuffer(body, _HALF if flags & _SHORT else _FLOAT))
    reader = _Reader(body)
    spans = _read_spans(reader, run_id, n_spans) if n_spans else ()
    message: messages.Message
    match op:
        case messages.Op.DECODE:
            message = _decode_decode(
                reader, flags, run_id, parent_id, (n_rows, n_ids, n_ops, d), spans
            )
        case messages.Op.CACHE_OPS:
            message = messages.CacheOps(_read_ops(reader, n_ops),
                                        _read_pieces(reader, run_id, flags)[0])
        case messages.Op.RUN_FINISHED:
            choices = _decode_choices(reader, n_rows)
            message = messages.RunFinished(run_id, choices, spans, _read_taps(reader, flags), n_ids)
        case messages.Op.RUN_CANCELLED:
            message = messages.RunCancelled(run_id, spans)
        case messages.Op.SHARD_CHUNK:
            message = messages.ShardChunk(run_id, reader.rest())
        case messages.Op.FEED_DRAFT:
            tapped = _read_taps(reader, flags)
            if tapped is None or run_id < 0:
                raise ProtocolError("rows for a prediction head came without rows or index")
            message = FeedDraft(parent_id, run_id, tapped)
        case messages.Op.CONTROL:
            message = unpack_by(_control, reader.rest())
        case _:
            raise ProtocolError(f"unknown operation {op}")
    reader.finish()
    return message


def check_decode(
    run: messages.Decode, n_seq: int, n_positions: int, n_tokens: int | None = None,
    width: int | None = None, lanes: Collection[int] | None = None,
) -> None:
    """Raise ProtocolError for a run that this stage cannot evaluate.

    run: the run
    n_seq: sequence ids have to be below this
    n_positions: positions have to be below this
    n_tokens: tokens have to be below this (the vocabulary and learned masks); None: unchecked
    width: elements of the activations, which have to be there unless the run is skipped; None:
        unchecked
    lanes: the open lanes; None: unchecked
    Costs a few microseconds for a few rows.
    """
    rows, n = run.rows, len(run.rows)
    for ids in (rows.seq_ids, rows.views or ()):
        flat = list(itertools.chain.from_iterable(ids))
        if flat and (min(flat) < 0 or max(flat) >= n_seq):
            raise ProtocolError(f"run {run.run_id} has rows of a sequence id outside 0 to "
                                f"{n_seq - 1}")
    if n:
        tokens, positions, _ = rows.lists
        if min(positions) < 0 or max(positions) >= n_positions:
            raise ProtocolError(f"run {run.run_id} has a row outside {n_positions} positions")
        if n_tokens is not None and rows.media is None and (
                min(tokens) < 0 or max(tokens) >= n_tokens):
            raise ProtocolError(f"run {run.run_id} has a token outside {n_tokens} ids")
        if lanes is not None and not all(lane in lanes for lane in set(run.lanes)):
            raise ProtocolError(f"run {run.run_id} has rows of a lane that is not open")
    check_pieces((*run.saves, *run.loads), n_seq, n_positions)
    if width is not None and not run.skipped and not run.loads and (
            run.hidden is None or run.hidden.shape[1] != width):
        raise ProtocolError(f"run {run.run_id} came without activations of {width} elements")
    if run.ops:
        check_ops(run.ops, n_seq)


def check_ops(ops: tuple[SeqOp, ...], n_seq: int) -> None:
    """Raise ProtocolError for an operation on a sequence id outside 0 to `n_seq - 1`."""
    for op in ops:
        match op:
            case SeqRemove(seq_id, p0, _):
                good = ALL_SEQS <= seq_id < n_seq and p0 >= 0
            case SeqCopy(src, dst, p0, _):
                good = 0 <= src < n_seq and 0 <= dst < n_seq and p0 >= 0
            case SeqKeep(seq_id):
                good = 0 <= seq_id < n_seq
            case SeqJoin(src, dst, order):
                good = 0 <= src < n_seq and 0 <= dst < n_seq and order > 0
        if not good:
            raise ProtocolError(f"an operation outside {n_seq} sequences: {op}")


def check_pieces(pieces: tuple[messages.Piece, ...], n_seq: int, n_positions: int) -> None:
    """Raise ProtocolError for a piece outside so many sequences and positions."""
    for one in pieces:
        if not (0 <= one.seq_id < n_seq and 0 <= one.start < one.stop <= n_positions):
            raise ProtocolError(f"a piece of cells outside {n_seq} sequences of {n_positions} "
                                f"positions: {one}")


def _encode_spans(spans: messages.Spans) -> bytes:
    flat = [value for span in spans for value in span]
    if len(flat) != 3 * len(spans):
        raise ProtocolError(f"timings (spans) are not three of each stage: {spans}")
    return struct.pack(f"<{len(flat)}d", *flat)


def _read_spans(reader: _Reader, run_id: int, count: int) -> messages.Spans:
    values = reader.array("<f8", 3 * count).tolist()
    for value in values:
        if not 0.0 <= value < _MAX_SECONDS:
            raise ProtocolError(f"run {run_id} claims to have taken {value} seconds, which is "
                                "impossible")
    return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


class _Reader:
    """Reads columns from a body in order, never past its end."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or self._at + count > len(self._body):
            raise ProtocolError("a frame's columns reach past its end")
        part = self._body[self._at : self._at + count]
        self._at += count
        return part

    def rest(self) -> memoryview:
        return self.take(len(self._body) - self._at)

    def array(self, dtype: Any, count: int) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize * count), dtype)

    def finish(self) -> None:
        if self._at != len(self._body):
            raise ProtocolError(f"a frame has {len(self._body) - self._at} bytes too many")


def _frame(
    op: messages.Op, *body: bytes | memoryview, flags: int = 0, run_id: int = messages.NO_RUN,
    parent_id: int = messages.NO_RUN, n_rows: int = 0, n_ids: int = 0, n_ops: int = 0, d: int = 0,
    n_spans: int = 0,
) -> bytes:
    size = sum(len(part) for part in body)
    if size > _MAX_PAYLOAD:
        raise ProtocolError(f"a message of {size} bytes is over the limit of {_MAX_PAYLOAD}")
    header = _HEADER.pack(MAGIC, VERSION, op, flags, run_id, parent_id, n_rows, n_ids,
                          n_ops, d, size, n_spans)
    return b"".join((header, *body))


def _encode_decode(m: messages.Decode) -> bytes:
    rows, n = m.rows, len(m.rows)
    ids = [i for group in rows.seq_ids for i in group]
    offsets = [0, *itertools.accumulate(map(len, rows.seq_ids))]
    flags = (_SKIPPED if m.skipped else 0) | (_SPECULATIVE if m.speculative else 0)
    parts: list[bytes | memoryview] = [
        _encode_spans(m.spans),
        np.asarray(rows.tokens, "<i4").tobytes(), np.asarray(rows.positions, "<i4").tobytes(),
        np.asarray(m.lanes, "<i4").tobytes(), np.array(offsets + ids, "<i4").tobytes(),
        _ops_array(m.ops).tobytes() if m.ops else b"",
        rows.outputs.tobytes() + bytes(-n % 4),
    ]
    if rows.views is not None:
        flags |= _VIEWS
        seen = [i for group in rows.views for i in group]
        parts.append(np.array([0, *itertools.accumulate(map(len, rows.views)), *seen],
                              "<i4").tobytes())
    if (media := rows.media) is not None:
        flags |= _MEDIA
        parts.append(np.array([media.n_pos, media.causal, media.offset, media.total or n,
                               media.places is not None], "<i4").tobytes())
        if media.places is not None:
            parts.append(np.asarray(media.places, "<i4").tobytes())
    d = 0
    if m.hidden is not None:
        if m.hidden.shape[0] != n:
            raise ProtocolError(f"a message has {m.hidden.shape[0]} activations for {n} rows")
        flags |= _HIDDEN
        d = m.hidden.shape[1]
        hidden: Any = np.ascontiguousarray(m.hidden, "<f4")
        parts.append(memoryview(hidden).cast("B") if hidden.size else b"")
    tapped, column = _encode_taps(m.taps)
    flags |= tapped
    parts += column
    if column := _encode_pieces(m.saves, m.loads, m.loaded):
        flags |= _PIECES
        parts += column
    return _frame(messages.Op.DECODE, *parts, flags=flags, run_id=m.run_id,
                  parent_id=m.parent_id, n_rows=n, n_ids=len(ids), n_ops=len(m.ops), d=d,
                  n_spans=len(m.spans))


def _decode_decode(
    reader: _Reader, flags: int, run_id: int, parent_id: int,
    counts: tuple[int, int, int, int], spans: messages.Spans,
) -> messages.Decode:
    n, n_ids, n_ops, d = counts
    tokens, positions, lanes = reader.array("<i4", 3 * n).reshape(3, n)
    numbers = reader.array("<i4", n + 1 + n_ids).tolist()
    offsets, ids = numbers[: n + 1], numbers[n + 1 :]
    if offsets[0] != 0 or offsets[-1] != n_ids or any(
        b <= a for a, b in itertools.pairwise(offsets)
    ):
        raise ProtocolError(f"run {run_id} has rows without sequence ids")
    ops = _read_ops(reader, n_ops) if n_ops else ()
    outputs = reader.array("u1", n + -n % 4)[:n].astype(np.bool_)
    views = _read_views(reader, run_id, n) if flags & _VIEWS else None
    media = _read_media(reader, run_id, n) if flags & _MEDIA else None
    hidden = None
    if flags & _HIDDEN:
        hidden = reader.array("<f4", n * d).reshape(n, d)
    seq_ids = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(offsets))
    taps = _read_taps(reader, flags)
    if taps is not None and len(taps) != n:
        raise ProtocolError(f"run {run_id} has {len(taps)} tapped rows for {n} rows")
    saves, loads, loaded = _read_pieces(reader, run_id, flags)
    return messages.Decode(
        run_id, parent_id, Rows(tokens, positions, seq_ids, outputs, views, media),
        tuple(lanes.tolist()), ops,
        speculative=bool(flags & _SPECULATIVE), skipped=bool(flags & _SKIPPED),
        hidden=hidden, spans=spans, taps=taps, saves=saves, loads=loads, loaded=loaded,
    )


def _encode_pieces(saves: tuple[messages.Piece, ...], loads: tuple[messages.Piece, ...],
                   loaded: int) -> list[bytes]:
    """The column of pieces of cells; nothing without any."""
    if not (saves or loads):
        return []
    return [np.array([len(saves), len(loads), loaded], "<i4").tobytes(), np.array(
        [(one.key, one.seq_id, one.start, one.stop, one.state) for one in (*saves, *loads)],
        _PIECE).tobytes()]


def _read_pieces(reader: _Reader, run_id: int, flags: int) -> tuple[
        tuple[messages.Piece, ...], tuple[messages.Piece, ...], int]:
    if not flags & _PIECES:
        return (), (), 0
    n_saves, n_loads, loaded = reader.array("<i4", 3).tolist()
    if not (0 <= n_saves <= _MAX_COUNT and 0 <= loaded <= n_loads <= _MAX_COUNT):
        raise ProtocolError(f"run {run_id} announces {n_saves} pieces to save and {loaded} of "
                            f"{n_loads} to load")
    pieces = tuple(messages.Piece(key, seq_id, start, stop, bool(state)) for
                   key, seq_id, start, stop, state in reader.array(
                       _PIECE, n_saves + n_loads).tolist())
    return pieces[:n_saves], pieces[n_saves:], loaded


def _encode_taps(taps: npt.NDArray[Any] | None) -> tuple[int, list[bytes]]:
    """The flags and columns of inputs of layers."""
    if taps is None:
        return 0, []
    half = taps.dtype == np.float16
    return _TAPS | (_HALF_TAPS if half else 0), [
        np.array(taps.shape, "<i4").tobytes(),
        np.ascontiguousarray(taps, "<f2" if half else "<f4").tobytes()]


def _read_taps(reader: _Reader, flags: int) -> npt.NDArray[Any] | None:
    if not flags & _TAPS:
        return None
    n, width = reader.array("<i4", 2).tolist()
    if not (0 <= n <= _MAX_COUNT and 0 <= width <= _MAX_COUNT):
        raise ProtocolError(f"a frame announces {n} rows of {width} tapped elements")
    flat: npt.NDArray[Any] = reader.array("<f2" if flags & _HALF_TAPS else "<f4", n * width)
    return flat.reshape(n, width)


def _read_views(reader: _Reader, run_id: int, n: int) -> tuple[tuple[int, ...], ...]:
    offsets = reader.array("<i4", n + 1).tolist()
    if offsets[0] != 0 or any(b <= a for a, b in itertools.pairwise(offsets)):
        raise ProtocolError(f"run {run_id} has rows whose tree shows them no sequence id")
    ids = reader.array("<i4", offsets[-1]).tolist()
    return tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(offsets))


def _read_media(reader: _Reader, run_id: int, n: int) -> Media:
    n_pos, causal, offset, total, placed = reader.array("<i4", 5).tolist()
    places = reader.array("<i4", 3 * n).reshape(3, n) if placed else None
    if not (0 < n_pos <= _MAX_COUNT and 0 <= offset < offset + n <= total <= _MAX_COUNT):
        raise ProtocolError(f"run {run_id} has rows {offset} to {offset + n} of a picture of "
                            f"{total} rows and {n_pos} positions")
    if places is not None and (places.min() < 0 or places.max() > total):
        raise ProtocolError(f"run {run_id} has rows of a picture that stand outside of it")
    return Media(n_pos, bool(causal), places, offset=offset, total=total)


def _ops_array(ops: tuple[SeqOp, ...]) -> Any:
    table = np.zeros((len(ops), 5), "<i4")
    for row, op in zip(table, ops, strict=True):
        match op:
            case SeqRemove(seq_id, p0, p1):
                row[:] = 0, seq_id, 0, p0, p1
            case SeqCopy(src, dst, p0, p1):
                row[:] = 1, src, dst, p0, p1
            case SeqKeep(seq_id):
                row[:] = 2, seq_id, 0, 0, 0
            case SeqJoin(src, dst, order):
                row[:] = 3, src, dst, order, 0
    return table


def _read_ops(reader: _Reader, count: int) -> tuple[SeqOp, ...]:
    ops: list[SeqOp] = []
    for kind, a, b, p0, p1 in reader.array("<i4", 5 * count).reshape(count, 5).tolist():
        match kind:
            case 0:
                ops.append(SeqRemove(a, p0, p1))
            case 1:
                ops.append(SeqCopy(a, b, p0, p1))
            case 2:
                ops.append(SeqKeep(a))
            case 3:
                ops.append(SeqJoin(a, b, p0))
            case _:
                raise ProtocolError(f"unknown sequence operation {kind}")
    return tuple(ops)


def _encode_choices(choices: tuple[Choice, ...]) -> bytes:
    head = np.array([
            (c.token, len(c.top), math.nan if c.logprob is None else c.logprob)
            for c in choices
        ], _CHOICE)
    top = np.array([(i, 0, p) for c in choices for i, p in c.top], _TOP)
    return head.tobytes() + top.tobytes()


def _decode_choices(reader: _Reader, count: int) -> tuple[Choice, ...]:
    choices = []
    for token, n_top, logprob in reader.array(_CHOICE, count).tolist():
        if not 0 <= n_top <= _MAX_COUNT:
            raise ProtocolError(f"a choice announces an impossible number of alternatives: {n_top}")
        choices.append((token, n_top, logprob))
    return tuple(
        Choice(token, None if math.isnan(logprob) else logprob,
               tuple((i, p) for i, _, p in reader.array(_TOP, n_top).tolist()))
        for token, n_top, logprob in choices
    )
