"""Shard transfer to hosts without the model file: rank 0 sends each rank its layers.

    stage   ShardWanted(layers, piece)                    a missing shard; spares request all
    head    ShardOffer(name, bytes)
    stage   ShardHave(offset, digest so far)              resumes what an earlier job left
    head    ShardChunk(offset, bytes) ...                 at most WINDOW bytes unacknowledged
    stage   ShardHave(offset) ...                         after every chunk
    head    ShardEnd(digest of the whole)                 the stage renames only if it agrees

Bytes arrive in order, so the length of the `.part` file is the record of what has arrived; its
digest shows the head whether it can continue from there. The head never waits for one stage while
another can receive. A piece is the name of a slice of these layers, "" for all of them, or
"embedding" for the embedding alone: a host receives only what it holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from pipeinfer.config import ClusterConfig
from pipeinfer.core.control import PortName, Setup, ShardOffer, ShardWanted
from pipeinfer.core.messages import Message, ShardChunk, ShardEnd, ShardHave, Tag
from pipeinfer.errors import MismatchError, ModelError, ProtocolError, TransportTimeout
from pipeinfer.host import host_name, on_network
from pipeinfer.llama import stream
from pipeinfer.models import embedding
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_model
from pipeinfer.models.shard import ShardSource, extract_shard, name_of
from pipeinfer.models.shard_cache import (
    DIGEST_BYTES,
    Source,
    cache_directory,
    is_sound,
    make_room,
    new_hash,
    open_private,
    seal,
    used_now,
)
from pipeinfer.models.slice_parts import Slice
from pipeinfer.transport.base import Port

CHUNK = 1 << 20  #: bytes of one message
WINDOW = 8 * CHUNK  #: bytes on the way to one stage
_FORGET_SECONDS = 7 * 24 * 3600

Report = Callable[[str, int, int], None]
SourceOf = Callable[[int, int, str], Source]


# --- the head ---------------------------------------------------------------------------------


class _Pieces:
    """Splits blocks of any size into pieces of any size."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._held = blocks, memoryview(b"")

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        parts = []
        while size:
            if not self._held:
                self._held = memoryview(next(self._blocks, b""))
                if not self._held:
                    break
            parts.append(self._held[:size])
            self._held = self._held[size:]
            size -= len(parts[-1])
        return b"".join(parts)


def source_of(model: ModelFile, start: int, stop: int, piece: str) -> Source:
    """Return the source of the bytes to send for layers `[start, stop)`.

    piece: a slice's name, "" or "embedding".
    Raises ProtocolError for another piece, PlanError for layers or slices that the model lacks.
    """
    if piece == embedding.PIECE:
        return embedding.EmbeddingSource(model)
    return ShardSource(model, start, stop, Slice.parse(piece) if piece else None)


class _Outgoing(Struct):
    """A shard that is being sent to one stage. Bytes up to `have` are only hashed, not sent."""

    source: Source
    have: int
    digest: bytes
    pieces: _Pieces
    hasher: hashlib.blake2b
    offset: int = 0
    answered: int = 0
    ended: bool = False


