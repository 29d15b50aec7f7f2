"""Pictures and sound in conversations: where a client's parts are, and how they become tokens.

A template gets a random number in place of each part, which no client can write, so that no text
becomes a picture's mark. Rows are computed later, when the answer has begun: a stream sends
keep-alives meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from pipeinfer.core.types import Media
from pipeinfer.errors import RequestError
from pipeinfer.models.media import MARK, MOST_BYTES, MOST_OF_REQUEST, Pictures, joined
from pipeinfer.models.text.tokenizer import Tokenizer
from pipeinfer.server import schema_requests as schema
from pipeinfer.server.errors import bad
from pipeinfer.transport import http_client

_FETCH_SECONDS, _MOST_SECONDS = 20.0, 60.0  #: for each wait for another server, and in all
NONE = ("this model is served without a projector, so it reads text alone: leave the part out, or "
        "start the server with --mmproj")


class File(Struct, frozen=True):
    """A picture or a sound of a prompt; the journal stores it.

    data: contents of the file
    start: place in the prompt of the first token that stands for it
    where: the part of the request
    """

    data: bytes
    start: int
    where: str


class Shown:
    """The pictures of a conversation."""

    def __init__(self, messages: Sequence[schema.Message], pictures: Pictures | None,
                 hosts: Sequence[str]) -> None:
        """pictures: the projector; None without one. hosts: from which pictures may be fetched.

        Raises ApiError for a part that cannot be read.
        """
        found = [(part.place or f"messages.{i}.content.{k}", part)
                 for i, message in enumerate(messages) if isinstance(message.content, list)
                 for k, part in enumerate(message.content) if isinstance(part, schema.MediaPart)]
        if found and pictures is None:
            raise bad(f"{found[0][0]}: {NONE}", found[0][0])
        if len(found) > MOST_OF_REQUEST:
            raise bad(f"messages: {len(found)} pictures, of {MOST_OF_REQUEST} at most", "messages")
        self._pictures = pictures
        self._files: dict[str, tuple[str, bytes]] = {}  # by their marks
        self._marks: dict[int, str] = {}  # of the parts
        for where, part in found:
            mark = str(10**30 + secrets.randbelow(10**30))
            self._marks[id(part)] = mark
            self._files[mark] = where, contents(part, where, hosts)
        self.files: list[File] = []  #: as they stand in the prompt that was encoded last

    def mark(self, part: schema.MediaPart) -> str:
        """Return what a template gets for a part."""
        return self._marks[id(part)]

    def encoder(self, tokenizer: Tokenizer) -> Callable[..., list[int]]:
        """Return what makes a prompt of a conversation, as `Tokenizer.encode_chat` does."""
        return self._with_files(tokenizer) if self._files else tokenizer.encode_chat

    def _with_files(self, tokenizer: Tokenizer) -> Callable[..., list[int]]:
        def encode(*args: Any, **options: Any) -> list[int]:
            text, seam = tokenizer.guarded_chat(*args, **options)
            tokens: list[int] = []
            self.files = []
            for k, piece in enumerate(re.split(f"({'|'.join(self._files)})", text)):
                if k % 2:
                    where, data = self._files[piece]
                    self.files.append(File(data, len(tokens), where))
                    tokens += self._layout(where, data)
                else:
                    tokens += tokenizer.encode_guarded(piece, seam, begins=not k)
            if lost := {where for where, _ in self._files.values()} - {
                    one.where for one in self.files}:
                raise RequestError(f"the model's chat template leaves {min(lost)} out")
            return tokens

        return encode

    def _layout(self, where: str, data: bytes) -> list[int]:
        assert self._pictures is not None
        try:
            return self._pictures.layout(data)
        except RequestError as error:
            raise bad(f"{where}: {error}", where) from error

    def displayed(self, text: str) -> str:
        """Return a rendered conversation with the usual mark for each part."""
        return re.sub("|".join(self._files), MARK, text) if self._files else text


def media_of(files: Sequence[File], pictures: Pictures | None) -> tuple[Media, ...]:
    """Compute the rows of a prompt's pictures, which may take minutes.

    Raises RequestError, which names the part.
    """
    found: list[Media] = []
    for one in files:
        try:
            if pictures is None:
                raise RequestError(NONE)
            _, media = joined([[0] * one.start, pictures.show(one.data)])
        except RequestError as error:
            raise RequestError(f"{one.where}: {error}") from error
        found += media
    return tuple(found)


def contents(part: schema.MediaPart, where: str, hosts: Sequence[str]) -> bytes:
    """Return the bytes of a part: of a data: URI, of base64, or of one of `hosts`. Raises
    ApiError."""
    source = part.source
    if source.startswith(("http://", "https://")):
        return _fetched(source, where, hosts)
    head, found, data = source.partition(",")
    if head.startswith("data:") and not (found and head.endswith(";base64")):
        raise bad(f"{where}: a data: URI must be of the form data:image/png;base64,...", where)
    try:
        raw = base64.b64decode(data if head.startswith("data:") else source, validate=True)
    except (binascii.Error, ValueError):
        raise bad(f"{where}: it is not valid base64, nor a data: URI", where) from None
    if len(raw) > MOST_BYTES:
        raise bad(f"{where}: it has {len(raw) / 1e6:.0f} MB, of {MOST_BYTES / 1e6:.0f} MB at most",
                  where)
    return raw


def _fetched(url: str, where: str, hosts: Sequence[str]) -> bytes:
    """Fetch a picture; redirections are not followed, since they may lead elsewhere."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        host = ""
    if host not in hosts:
        raise bad(f"{where}: this server fetches no pictures from {host[:100] or 'that URL'}: send "
                  f"it as a data: URI, or start the server with --image-urls {host[:100]}", where)
    until, data = time.monotonic() + _MOST_SECONDS, bytearray()
    try:
        with http_client.stream("GET", url, timeout=_FETCH_SECONDS) as response:
            if response.status_code != 200:
                raise RequestError(f"{host} answered with status {response.status_code}")
            for block in response.iter_bytes():
                data += block
                if len(data) > MOST_BYTES or time.monotonic() > until:
                    raise RequestError("it is too large, or comes too slowly")
    except RequestError as error:
        raise bad(f"{where}: it cannot be fetched: {error}", where) from error
    return bytes(data)
