"""What rank 0 and the HTTP process say to each other: one class per frame, and their bytes.

A frame is a length (4 bytes, big-endian) and a JSON object with its fields under "op", its name;
tokens, of which there are many, are lists. What is not of this form is refused with the name of
the field. Knows what is said, neither sockets nor who acts on it.
"""

from __future__ import annotations

import json
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct, field, structs

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import ProtocolError
from pipeinfer.server.settings import Settings
from pipeinfer.strategies.decomposers.base import Specification

HEADER = struct.Struct(">I")
MAX_FRAME = 64 << 20  #: bytes of the longest frame
T = TypeVar("T")

# --- from rank 0 ------------------------------------------------------------------------------


class Loading(Struct, frozen=True):
    """How far the stages are: by name, as /health shows it."""

    op: ClassVar[str] = "loading"
    stages: dict[str, Any]


class Ready(Struct, frozen=True):
    """Requests are taken. facts: what is served by whom, as /props shows it."""

    op: ClassVar[str] = "ready"
    facts: dict[str, Any]


class Changed(Struct, frozen=True):
    """Other stages have taken over; facts from now on."""

    op: ClassVar[str] = "changed"
    facts: dict[str, Any]
    message: str


class Token(Struct, frozen=True):
    """An output token of request `id`. top: the likeliest tokens with their log-probabilities.
    seen: what the reader sees of it, None for its own text."""

    id: int
    token: int
    speculated: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    seen: bytes | None = None


class Ended(Struct, frozen=True):
    """The end of request `id`. reason: stop, length, context, or that of an abort."""

    id: int
    reason: str
    stats: dict[str, Any] = field(default_factory=dict)


class Refused(Struct, frozen=True):
    """Request `id` ends without an answer. kind: one of those in `errors.for_failure`."""

    id: int
    kind: str
    message: str


NewsItem: TypeAlias = Token | Ended | Refused


class News(Struct, frozen=True):
    """What has come out, of any requests, in order."""

    op: ClassVar[str] = "news"
    items: tuple[NewsItem, ...]


class Status(Struct, frozen=True):
    """The scheduler's figures at a time (seconds since 1970)."""

    op: ClassVar[str] = "status"
    time: float
    figures: dict[str, Any]


class Runs(Struct, frozen=True):
    """Runs that have gone through the pipeline, for those who watch it."""

    op: ClassVar[str] = "runs"
    items: tuple[dict[str, Any], ...]


class Rebalanced(Struct, frozen=True):
    """What came of the Rebalance of this id. stages: of a preview, as in the facts of Ready."""

    op: ClassVar[str] = "rebalanced"
    id: int
    changed: bool
    message: str
    stages: tuple[dict[str, Any], ...] = ()
    gain: float = 1.0


class Draining(Struct, frozen=True):
    """No request is taken any more; those that run get so many seconds."""

    op: ClassVar[str] = "draining"
    seconds: float


class Failed(Struct, frozen=True):
    """The job cannot go on, and the server says why."""

    op: ClassVar[str] = "failed"
    message: str


class Bye(Struct, frozen=True):
    """The last frame of a job that ends as it should."""

    op: ClassVar[str] = "bye"


# --- from the HTTP process --------------------------------------------------------------------


class Welcome(Struct, frozen=True):
    """The first frame of an HTTP process that was there before rank 0. url: where it listens; empty
    when it wants a listening socket along with its settings."""

    op: ClassVar[str] = "welcome"
    url: str = ""


class Submit(Struct, frozen=True):
    """A request under an id of its own. prompt: token ids; decompose: for a response in threads;
    output: tokens that an earlier rank 0 has brought, and that do not come again; pool: whose other
    answers it may be guessed from, 0 for nobody's."""

    op: ClassVar[str] = "submit"
    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    ignore_eos: bool = False
    decompose: Specification | None = None
    output: tuple[int, ...] = ()
    pool: int = 0


class Abort(Struct, frozen=True):
    """Nobody waits for this request any more."""

    op: ClassVar[str] = "abort"
    id: int
    reason: str


class Watch(Struct, frozen=True):
    """Somebody watches the pipeline, or nobody any more."""

    op: ClassVar[str] = "watch"
    on: bool


class Rebalance(Struct, frozen=True):
    """A client asks to redistribute the layers; or, for a preview, what that would change."""

    op: ClassVar[str] = "rebalance"
    id: int
    preview: bool = False


EngineFrame: TypeAlias = (
    Loading | Ready | Changed | News | Status | Runs | Rebalanced | Draining | Failed | Bye)
ClientFrame: TypeAlias = Submit | Abort | Watch | Rebalance
Kinds: TypeAlias = Mapping[str, type[T]]

FIRST: Kinds[Settings] = {Settings.op: Settings}
GREETING: Kinds[Welcome] = {Welcome.op: Welcome}
FROM_ENGINE: Kinds[EngineFrame] = {kind.op: kind for kind in typing.get_args(EngineFrame)}
FROM_CLIENT: Kinds[ClientFrame] = {kind.op: kind for kind in typing.get_args(ClientFrame)}

# --- bytes ------------------------------------------------------------------------------------

_TOKEN, _ENDED, _REFUSED = "t", "end", "error"  #: what a list among the news begins with


