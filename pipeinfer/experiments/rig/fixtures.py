"""Fixtures of every session of tests; a pytest plugin, so that each is there once."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

_MARK = "PIPEINFER_TEST_SESSION"
_OWN_HELPERS = ("multiprocessing.resource_tracker", "pipeinfer.models.text.")
_PATIENCE = 20.0  # seconds for what is already on its way out


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shards and remembered widths of this run only, also in the jobs that tests launch."""
    before = os.environ.get("PIPEINFER_CACHE")
    os.environ["PIPEINFER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["PIPEINFER_CACHE"]
    else:
        os.environ["PIPEINFER_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail at the end where a process that a test has started is still alive, and end it.

    Processes are known by a variable that they inherit, so one that has left its process group or
    its parent is found too. This process's own helpers, which end with it, do not count.
    """
    mark = uuid.uuid4().hex
    os.environ[_MARK] = mark
    yield
    del os.environ[_MARK]
    deadline = time.monotonic() + _PATIENCE
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    lines = [_line(process) for process in left]
    for process in left:
        process.kill()
    assert not lines, "still running after the last test:\n" + "\n".join(lines)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and not _own_helper(process) \
                    and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _own_helper(process: psutil.Process) -> bool:
    return process.ppid() == os.getpid() and any(
        name in part for part in process.cmdline() for name in _OWN_HELPERS)


def _line(process: psutil.Process) -> str:
    try:
        return f"  {process.pid}: {' '.join(process.cmdline())}"
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return f"  {process.pid}"
