"""A race of three policies for the page: `pipeinfer race` as a child process, one at a time.

It starts the command and passes on its events; it imports nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pipeinfer.config import options
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.errors import ApiError
from pipeinfer.server.streaming import event

_SECONDS = 600.0  #: for a race
_STOP_SECONDS, _STOPS = 2.0, 5  #: between signals that end it, and how many there are
_MOST_LOG = 4096
_ANOTHER = ApiError(429, "another race is running: try again when it has ended",
                    code="race_running")


class Races:
    """Runs races, one at a time. client: with the words of the command and the cluster's facts."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._running = False

    @property
    def offered(self) -> bool:
        """Whether there are words of the command, and the served stages are on one host."""
        hosts = {stage["host"] for stage in self._client.facts.get("stages", ())}
        return bool(self._client.settings.race) and len(hosts) == 1

    def check(self) -> None:
        """Raise ApiError unless a race can begin now."""
        if not self.offered:
            raise ApiError(404, "this server offers no race: it needs a draft or another proposer, "
                                "a loopback address, stages on one host, and no --set race=false",
                           code="not_supported")
        if self._running:
            raise _ANOTHER

    async def events(self, prompt: str, chat: bool) -> AsyncGenerator[bytes, None]:
        """Yield the events of a race; a failure is the last one. chat: whether the prompt goes into
        the model's chat template."""
        if self._running:  # another request was faster
            yield event(_ANOTHER.body())
            return
        self._running = True
        try:
            with tempfile.TemporaryDirectory(prefix="pipeinfer-race-") as folder:
                async for data in self._run(Path(folder), prompt, chat):
                    yield data
        finally:
            self._running = False

    async def _run(self, folder: Path, prompt: str, chat: bool) -> AsyncGenerator[bytes, None]:
        (folder / "prompt").write_text(prompt, encoding="utf-8", errors="replace")
        words = [*self._client.settings.race, "--events", "-f", str(folder / "prompt"),
                 *["--chat"] * chat]
        # the race takes cores from the server's own requests
        deadline = asyncio.get_running_loop().time() + _SECONDS
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "pipeinfer", "race", *words, stdin=DEVNULL, stdout=PIPE,
                stderr=log, env=_environment(), start_new_session=True)
        ending = asyncio.create_task(self._end_with_server(process))
        try:
            async for one in _lines(process, deadline):
                yield event(one)
                if one.get("event") == "lanes":
                    return
            why = "the server ends" if self._client.left.is_set() else _reason(folder / "log")
            yield event(ApiError(503, f"the race has ended early: {why}",
                                 code="race_failed").body())
        except TimeoutError:
            yield event(ApiError(504, f"the race took more than {_SECONDS:g} s: start the server "
                                      "with a smaller model", code="race_failed").body())
        finally:
            ending.cancel()
            await _end(process)

    async def _end_with_server(self, process: Process) -> None:
        await self._client.left.wait()
        await _end(process)


def _environment() -> dict[str, str]:
    """Return the variables for the command: without those that set options of the server, or name
    its terminal."""
    names = {"PIPEINFER_TERMINAL", *(f"PIPEINFER_{name.upper()}" for name in options())}
    return {name: value for name, value in os.environ.items() if name not in names}


async def _lines(process: Process, deadline: float) -> AsyncGenerator[Mapping[str, Any], None]:
    """Yield the objects that the command prints, to its end. Raises TimeoutError."""
    assert process.stdout is not None
    while True:
        async with asyncio.timeout_at(deadline):
            line = await process.stdout.readline()
        if not line:
            return
        with contextlib.suppress(msgspec.DecodeError):
            if isinstance(found := msgspec.json.decode(line), dict):
                yield found


def _reason(log: Path) -> str:
    """Return the error in the command's log, or its last line."""
    lines = log.read_bytes()[-_MOST_LOG:].decode("utf-8", "replace").strip().splitlines()
    mark = "pipeinfer: error: "
    errors = [line.partition(mark)[2] for line in lines if mark in line]
    return (errors or lines or ["it printed no reason"])[-1]


async def _end(process: Process) -> None:
    """End the launcher, which ends its ranks, and wait for it; kill it where it does not end."""
    for number in (*[signal.SIGTERM] * _STOPS, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
