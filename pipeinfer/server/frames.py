"""The messages between rank 0 and the HTTP process: one class per frame, and their encoding.

A frame is a length (4 bytes, big-endian) and a msgpack map of its fields, with its name under "op".
Tokens, of which there are many, are arrays.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, Union

import msgspec
import numpy as np
from msgspec import Struct, field

from pipeinfer.core.types import Media, SamplingParams
from pipeinfer.errors import ProtocolError
from pipeinfer.server.settings import Settings
from pipeinfer.strategies.decomposers.base import Specification

HEADER = struct.Struct(">I")
MAX_FRAME = 512 << 20  #: bytes of the longest frame, with the rows of a context of pictures
T = TypeVar("T")


class Frame(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """The base of all frames. op: the name of the class in lower case."""

    op: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.op = cls.__name__.lower()


# --- from rank 0 ------------------------------------------------------------------------------


class Loading(Frame, frozen=True):
    """The loading progress of the stages, by name, as /health shows it."""

    stages: dict[str, Any]


def loading_text(stages: Mapping[str, Any]) -> str:
    """Return how far the stages of a `Loading` are that are not ready yet; "" for none."""
    return "; ".join(f"{name if name.startswith('spare') else f'stage {name}'}: "
                     f"{stage.get('text', stage['phase'])}"
                     for name, stage in stages.items() if stage["phase"] != "ready")


class Ready(Frame, frozen=True):
    """Requests are accepted. facts: model, stages and ranks, as /props shows them."""

    facts: dict[str, Any]


class Recovering(Frame, frozen=True):
    """A rank was lost; requests wait until other stages have taken over (`Changed`)."""

    message: str


class Changed(Frame, frozen=True):
    """Other stages have taken over. facts: from now on."""

    facts: dict[str, Any]
    message: str


class Token(Struct, frozen=True, array_like=True, tag="t"):
    """An output token of request `id`.

    top: the likeliest tokens with their log-probabilities.
    seen: its visible text in a response in threads, None for its own text.
    reused: tokens of its prompt that were taken from the cache, None if this is unknown.
    """

    id: int
    token: int
    speculated: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    seen: bytes | None = None
    reused: int | None = None


class Ended(Struct, frozen=True, array_like=True, tag="end"):
    """The end of request `id`. reason: stop, length, context, or that of an abort."""

    id: int
    reason: str
    stats: dict[str, Any] = field(default_factory=dict)


class Refused(Struct, frozen=True, array_like=True, tag="error"):
    """Request `id` ends without an answer. kind: one of those in `errors.for_failure`."""

    id: int
    kind: str
    message: str


NewsItem: TypeAlias = Token | Ended | Refused


class News(Frame, frozen=True):
    """Output of any requests, in order."""

    items: tuple[NewsItem, ...]


class Status(Frame, frozen=True):
    """The scheduler's figures at a time (seconds since 1970)."""

    time: float
    figures: dict[str, Any]


class Runs(Frame, frozen=True):
    """Runs that have passed the pipeline, for its watchers."""

    items: tuple[dict[str, Any], ...]


class Rebalanced(Frame, frozen=True):
    """The result of the Rebalance with this id. stages: of a preview, as in the facts of Ready."""

    id: int
    changed: bool
    message: str
    stages: tuple[dict[str, Any], ...] = ()
    gain: float = 1.0


class Draining(Frame, frozen=True):
    """No request is accepted any more; open ones have so many seconds to complete."""

    seconds: float


STOPPED = "this server is being stopped"  #: by its user


class Failed(Frame, frozen=True):
    """The job cannot continue. message: why, STOPPED if its user ends it."""

    message: str


class Bye(Frame, frozen=True):
    """The last frame of a job that ends normally."""


# --- from the HTTP process --------------------------------------------------------------------


class Welcome(Frame, frozen=True):
    """The first frame to a rank 0 that enters.

    url: its address for clients; "" if rank 0 must send a listening socket with its settings.
    """

    url: str = ""


