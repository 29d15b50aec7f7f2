"""Helper processes for untrusted texts, which can neither end nor block the main process.

They compile grammars, render chat templates and tokenise. llguidance recurses as deep as a grammar
is nested, for any length of time, and llama.cpp's regular expressions along a run of one kind of
character: hostile texts overflow the stack, which raises no exception. There a helper ends, and one
text costs an error. The helper for grammars has a smaller stack than the processes that use the
grammar later. Memory is bounded. A helper is killed at a deadline (by the system, should this
process be gone by then), and started again at its next use. It reads one JSON object per line and
writes one per line. Independent of grammars, templates and vocabularies.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from pipeinfer.errors import PipeinferError, RequestError

SECONDS = 10.0  #: longest time for one answer
_START_SECONDS = 60.0  #: longest time until the helper is up, with a cold disk on a busy machine
_STACK_BYTES = 2 * 1024 * 1024
_MEMORY_BYTES = 4 * 1024**3  #: of address space, which exceeds the memory in use


class HelperLate(RequestError):
    """The helper did not respond before the deadline and was killed."""


class HelperDied(RequestError):
    """The helper ended during a request: its stack or its memory did not suffice."""


class Helper:
    """A process that handles requests one at a time; threads wait for one another."""

    def __init__(self, module: str, hello: Callable[[], dict[str, Any]]) -> None:
        """module: is run with -m and calls `serve`. hello: makes the first line sent to it."""
        self._module, self._hello = module, hello
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None
        self._greeted = False  # whether it has responded to the first line

    def start(self) -> None:
        """Start the process if it does not run, without waiting until it is up."""
        with self._lock:
            self._ensure()

    def ask(self, question: dict[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
        """Send a request and return the response.

        question: the request, which JSON must be able to represent
        seconds: longest time for the response
        Raises RequestError with the helper's message, HelperDied or HelperLate.
        """
        with self._lock:
            self._ensure()
            try:
                if not self._greeted:
                    begun = self._receive(_START_SECONDS)
                    if "error" in begun:
                        raise RequestError(str(begun["error"]))
                    self._greeted = True
                self._send(question, seconds)
                answer = self._receive(seconds)
            except BaseException:  # also an interrupt: the next request must not get this response
                self._stop()
                raise
        if "error" in answer:
            raise RequestError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            self._stop()

    def kill(self) -> None:
        """End the process without waiting for the request in progress, which fails."""
        process = self._process
        if process is not None:
            process.kill()

    def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module], stdin=subprocess.PIPE, bufsize=0,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        os.set_blocking(process.stdin.fileno(), False)  # type: ignore[union-attr]
        self._process, self._greeted = process, False
        self._finalizer = weakref.finalize(self, _end, process)
        self._send(self._hello(), _START_SECONDS)

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _send(self, message: dict[str, Any], seconds: float) -> None:
        assert self._process is not None
        writer = self._process.stdin
        assert writer is not None
        left = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError), selectors.DefaultSelector() as selector:
            selector.register(writer, selectors.EVENT_WRITE)
            while left:  # a helper that is stopped never empties its pipe
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise HelperLate(f"it was not taken within {seconds:g} s")
                left = left[os.write(writer.fileno(), left):]
        # `_receive` notices a process that has ended

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None
        reader = self._process.stdout
        assert reader is not None
        line = _read_line(reader, seconds)
        if line is None:
            raise HelperLate(f"it took more than {seconds:g} s: make it smaller")
        if not line.endswith(b"\n"):
            raise HelperDied("it is nested too deeply or too large")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _read_line(stream: IO[bytes], seconds: float) -> bytes | None:
    """A line; the incomplete one at the end of the stream; or None at the deadline."""
    deadline, parts = time.monotonic() + seconds, bytearray()
    number = stream.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(number, selectors.EVENT_READ)
        while not parts.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(number, 1 << 16)
            if not data:
                break
            parts += data
    return bytes(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def serve(begin: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]],
          memory: int = _MEMORY_BYTES, *, limits: int = resource.RLIMIT_AS,
          stack: int = _STACK_BYTES, seconds: float = SECONDS) -> None:
    """Run the helper's side until its standard input ends.

    begin: takes the first line and returns the function that handles requests
    memory: bytes of address space, which exceeds the memory in use
    limits: the limit to which `memory` applies
    stack: bytes of the stack on which requests are handled
    seconds: longest time for one answer
    """

    def run() -> None:
        handler: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        for line in sys.stdin.buffer:
            question, answer = json.loads(line), {}
            _allow(resource.RLIMIT_CPU, int(time.process_time() + 2 * seconds) + 1)
            try:
                if handler is None:
                    handler = begin(question)
                else:
                    answer = handler(question)
            except PipeinferError as error:
                answer = {"error": str(error)}
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()

    _allow(limits, memory)
    threading.stack_size(stack)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _allow(what: int, amount: int) -> None:
    """Set a limit of this process, up to the system's hard limit."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (amount if hard < 0 else min(amount, hard), hard))


_MODULE = "pipeinfer.models.text.tokenizing"
_SHORT = 64 * 1024  #: characters; beyond, a text must not keep short ones waiting
_LARGE = 256 * 1024  #: characters after which the process's memory is returned
SHORT_SECONDS, LONG_SECONDS = 10.0, 60.0


class Apart:
    """The processes that tokenise for one vocabulary: one for short texts, one for long ones."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """path: of the model. A process is started with the first text, or by `start`."""
        hello = {"path": os.fspath(path), "stamp": stamp(path)}
        self._short, self._long = (Helper(_MODULE, lambda: hello) for _ in range(2))

    def start(self) -> None:
        """Start the process for short texts without waiting until it is up."""
        self._short.start()

    def close(self) -> None:
        """End the processes."""
        self._short.close()
        self._long.close()

    def tokens(self, how: str, text: str, detail: bool | str) -> list[int]:
        """Return the tokens of a text; arguments as for `Tokenizer.tokens`.

        Raises RequestError for a text that cannot be tokenised, ends the process or takes too long.
        """
        size = len(text)
        helper, seconds = ((self._short, SHORT_SECONDS) if size <= _SHORT
                           else (self._long, LONG_SECONDS))
        try:
            answer = helper.ask({"how": how, "text": text, "detail": detail}, seconds)
        except HelperLate:
            raise RequestError(f"a text of {size} characters takes longer than {seconds:g} s to "
                               "tokenise: shorten it") from None
        except HelperDied:
            raise RequestError(
                f"the model's tokenizer cannot split a text of {size} characters: it needs more "
                "stack or memory than it may have. Shorten the text, or break long runs of one "
                "kind of character up with spaces and letters") from None
        finally:
            if size > _LARGE:
                helper.close()
        return array("i", base64.b64decode(answer["tokens"])).tolist()


def started(path: str | os.PathLike[str]) -> Apart:
    """Return the processes for a model that is loaded later, the first one started."""
    made = Apart(path)
    made.start()
    return made


def answer_of(tokens: Iterable[int]) -> dict[str, Any]:
    """Return the answer that carries these tokens."""
    return {"tokens": base64.b64encode(array("i", tokens).tobytes()).decode("ascii")}


def stamp(path: str | os.PathLike[str]) -> list[int]:
    """Return size and time of a model's file, or of a folder's tokenizer: another file may have
    other tokens. Empty where there is none."""
    file = Path(path)
    try:
        found = os.stat(file / "tokenizer.json" if file.is_dir() else file)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]