def encode(frame: Settings | EngineFrame | ClientFrame | Welcome) -> bytes:
    """The bytes of one frame. Raises ProtocolError when it is too long."""
    body = json.dumps({"op": frame.op, **_fields(frame)}, separators=(",", ":"),
                      default=_plain).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes, kinds: Kinds[T]) -> T:
    """The frame in a body, one of `kinds`. Raises ProtocolError that names the damaged field."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from error
    op = data.pop("op", None) if isinstance(data, dict) else None
    if not isinstance(op, str) or op not in kinds:
        raise ProtocolError(f"a frame has an unknown op (known: {', '.join(kinds)}): "
                            f"{str(op)[:40]!r}")
    made: T = _read(kinds[op], data, op)
    return made


class FrameReader(Generic[T]):
    """Cuts a stream of bytes into frames."""

    def __init__(self, kinds: Kinds[T]) -> None:
        self._kinds = kinds
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The frames that are complete with `data`. Raises ProtocolError."""
        self._bytes += data
        out: list[T] = []
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._bytes, start)
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame announces {size} bytes, more than {MAX_FRAME}")
            end = start + HEADER.size + size
            if len(self._bytes) < end:
                break
            out.append(decode(bytes(self._bytes[start + HEADER.size : end]), self._kinds))
            start = end
        del self._bytes[:start]
        return out


def _fields(value: Any) -> dict[str, Any]:
    return structs.asdict(value)


def _plain(value: Any) -> Any:
    """What JSON can carry of an object inside a frame."""
    match value:
        case Token(request, token, speculated, logprob, top, seen):
            return [_TOKEN, request, token, speculated, logprob, top,
                    None if seen is None else seen.decode("latin-1")]
        case Ended(request, reason, stats):
            return [_ENDED, request, reason, stats]
        case Refused(request, kind, message):
            return [_REFUSED, request, kind, message]
        case SamplingParams():
            return {name: v for name, v in _fields(value).items() if v != _DEFAULTS[name]}
        case _:
            return _fields(value)


_DEFAULTS = _fields(SamplingParams())
_ROWS: dict[str, type[NewsItem]] = {_TOKEN: Token, _ENDED: Ended, _REFUSED: Refused}


def _read(kind: type[Any], data: dict[str, Any], where: str) -> Any:
    """A struct from its fields. Raises ProtocolError."""
    hints = _hints(kind)
    if unknown := data.keys() - hints.keys():
        raise ProtocolError(f"{where}: unknown field {min(unknown)[:40]!r}")
    if missing := _required(kind) - data.keys():
        raise ProtocolError(f"{where}.{min(missing)} is missing")
    return kind(**{name: _check(hints[name], value, f"{where}.{name}")
                   for name, value in data.items()})


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a struct's fields. Msgspec resolves annotations anew for each call, which takes
    longer than all the rest of a frame."""
    return {f.name: f.type for f in structs.fields(kind)}


@cache
def _required(kind: type[Any]) -> frozenset[str]:
    """Names of the fields without a default."""
    return frozenset(f.name for f in structs.fields(kind) if f.required)


def _check(hint: Any, value: Any, where: str) -> Any:
    """A field's value as its type says. Raises ProtocolError naming the field."""
    if hint is Any or (type(value) is hint and hint in (int, str, bool, float)):
        return value
    if hint is float and type(value) is int:
        return value
    if hint is bytes and isinstance(value, str):
        return _bytes(value, where)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _check(inner[0], value, where)
    if origin is dict and isinstance(value, dict):
        return value
    if isinstance(hint, type) and issubclass(hint, Struct) and isinstance(value, dict):
        return _read(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return _tuple(inner, value, where)
    raise _wrong(value, _name(hint), where)


def _tuple(inner: Sequence[Any], value: list[Any], where: str) -> tuple[Any, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        if inner[0] is int and set(map(type, value)) <= {int}:  # long prompts
            return tuple(value)
        if inner[0] == NewsItem:
            return tuple(_row(v, where, i) for i, v in enumerate(value))
        return tuple(_check(inner[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if len(inner) != len(value):
        raise ProtocolError(f"{where} has {len(value)} parts, not {len(inner)}")
    return tuple(_check(h, v, f"{where}[{i}]")
                 for i, (h, v) in enumerate(zip(inner, value, strict=True)))


def _row(value: Any, where: str, index: int) -> NewsItem:
    match value:  # what most tokens look like, without the way through the types
        case ["t", int(request), int(token), bool(speculated), float() | None as logprob, [], None
              ] if not isinstance(request, bool) and not isinstance(token, bool):
            return Token(request, token, speculated, logprob)
    where = f"{where}[{index}]"
    name = value[0] if isinstance(value, list) and value else None
    kind = _ROWS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _wrong(value, "an event", where)
    hints = _hints(kind)
    if len(value) != len(hints) + 1:
        raise ProtocolError(f"{where} has {len(value)} parts, not {len(hints) + 1}")
    return kind(*(_check(hint, v, f"{where}.{name}")
                  for v, (name, hint) in zip(value[1:], hints.items(), strict=True)))


def _bytes(text: str, where: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ProtocolError(f"{where} is not a text of bytes") from None


def _wrong(value: Any, wanted: str, where: str) -> ProtocolError:
    found = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
    return ProtocolError(f"{where} is {found}, not {wanted}")


def _name(hint: Any) -> str:
    """A type in words of JSON."""
    words = {tuple: "a list", str: "a text", bytes: "a text", int: "a whole number",
             float: "a number", bool: "true or false"}
    return words.get(typing.get_origin(hint) or hint, "an object")