class Picture(Struct, frozen=True, array_like=True):
    """Rows of a prompt, as in `core.types.Media`; of arrays the bytes."""

    n_pos: int
    causal: bool
    places: bytes | None
    rows: bytes
    digest: bytes
    start: int
    n: int

    @classmethod
    def of(cls, media: Media) -> Picture:
        """Return the frame's form of rows."""
        assert media.rows is not None
        return cls(media.n_pos, media.causal,
                   None if media.places is None else media.places.tobytes(),
                   media.rows.tobytes(), media.digest, media.start, len(media.rows))

    @property
    def media(self) -> Media:
        """The rows. Raises ValueError for bytes of another shape."""
        places = None if self.places is None else np.frombuffer(
            self.places, np.int32).reshape(3, self.n)
        rows = np.frombuffer(self.rows, np.float32).reshape(self.n, -1)
        return Media(self.n_pos, self.causal, places, rows, self.digest, self.start)


class Submit(Frame, frozen=True):
    """A request under an id of its own.

    prompt: token ids.
    decompose: for a response in threads.
    output: tokens that an earlier rank 0 has returned; they are not returned again.
    pool: group of answers from which prompt lookup may copy, 0 for none.
    stores: whether cells of the prompt may be kept on disks.
    media: its pictures.
    salt: requests share cells of prompts with those of the same salt only.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    ignore_eos: bool = False
    decompose: Specification | None = None
    output: tuple[int, ...] = ()
    pool: int = 0
    stores: bool = True
    media: tuple[Picture, ...] = ()
    salt: bytes = b""


class Abort(Frame, frozen=True):
    """End a request whose client has gone, or for another reason."""

    id: int
    reason: str


class Watch(Frame, frozen=True):
    """Whether any client watches the pipeline."""

    on: bool


class Rebalance(Frame, frozen=True):
    """Move layers; or, for a preview, return what that would change."""

    id: int
    preview: bool = False


EngineFrame: TypeAlias = (
    Loading | Ready | Recovering | Changed | News | Status | Runs | Rebalanced | Draining | Failed
    | Bye)
ClientFrame: TypeAlias = Submit | Abort | Watch | Rebalance
Kinds: TypeAlias = Mapping[str, type[T]]

FIRST: Kinds[Settings] = {Settings.op: Settings}
GREETING: Kinds[Welcome] = {Welcome.op: Welcome}
FROM_ENGINE: Kinds[EngineFrame] = {kind.op: kind for kind in typing.get_args(EngineFrame)}
FROM_CLIENT: Kinds[ClientFrame] = {kind.op: kind for kind in typing.get_args(ClientFrame)}

# --- bytes ------------------------------------------------------------------------------------

_WITH_FIGURES = (Loading, Ready, Changed, Status, Runs, Rebalanced)
_encoder = msgspec.msgpack.Encoder()


def encode(frame: Settings | EngineFrame | ClientFrame | Welcome) -> bytes:
    """The bytes of one frame. Raises ProtocolError when it is too long."""
    figures = isinstance(frame, _WITH_FIGURES) or (
        isinstance(frame, News) and any(type(item) is Ended for item in frame.items))
    # they are shown as JSON, whose objects have texts as keys
    body = _encoder.encode(
        msgspec.to_builtins(frame, str_keys=True, builtin_types=(bytes,)) if figures else frame)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is longer than {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes, kinds: Kinds[T]) -> T:
    """Return the frame in a body, one of `kinds`. Raises ProtocolError."""
    try:
        made: T = _decoder(tuple(kinds.values())).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error  # with the path of the field
    return made


@cache
def _decoder(kinds: tuple[type[Any], ...]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Union[kinds])  # noqa: UP007


class FrameReader(Generic[T]):
    """Splits a stream of bytes into frames."""

    def __init__(self, kinds: Kinds[T]) -> None:
        self._kinds = kinds
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the frames that are complete with `data`. Raises ProtocolError."""
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