class Sender:
    """The head's side: pass messages to `hear`, call `pump` until it returns False, then wait.

    source_of: returns the source of the layers `[start, stop)`, or of a piece of them.
    """

    def __init__(self, port: Port, source_of: SourceOf) -> None:
        self._port, self._source_of = port, source_of
        self._offered: dict[int, Source] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self.sent_bytes = 0

    def offer(self, node: int, start: int, stop: int, piece: str = "") -> None:
        """Send a stage the name and size of the shard that it requested.

        Raises PlanError if the model has no such layers, ProtocolError for an unknown piece.
        """
        source = self._source_of(start, stop, piece)
        self._offered[node] = source
        self._outgoing.pop(node, None)
        self._port.send(node, Tag.TRANSACTION, ShardOffer(source.name, source.total))

    def hear(self, message: ShardHave) -> None:
        """Handle a stage's start of a transfer or acknowledgement. Raises ProtocolError if it is
        not valid."""
        if message.node not in self._offered or len(message.digest) not in (0, DIGEST_BYTES):
            raise ProtocolError(f"node {message.node} asked for a shard that belongs to another "
                                "node")
        if message.digest:
            source = self._offered[message.node]
            out = _Outgoing(source, message.offset, message.digest, _Pieces(source.blocks()),
                            new_hash(), answered=message.offset)
            if not 0 <= message.offset <= source.total:
                out.have = out.answered = 0
            self._outgoing[message.node] = out
        else:
            current = self._outgoing.get(message.node)
            if current is None or not 0 <= message.offset <= current.offset:
                raise ProtocolError(f"node {message.node} claims to have {message.offset} bytes of "
                                    "a shard that were never sent")
            current.answered = message.offset

    def pump(self) -> bool:
        """Send or hash one more chunk for every stage; return whether more can be done at once."""
        more = [self._step(node, out) for node, out in self._outgoing.items() if not out.ended]
        return any(more)

    @property
    def hashing(self) -> list[int]:
        """The nodes that wait while the bytes that they have are hashed here."""
        return [node for node, out in self._outgoing.items() if out.offset < out.have]

    def _step(self, node: int, out: _Outgoing) -> bool:
        if out.offset < out.have:
            piece = self._next(out, min(CHUNK, out.have - out.offset))
            if out.offset == out.have and out.hasher.digest() != out.digest:
                out.pieces, out.hasher = _Pieces(out.source.blocks()), new_hash()
                out.offset = out.have = out.answered = 0
            return True
        if out.offset == out.source.total:
            self._port.send(node, Tag.TRANSACTION, ShardEnd(out.hasher.digest()))
            out.ended = True
            return False
        if out.offset + CHUNK - out.answered > WINDOW:
            return False
        start = out.offset
        piece = self._next(out, CHUNK)
        self._port.send(node, Tag.TRANSACTION, ShardChunk(start, piece))
        self.sent_bytes += len(piece)
        return True

    @staticmethod
    def _next(out: _Outgoing, size: int) -> bytes:
        piece = out.pieces.take(size)
        if not piece:
            raise ModelError("the model file was truncated while it was being sent: leave it "
                             "unchanged while a job starts")
        out.hasher.update(piece)
        out.offset += len(piece)
        return piece


# --- a stage ----------------------------------------------------------------------------------


def stage_shard(config: ClusterConfig, port: Port, setup: Setup, report: Report
                ) -> tuple[Path | ShardSource, int]:
    """Return this stage's shard, and the number of its bytes that rank 0 sent just now.

    It is read from the model file, or extracted from it, if that exists here; else it is taken from
    the shard cache or received. The embedding is read from the model file itself if that exists.
    report: called with phase, done and total.
    Raises ModelError if there is no file and --distribute is not given, MismatchError for another
    model, ProtocolError for an unknown piece.
    """
    path = Path(setup.model)
    if path.exists():
        model = open_model(path)
        if model.fingerprint != setup.fingerprint:
            raise MismatchError(
                f"{path} on {host_name()} differs from rank 0's file: copy the same model "
                "to every host"
            )
        if setup.piece == embedding.PIECE:
            return path, 0
        if _reads_the_model(config, model, setup):
            return ShardSource(model, setup.start, setup.stop), 0
        return extract_shard(GapModel(model) if setup.gaps else model, setup.start,
                             setup.stop, piece=Slice.parse(setup.piece) if setup.piece else None,
                             progress=lambda d, t: report("extracting", d, t)), 0
    if not config.distribute:
        raise ModelError(
            f"{path} does not exist on {host_name()}: copy it there under the same path, "
            "share its directory, or let rank 0 send the layers with --distribute"
        )
    name, total = _ask(port, setup.port, setup.start, setup.stop, config.timeout, setup.piece)
    found, arrived = receive(port, cache_directory(), name, total, config.timeout, report)
    make_room(found, 0)
    return found, arrived


def _reads_the_model(config: ClusterConfig, model: ModelFile, setup: Setup) -> bool:
    """Return whether the layers are loaded from the model file, without a file of their own."""
    whole = (setup.start, setup.stop) == (0, model.n_layers)
    if whole or setup.piece or setup.gaps or config.shard_cache == "always" \
            or not stream.available():
        return False
    if config.shard_cache == "never":
        return True
    name = name_of(model, setup.start, setup.stop)
    return not (on_network(model.path) or (cache_directory() / name).exists())


def _ask(port: Port, name: PortName, start: int, stop: int, timeout: float, piece: str = ""
         ) -> tuple[str, int]:
    """Request the shard with these layers; return its name and size."""
    port.send(0, Tag.RESULT, ShardWanted(name, start, stop, piece))
    match await_answer(port, timeout, "ShardOffer"):
        case ShardOffer(file, total) if Path(file).name == file and total >= 0:
            return file, total
        case other:
            raise ProtocolError(f"a request for layers was answered with {type(other).__name__}")


