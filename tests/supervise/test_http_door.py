"""The HTTP process as the supervisor has it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from pipeinfer.server import http_process
from pipeinfer.server.orders import Look
from pipeinfer.supervise import http_door
from tests.kit.server_peer import MODEL, SECONDS, settings_of

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_one_that_hangs_is_killed(monkeypatch):
    for name, seconds in (("_ANSWER", 0.5), ("_EVERY", 0.05), ("_MISSED", 3)):
        monkeypatch.setattr(http_door, name, seconds)
    said = []
    environ = {k: v for k, v in os.environ.items() if k != "PIPEINFER_DOOR"}
    door = http_door.HttpDoor(environ, said.append)
    await door.open()
    path = environ["PIPEINFER_DOOR"].partition(":")[2]
    await asyncio.sleep(0.5)  # before its first rank 0 it answers nothing, and lives
    head = await asyncio.to_thread(
        http_process.enter, path, settings_of(str(MODEL)),
        lambda: http_process.listen("127.0.0.1", 0, SECONDS))
    async with asyncio.timeout(SECONDS):
        while not (await door.ask(Look())).state:
            await asyncio.sleep(0.05)
        assert not said
        os.kill(door.pid, signal.SIGSTOP)
        while door.pid:
            await asyncio.sleep(0.05)
    head.link.close()
    await door.close()
    assert said == ["the HTTP process does not answer any more: killed"]


@pytest.mark.parametrize(("name", "wanted"), [
    ("KILL", ["the HTTP process has ended with exit code 137: killed by signal 9 (SIGKILL), maybe "
              "by the kernel for want of memory"]), ("TERM", [])])
async def test_one_that_is_killed_is_said_to_be(monkeypatch, name, wanted):
    said = []
    monkeypatch.setattr(http_door, "_EVERY", 0.01)
    await http_door.HttpDoor({}, said.append)._watch(
        subprocess.Popen(["sh", "-c", f"kill -{name} $$"]))
    assert said == wanted
