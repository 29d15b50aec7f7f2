"""The supervisor's orders to the HTTP process that outlives the job, and their answers: JSON lines.
An answer has the `number` of its order.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from pipeinfer.errors import ProtocolError


class _Order(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True,
             kw_only=True):
    """number: of the order; its answer has the same one."""

    number: int = 0


class Look(_Order, frozen=True):
    """Change nothing; as every answer, that to this order has the state."""


class Hold(_Order, frozen=True):
    """Let new requests wait while running ones continue; or admit them again."""

    on: bool


class Move(_Order, frozen=True):
    """Prepare for the end of the engine: another one will connect.

    why: for clients.
    new_model: whether it may have another model under the same name.
    """

    why: str
    new_model: bool


Order: TypeAlias = Look | Hold | Move
MOST_LINE = 64 << 20  #: bytes of an order or an answer


class ServerState(Struct, frozen=True, kw_only=True):
    """The state of the HTTP process after an order. Without any field: no answer has come.

    state: "" without an answer. reason: why the engine failed. url: the address for clients.
    open: requests that have not ended. waiting: those that wait for admission.
    model, name: path and name of the served model. lost: the job's ranks that have died.
    error: why the order was not executed.
    """

    number: int = 0
    state: str = ""
    reason: str = ""
    url: str = ""
    open: int = 0
    waiting: int = 0
    model: str = ""
    name: str = ""
    lost: tuple[int, ...] = ()
    error: str = ""


_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answers = msgspec.json.Decoder(ServerState)
_encoder = msgspec.json.Encoder()


class _Number(Struct, frozen=True):
    number: int = 0


_numbers = msgspec.json.Decoder(_Number)


def encode(order: Order, number: int) -> bytes:
    """Return the line of an order under this number."""
    return _encoder.encode(msgspec.structs.replace(order, number=number)) + b"\n"


def decode(line: bytes) -> Order:
    """Return the order in a line. Raises ProtocolError."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no such order: {error}") from error


def encode_answer(answer: ServerState) -> bytes:
    """Return the line of an answer."""
    return _encoder.encode(answer) + b"\n"


def decode_answer(line: bytes) -> ServerState:
    """Return the answer in a line. Raises ProtocolError."""
    try:
        return _answers.decode(line)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"no such answer: {error}") from error


def number_of(line: bytes) -> int:
    """Return the number of a malformed order, 0 if that cannot be read either."""
    try:
        return _numbers.decode(line).number
    except msgspec.DecodeError:
        return 0
