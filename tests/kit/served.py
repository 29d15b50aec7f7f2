"""A real server over ranks, for tests: started, waited for, killed at the end whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from tests.kit import launch
from tests.kit.launch import PIPEINFER as PIPEINFER

SECONDS = 90.0


class Served:
    """A running `pipeinfer serve`. url: where it listens, log: lines of its standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.url = process, ""
        self.log: list[str] = []
        self._seen = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r" on (https?://\S+) with", line)
            if found:
                self.url = found[1]
                self._seen.set()
        self._seen.set()

    def wait_until_ready(self, timeout: float = SECONDS) -> None:
        """Raises AssertionError with the log when it does not come up."""
        assert self._seen.wait(timeout), self.log
        assert self.url, "".join(self.log)
        deadline = time.monotonic() + timeout
        while self.health()[0] != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def health(self) -> tuple[int, Any]:
        """Status and answer of /health."""
        return self.get("/health")

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a GET; (0, None) when nobody listens."""
        return self.ask(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a POST of JSON."""
        data = json.dumps(body).encode()
        return self.ask(urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **headers}))

    def ask(self, request: urllib.request.Request, timeout: float = 60) -> tuple[int, Any]:
        """Status and JSON (or text) of a request; (0, None) when nobody listens."""
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _json(error.read())
        except OSError:
            return 0, None

    def until(self, true: Callable[[], Any], what: str, timeout: float = 20.0) -> None:
        """Wait until `true()` holds. Raises AssertionError with the log after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, f"{what} did not come\n{''.join(self.log)}"
            time.sleep(0.02)

    def door(self) -> psutil.Process:
        """The HTTP process."""
        (found,) = (p for p in psutil.Process(self.process.pid).children(recursive=True)
                    if "pipeinfer.server" in p.cmdline())
        return found

    def leave(self) -> None:
        """Ask it to end. Raises AssertionError with the log where that is no good end."""
        self.process.send_signal(signal.SIGUSR1)
        assert self.end() == 0, "".join(self.log)

    def end(self, timeout: float = 60.0) -> int:
        """Its exit code; the reader has seen the whole log."""
        code = self.process.wait(timeout)
        self._reader.join(10.0)
        return code


@contextlib.contextmanager
def serve(np: int, *args: str, command: Sequence[str] = (), seconds: float = 240, **env: Any
          ) -> Iterator[Served]:
    """A server on `np` ranks (a free port unless args say otherwise), killed at the end."""
    prefix = [*command] if command else (
        [launch.mpirun_path(), "-np", str(np)] if np > 1 else [])
    program = ["serve"] if command else [*PIPEINFER, "serve"]
    process = launch.start([*prefix, *program, "--port", "0", *args], timeout=seconds, **env)
    served = Served(process)
    try:
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        served._reader.join(10.0)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")
