"""Pictures and sound: what may be read, the process that turns it into rows, and rows of late.

The process has the projector and the text model's vocabulary (`projecting`). A picture may end it:
then that picture is an error, and the next one starts it again. Sizes are read from a file's header
before anything is decoded. Independent of requests, prompts and HTTP.
"""

from __future__ import annotations

import base64
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, structs

from pipeinfer.core.types import NO_TOKEN, Media
from pipeinfer.errors import RequestError
from pipeinfer.models.text.helper import Helper, HelperDied, HelperLate, stamp

MOST_BYTES = 20_000_000  #: of a file
MOST_PIXELS = 33_000_000
MOST_OF_REQUEST = 16  #: pictures and sounds
MOST_ROWS = 1024  #: of a picture, unless the user says otherwise
_GEMMA_ROWS = 280  #: of a picture of a Gemma by its own rules, whose rows see each other
#: text models whose pictures are not computed here, and why
REFUSED = {"hunyuan_vl": "pictures of HunyuanVL stand at a fourth position",
           "deepseek4": "layers of DeepSeek-V4 choose experts by tokens, which pictures lack"}
MARK = "<__media__>"  #: stands for a picture in a prompt of `generate`
SECONDS = 900.0  #: longest for one picture; a projector of 0.4 B takes two minutes of one core
_CACHE_BYTES = 64 << 20  #: of rows
_MOST_LAYOUTS = 256
_MODULE = "pipeinfer.models.projecting"
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
#: JPEG's segments with the size, and those without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))

#: what takes the place of a picture in a prompt: marks of the vocabulary, and rows
Shown: TypeAlias = tuple[tuple[int, ...] | Media, ...]


def check(data: bytes) -> str:
    """Return the kind of a file, "image" or "audio". Raises RequestError for one that is too large,
    or of a kind that is not read."""
    if len(data) > MOST_BYTES:
        raise RequestError(f"it has {len(data) / 1e6:.0f} MB, of {MOST_BYTES / 1e6:.0f} MB at "
                           "most: make it smaller")
    if (data[:4] == b"RIFF" and data[8:12] == b"WAVE") or data[:4] == b"fLaC" \
            or data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] > b"\xdf"):
        return "audio"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        raise RequestError("it is a WebP picture, for which there is no decoder here: send JPEG or "
                           "PNG")
    try:
        width, height = _size(data)
    except (struct.error, IndexError):
        raise RequestError("its header is cut off: send the whole file") from None
    if not 0 < width * height <= MOST_PIXELS:
        raise RequestError(f"it has {width} x {height} pixels, of {MOST_PIXELS / 1e6:.0f} "
                           "million at most: make it smaller")
    return "image"


