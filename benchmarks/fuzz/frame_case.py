"""Frames between nodes: valid ones of every operation, with bytes, counts and JSON bodies changed.

A case is decoded, held against the sizes of a stage, and encoded again; decoding may not take
memory beyond a multiple of the frame.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.fuzz.mutate import INTEGERS, change_bytes, change_value
from benchmarks.fuzz.runner import Kind
from pipeinfer.core import codec as p
from pipeinfer.core import control, messages
from pipeinfer.core.drafting import StartDraft
from pipeinfer.core.types import (
    Choice,
    Rows,
    SamplingParams,
    SeqCopy,
    SeqJoin,
    SeqKeep,
    SeqRemove,
    make_rows,
)
from pipeinfer.errors import ProtocolError
from pipeinfer.server import frames

_HEADER = "<4sBBHqqIIIIII"
_FIELDS = 12
N_SEQ, N_CTX, N_TOKENS, WIDTH = 8, 64, 100, 4
_MEMORY = 64  #: bytes of memory per byte of a frame


@functools.cache
def seeds() -> tuple[bytes, ...]:
    """Frames of every operation."""
    rows = make_rows([(1, 2, (0,), True), (3, 3, (0, 5), False), (99, 63, (7,), True)])
    seen = Rows(rows.tokens, rows.positions, rows.seq_ids, rows.outputs, ((0, 7), (5,), (1,)))
    ops = (SeqRemove(-1, 0), SeqCopy(0, 3, 0, 9), SeqKeep(2), SeqJoin(1, 2))
    spans = ((1.7e9, 0.25, 0.0), (1.7e9 + 1, 0.0, 0.1))
    lanes = (1, 1, 2)
    hidden = np.arange(12, dtype=np.float32).reshape(3, 4)
    params = SamplingParams(0.8, 40, 0.95, 0.05, 1.1, 0.5, 0.5, 64, ((5, 1.0), (7, -2.0)), 2**63, 3,
                            "start: /a+/", 9, ((1, -1, 5),))
    return tuple(p.encode(m) for m in (
        messages.Decode(5, 4, rows, lanes, ops, True, False, None, spans),
        messages.Decode(6, -1, seen, lanes, (), False, False, hidden, spans),
        messages.Decode(7, 6, rows, lanes, ops, True, True),
        messages.CacheOps(ops), messages.LaneOpen(1, params),
        messages.LaneOpen(2, SamplingParams()),
        messages.LaneClose(1),
        messages.Shutdown(),
        messages.RunFinished(5, (Choice(4), Choice(5, -0.5, ((5, -0.5), (6, -1.0)))), spans),
        messages.RunCancelled(6, spans), messages.Cancel((1, 2, 3)),
        messages.Part(1, 7, 5, 3, messages.Verdict.GO, hidden.ravel()),
        messages.Part(0, 8, 5, 3, messages.Verdict.GO, np.arange(5, dtype=np.uint16)),
        messages.Part(0, 9, 6, 0, messages.Verdict.STOP, np.zeros(0, np.float32)),
        control.SumRegion("pipeinfer-sums-0"),
        messages.WorkerFailed(2, "host", 5, "ValueError: x", "Traceback ...", 6),
        control.Progress(control.PortName(1), "loading", 1, 2),
        control.Report(control.PortName(1), (0, 4), 1, 2, 1.0, 0.5, 0.1, 0.2, 0.0, 9,
                       {"computed": 2}, 3.5, 77, [(1, 0.5, 1.0, "computed", 4)],
                       {"host": "a", "memory": {"own": 1.5}}),
        control.ShardOffer("a.gguf", 5),
        control.RollCall(3), control.Standing(control.PortName(2), 3, 7, 1.5),
        messages.ShardHave(1, 4096, bytes(32)), messages.ShardChunk(4096, bytes(range(200))),
        messages.ShardEnd(bytes(32)),
        StartDraft(3, 1, (4, 5), 9, (6,), SamplingParams(), 4, 4, 1, 0.1, 0.2, frozenset({2})),
    ))


def make(draw: random.Random) -> bytes:
    """A frame with changes; some of them frames of the HTTP process's link."""
    if draw.random() < 0.1:
        return _link_frame(draw)
    frame = draw.choice(seeds())
    for _ in range(draw.choice((1, 1, 2, 3))):
        frame = _change(draw, frame)
    return b"P" + (_resized(frame) if draw.random() < 0.6 else frame)