def await_answer(port: Port, timeout: float, awaited: str, peer: int = 0) -> Message:
    """Return the next transaction from the head or another node.

    awaited: the message's name, for the error. Raises TransportTimeout after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    # bounded: a head that sends no layers may itself wait for a lost rank
    while (envelope := port.take(Tag.TRANSACTION)) is None:
        if time.monotonic() > deadline:
            raise TransportTimeout(rank=port.rank_of(port.node), peer=port.rank_of(peer),
                                   tag=awaited, run_id=None, seconds=timeout)
        port.wait(0.2)
    return envelope.message


def receive(port: Port, directory: Path, name: str, total: int, timeout: float, report: Report
            ) -> tuple[Path, int]:
    """Return the file `name` of `total` bytes in `directory`, and the number of bytes that
    arrived.

    Continues where an earlier job stopped. A crash leaves a `.part` file, never a damaged `name`.
    Raises ModelError when the disk is full, another job receives it or the bytes are damaged.
    """
    target = directory / name
    used_now(target)
    with contextlib.suppress(OSError):
        if target.stat().st_size == total and is_sound(target):
            return target, 0
    part = directory / f"{name}.part"
    _forget_old(directory, part)
    try:
        with os.fdopen(open_private(part), "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelError(
                    f"{part}: another job on {host_name()} is receiving this shard; wait "
                    "for it, or give this job its own PIPEINFER_CACHE") from None
            arrived, digest = _fill(port, part, file, total, timeout, report)
            os.replace(part, target)
            seal(target, digest)
    except OSError as error:
        raise ModelError(
            f"{part} on {host_name()}: cannot store a shard of {total / 1e6:.0f} MB "
            f"({error.strerror or error}); free some space, or set PIPEINFER_CACHE to another "
            "directory"
        ) from None
    return target, arrived


def _forget_old(directory: Path, but: Path) -> None:
    """Delete parts of other shards that no job has continued for a week."""
    for path in directory.glob("*.gguf.part"):
        with contextlib.suppress(OSError):
            if path != but and path.stat().st_mtime < time.time() - _FORGET_SECONDS:
                path.unlink()


def _fill(port: Port, part: Path, file: BinaryIO, total: int, timeout: float, report: Report
          ) -> tuple[int, bytes]:
    """Complete `file`; return the number of bytes that arrived, and the digest of all.

    If the bytes are damaged, the file is emptied and ModelError raised.
    """
    have, hasher = _hash_file(file, total)
    free = shutil.disk_usage(part.parent).free
    if free < total - have:
        raise ModelError(
            f"{part} on {host_name()} needs {(total - have) / 1e6:.0f} MB, but the disk "
            f"has only {free / 1e6:.0f} MB: free some space, or set PIPEINFER_CACHE to another "
            "directory")
    port.send(0, Tag.RESULT, ShardHave(port.node, have, hasher.digest()))
    arrived = 0
    # each chunk is acknowledged, so that the head sends no more than a stage can store
    while True:
        match await_answer(port, timeout, "ShardChunk"):
            case ShardChunk(offset, data):
                if offset == 0:  # the digest did not match: the head starts from the beginning
                    have, hasher = 0, new_hash()
                    file.truncate(0)
                if offset != have or have + len(data) > total:
                    raise ProtocolError(f"a chunk starts at {offset}, but {have} bytes "
                                        "have arrived")
                file.write(data)
                hasher.update(data)
                have += len(data)
                arrived += len(data)
                port.send(0, Tag.RESULT, ShardHave(port.node, have))
                report("receiving", have, total)
            case ShardEnd(digest):
                if have != total or digest != hasher.digest():
                    file.truncate(0)
                    raise ModelError(f"{part} on {host_name()} was damaged on the way: "
                                     "start the job again")
                file.flush()
                os.fsync(file.fileno())
                return arrived, digest
            case other:
                raise ProtocolError(f"{type(other).__name__} arrived in the middle of a shard")


def _hash_file(file: BinaryIO, total: int) -> tuple[int, hashlib.blake2b]:
    """Return how many bytes of the shard `file` has, and their digest."""
    hasher = new_hash()
    if os.fstat(file.fileno()).st_size > total:
        file.truncate(0)
    file.seek(0)
    have = 0
    while piece := file.read(CHUNK):
        hasher.update(piece)
        have += len(piece)
    return have, hasher