def _size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, by the header. Raises struct.error where that is cut off."""
    if data[:8] == _PNG:
        width, height = struct.unpack_from(">II", data, 16)
    elif data[:4] == b"GIF8":
        width, height = struct.unpack_from("<HH", data, 6)
    elif data[:2] == b"BM":
        narrow = struct.unpack_from("<I", data, 14)[0] < 40
        width, height = struct.unpack_from("<HH" if narrow else "<ii", data, 18)
    elif data[:2] == _JPEG:
        return _jpeg_size(data)
    else:
        raise RequestError("it is not a JPEG, PNG, GIF or BMP picture, nor WAV, MP3 or FLAC sound")
    return abs(width), abs(height)


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while True:
        while data[at] != 0xFF or data[at + 1] in (0xFF, 0x00):
            at += 1
        kind = data[at + 1]
        if kind in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        at += 2 if kind in _BARE else 2 + struct.unpack_from(">H", data, at + 2)[0]


class ProjectorOptions(Struct, frozen=True):
    """A projector and how it is used.

    model, path: files of the text model and of the projector
    threads: of the projector
    least, most: rows of a picture; 0: as the projector's file says
    n_ctx: tokens of the context, which a picture must not fill
    together: rows of a picture that have to be one run; 0: none have to
    named: whether the user has named it
    """

    model: str = ""
    path: str = ""
    threads: int = 1
    least: int = 0
    most: int = 0
    n_ctx: int = 0
    together: int = 0
    named: bool = True

    @property
    def memory(self) -> int:
        """The bytes that the process takes, about: weights, graph, and the vocabulary."""
        return int(1.2 * os.path.getsize(self.path)) + (80 << 20)

    @property
    def note(self) -> str:
        """What a start prints of it."""
        return f"pictures go through {self.path} ({self.memory / 1e9:.1f} GB of rank 0's host)"


class Pictures:
    """A projector in a process of its own, and the rows of the last pictures.

    vision, audio: what it takes; known once `ready` has returned
    """

    def __init__(self, options: ProjectorOptions) -> None:
        self.options = options
        self.vision = self.audio = False
        self.seconds, self.computed, self.found = 0.0, 0, 0  #: for figures
        hello = {**structs.asdict(options), "stamp": stamp(options.path)}
        self._helper = Helper(_MODULE, lambda: hello)
        self._cache: OrderedDict[bytes, Shown] = OrderedDict()
        self._layouts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def ready(self) -> None:
        """Start the process, as it is also by the first picture, and wait until the projector is
        loaded: a process that uses MPI must not fork. Raises RequestError, in one line, if it
        cannot be.
        """
        found = self._helper.ask({})
        self.vision, self.audio = bool(found["vision"]), bool(found["audio"])

    def close(self) -> None:
        """End the process, also while it computes."""
        self._helper.kill()

    def kinds(self) -> list[str]:
        """The kinds of content that the model reads besides text, as APIs name them."""
        return ["image"] * self.vision + ["audio"] * self.audio

    def layout(self, data: bytes) -> list[int]:
        """Return the tokens of a picture, NO_TOKEN for each row, without computing rows.

        Raises RequestError as `show` does.
        """
        kind, key = check(data), sha256(data).digest()
        with self._lock:
            known = self._layouts.get(key)
        if known is None:
            known = self._ask(data, kind, encode=False)["tokens"]
            with self._lock:
                self._layouts[key] = known
                if len(self._layouts) > _MOST_LAYOUTS:
                    self._layouts.popitem(last=False)
        return list(known)

    def show(self, data: bytes) -> Shown:
        """Return what takes the place of a picture, or of sound, in a prompt.

        Raises RequestError for a file that cannot be read, or that has ended the process.
        """
        kind, key = check(data), sha256(data).digest()
        with self._turn:  # who waits for another's picture may wait for the same one
            return self._known(key) or self._computed(data, kind, key)

    def _known(self, key: bytes) -> Shown | None:
        with self._lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                self.found += 1
            return known

    def _computed(self, data: bytes, kind: str, key: bytes) -> Shown:
        answer = self._ask(data, kind, encode=True)
        shown = tuple(_part(one) for one in answer["parts"])
        with self._lock:
            self.seconds += answer["seconds"]
            self.computed += 1
            self._cache[key] = shown
            while len(self._cache) > 1 and sum(map(_nbytes, self._cache.values())) > _CACHE_BYTES:
                self._cache.popitem(last=False)
        return shown

    def _ask(self, data: bytes, kind: str, *, encode: bool) -> dict[str, Any]:
        question = {"data": base64.b64encode(data).decode("ascii"), "kind": kind, "encode": encode}
        try:
            return self._helper.ask(question, SECONDS)
        except HelperLate:
            raise RequestError(f"its rows take longer than {SECONDS:g} s: make it smaller, or "
                               "lower --image-max-tokens") from None
        except HelperDied:
            raise RequestError("the projector's process ended over it: it may be damaged, or need "
                               "more memory than there is") from None


def joined(parts: Sequence[Sequence[int] | Shown]) -> tuple[list[int], tuple[Media, ...]]:
    """Return a prompt's tokens, with NO_TOKEN for rows, and its pictures.

    parts: tokens, and what `Pictures.show` returned, in order
    """
    prompt: list[int] = []
    media = []
    for part in parts:
        for one in part:
            if isinstance(one, int):
                prompt.append(one)
            elif isinstance(one, Media):
                media.append(structs.replace(one, start=len(prompt)))
                prompt += [NO_TOKEN] * one.stop
            else:
                prompt += one
    return prompt, tuple(media)


def encoded(shown: Media) -> dict[str, Any]:
    """Return a picture's rows as JSON can represent them."""
    assert shown.rows is not None
    return {"n": len(shown.rows), "n_pos": shown.n_pos, "causal": shown.causal,
            "places": None if shown.places is None else shown.places.tolist(),
            "rows": base64.b64encode(shown.rows.tobytes()).decode("ascii")}


def _part(one: dict[str, Any]) -> tuple[int, ...] | Media:
    if "tokens" in one:
        return tuple(one["tokens"])
    raw = base64.b64decode(one["rows"])
    places = None if one["places"] is None else np.array(one["places"], np.int32)
    rows = np.frombuffer(raw, np.float32).reshape(one["n"], -1)
    own = Media(one["n_pos"], one["causal"], places, rows)
    return structs.replace(own, digest=sha256(repr(own.likeness()).encode() + raw).digest())


def _nbytes(shown: Shown) -> int:
    return sum(one.rows.nbytes for one in shown if isinstance(one, Media) and one.rows is not None)


def one_run(architecture: str) -> int:
    """Return the rows of a picture that a model evaluates in one run; 0 where it need not."""
    return _GEMMA_ROWS if architecture.startswith("gemma") else 0


def find(model: str | Path, given: str) -> str:
    """Return the projector of a model's file: the given one, or the nearest next to it; "" for
    none.

    given: a path, "none", or "" for the one next to the model
    """
    if given:
        return "" if given == "none" else given
    model = Path(model)
    folders = [model.parent if model.is_file() else model]
    if "snapshots" in folders[0].parent.parts:  # of the hub's cache, where parts have a folder
        folders.append(folders[0].parent)
    return nearest(model.name, [str(one) for folder in folders
                                for one in sorted(folder.glob("*mmproj*.gguf"))])


def nearest(model: str, names: Sequence[str]) -> str:
    """Return the projector whose name has most in common with the model's; "" without any.

    Of several types of one projector, F16 is taken before others.
    """
    def likeness(name: str) -> tuple[int, bool, str]:
        words = set(Path(name).stem.lower().replace("_", "-").replace(".", "-").split("-"))
        own = set(Path(model).stem.lower().replace("_", "-").replace(".", "-").split("-"))
        return len(words & own), "f16" in words, name

    return max(names, key=likeness, default="")