def _change(draw: random.Random, frame: bytes) -> bytes:
    act = draw.random()
    if act < 0.35 and len(frame) >= p.HEADER_BYTES:
        fields = list(struct.unpack_from(_HEADER, frame))
        at = draw.randrange(1, _FIELDS)
        size = struct.calcsize("<" + _HEADER[2 + at])
        number = draw.choice((*INTEGERS, fields[at] + 1, fields[at] - 1, *range(14)))
        raw = bytearray(frame)
        start = struct.calcsize("<" + _HEADER[1 : 2 + at])
        raw[start : start + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        return bytes(raw)
    if act < 0.5 and frame[5:6] == bytes([messages.Op.CONTROL]):
        try:
            body = json.loads(frame[p.HEADER_BYTES :])
        except (ValueError, RecursionError):
            return frame
        changed = json.dumps(change_value(draw, body))
        if draw.random() < 0.1:
            changed = changed.replace(":", ":" + "[" * draw.choice((10, 100_000)), 1)
        return frame[: p.HEADER_BYTES] + changed.encode("utf-8", "surrogatepass")
    return change_bytes(draw, frame, 0 if act < 0.6 else p.HEADER_BYTES)


def _resized(frame: bytes) -> bytes:
    """The frame with its own length in the header, so that what is inside gets looked at."""
    if len(frame) < p.HEADER_BYTES:
        return frame
    at = struct.calcsize(_HEADER[:-2])
    return frame[:at] + struct.pack("<I", len(frame) - p.HEADER_BYTES) + frame[at + 4 :]


def _link_frame(draw: random.Random) -> bytes:
    value = change_value(draw, draw.choice((
        {"op": "submit", "id": 5, "prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": False,
         "params": {"temperature": 0.5, "logit_bias": [[4, -1.0]], "key": 7}},
        {"op": "news", "items": [["t", 5, 7, True, -0.5, [[7, -0.5]], "\xe9"],
                                 ["end", 5, "stop", {"runs": 3}], ["error", 6, "request", "x"]]},
    )))
    try:
        raw = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):  # what msgpack cannot say
        raw = json.dumps(value).encode("utf-8", "surrogatepass")
    if draw.random() < 0.3:
        raw = change_bytes(draw, raw)
    if draw.random() < 0.05:
        raw = b"\x91" * 100_000  # arrays in arrays
    size = draw.choice((len(raw), len(raw), len(raw), *INTEGERS)) % 2**32
    return b"L" + struct.pack(">I", size) + raw


def examine(data: bytes, directory: Path) -> str:
    """Decode, hold against a stage's sizes, encode."""
    del directory
    tracemalloc.start()
    try:
        return _examine(data[:1], data[1:])
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < _MEMORY * len(data) + (1 << 20), f"{peak} bytes for a frame of {len(data)}"


def _examine(kind: bytes, data: bytes) -> str:
    if kind == b"L":
        reader: frames.FrameReader[Any] = frames.FrameReader(
            {**frames.FROM_ENGINE, **frames.FROM_CLIENT})
        return f"link: {len(reader.feed(data))}"
    message = p.decode(data)
    if isinstance(message, messages.Decode):
        p.check_decode(message, N_SEQ, N_CTX, N_TOKENS,
                       None if message.hidden is None else WIDTH, {1, 2})
        assert int(message.rows.tokens.max(initial=0)) < N_TOKENS
    elif isinstance(message, messages.CacheOps):
        p.check_ops(message.ops, N_SEQ)
    p.encode(message)
    return type(message).__name__


KIND = Kind("frames", make, examine, lambda: len(seeds()), ProtocolError)
