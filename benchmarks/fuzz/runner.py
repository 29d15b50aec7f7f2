"""Runs cases in processes of their own, so that a crash, a hang or a full memory is one case's end.

A worker is forked from a parent that has imported what cases need; it says on a pipe which case it
begins and how each ended. A case that kills its worker or takes too long is tried once more alone:
only what happens again is a failure of that case (the machine may have been busy); what does not
is reported with all cases of that worker. Knows kinds of input by their `Kind` alone.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.errors import PipeinferError

LIMIT_SECONDS = 5.0  #: longest that one input may take
LIMIT_BYTES = 3 << 30  #: most address space that a worker may add
_BATCH = 100


@dataclass(frozen=True)
class Kind:
    """make: an input from a source of chance. examine: use it as the program would, in an empty
    directory; returns where it was accepted, raises `refusal` (with one line of text) or fails.
    prepare: imports, before any fork. finish: after all cases; says what is wrong then, if
    anything."""

    name: str
    make: Callable[[random.Random], bytes]
    examine: Callable[[bytes, Path], str]
    prepare: Callable[[], object] = lambda: None
    refusal: type[Exception] = PipeinferError
    finish: Callable[[], str] = str


@dataclass
class Failure:
    """An input that did what none may."""

    data: bytes
    what: str


@dataclass
class Result:
    """How the cases of one kind went. slowest: seconds of the slowest case."""

    kind: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    failures: list[Failure] = field(default_factory=list)


def case(kind: Kind, seed: int, number: int) -> bytes:
    """Input `number` of a seed."""
    return kind.make(random.Random(f"{kind.name} {seed} {number}"))


def try_one(kind: Kind, data: bytes, directory: Path) -> tuple[str, str]:
    """("accepted" | "refused" | "failed", more about it), in this process."""
    try:
        return "accepted", kind.examine(data, directory)
    except kind.refusal as error:
        text = str(error)
        if not text.strip() or "\n" in text or "Traceback" in text:
            return "failed", f"{type(error).__name__} is not one line of text: {text!r}"
        return "refused", f"{type(error).__name__}: {text}"
    except BaseException:
        return "failed", traceback.format_exc(limit=-12)


def run(kind: Kind, inputs: Callable[[int], bytes], count: int,
        report: Callable[[str], object] = len) -> Result:
    """Examine `inputs(0)` to `inputs(count - 1)`."""
    kind.prepare()
    result = Result(kind.name)
    at = 0
    while at < count:
        stop = min(at + _BATCH, count)
        done = 0
        for ended in _worker(kind, inputs, range(at, stop)):
            done += 1
            _note(result, kind, functools.partial(inputs, at + done - 1), ended)
        at += done
        if at % 1000 < _BATCH:
            report(f"{kind.name}: {at} of {count}")
    if wrong := kind.finish():
        result.failures.append(Failure(b"", wrong))
    return result


def _note(result: Result, kind: Kind, data: Callable[[], bytes], ended: tuple[str, str, float]
          ) -> None:
    how, more, seconds = ended
    if how == "died":
        how, again, seconds = next(_worker(kind, lambda _: data(), range(1)))
        slow = "took more than" in more
        if how == "died":
            how, more = "failed", again
        elif not slow:
            how, more = "failed", f"{more}, but not when tried alone: look at the cases before it"
    result.cases += 1
    result.slowest = max(result.slowest, seconds)
    result.accepted += how == "accepted"
    result.refused += how == "refused"
    if how == "failed":
        result.failures.append(Failure(data(), more))


def _worker(kind: Kind, inputs: Callable[[int], bytes], numbers: range
            ) -> Iterator[tuple[str, str, float]]:
    """(how, more, seconds) of each case in turn; the one that ends the worker "died"."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_memory()))
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(kind, inputs, numbers, writer, directory)
    os.close(writer)
    try:
        yield from _follow(child, reader, len(numbers))
    finally:
        os.close(reader)
        shutil.rmtree(directory, ignore_errors=True)


def _follow(child: int, reader: int, count: int) -> Iterator[tuple[str, str, float]]:
    buffer, began = b"", time.monotonic()
    status: int | None = None
    while count:
        left = LIMIT_SECONDS + 1.0 - (time.monotonic() - began)
        ready = left > 0 and select.select([reader], [], [], left)[0]
        data = os.read(reader, 1 << 16) if ready else b""
        if not ready:
            os.kill(child, signal.SIGKILL)
        if not data:
            _, status = os.waitpid(child, 0)
            why = _cause(status) if ready else f"took more than {LIMIT_SECONDS:.0f} s"
            yield "died", why, time.monotonic() - began
            return
        buffer += data
        while b"\n" in buffer and count:
            line, _, buffer = buffer.partition(b"\n")
            how, more, seconds = json.loads(line)
            if how == "accepted" and seconds > LIMIT_SECONDS:
                how, more = "failed", f"took {seconds:.1f} s"
            yield how, more, seconds
            count, began = count - 1, time.monotonic()
    os.waitpid(child, 0)


def _child(kind: Kind, inputs: Callable[[int], bytes], numbers: range, writer: int,
           directory: Path) -> None:
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if not os.environ.get("FUZZ_STDERR"):
            os.dup2(quiet, 2)
        for number in numbers:
            data = inputs(number)
            for path in directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            start = time.monotonic()
            how, more = try_one(kind, data, directory)
            line = json.dumps([how, more[-4000:], time.monotonic() - start])
            os.write(writer, line.encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return f"left with exit code {os.waitstatus_to_exitcode(status)}"


def _memory() -> str | None:
    """A directory in memory, where there is one: cases write files by the thousand."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def store(failure: Failure, directory: Path) -> Path:
    """Keep a failing input, by what is in it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{zlib.crc32(failure.data):08x}-{len(failure.data)}.z"
    path.write_bytes(zlib.compress(failure.data, 9))
    return path


def load(path: Path) -> bytes:
    """An input that `store` kept."""
    return zlib.decompress(path.read_bytes())
