"""Fixtures of every session of tests, and which tests it runs; a pytest plugin, so that each is
there once.

Tests and cases that only repeat, in another size or place, what others show are marked `full`. They
are left out unless --full is given or they are named by node id. The mark of a test of which no
case is in the sample names what shows the same there: `full("what shows it")`.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import psutil
import pytest

from pipeinfer.loading import uncollected

#: how many tests this session leaves out
LEFT_OUT = pytest.StashKey[int]()
_MARK = "PIPEINFER_TEST_SESSION"
_OWN_HELPERS = ("multiprocessing.resource_tracker", "pipeinfer.models.text.")
_PATIENCE = 20.0  # seconds for what is already on its way out


def pytest_addoption(parser: pytest.Parser) -> None:
    """--full."""
    parser.addoption("--full", action="store_true",
                     help="run every test and property example, not the sample")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Torch and all tests are imported here."""
    with uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only the full run makes. A UsageError names tests that never run without a
    reason."""
    if config.getoption("full"):
        return
    named = tuple(part for part in config.args if "::" in part)
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        repeats = item.get_closest_marker("full") is not None
        (left_out if repeats and not item.nodeid.startswith(named) else kept).append(item)
    shown = {item.nodeid.partition("[")[0] for item in kept}
    hidden = {item.nodeid.partition("[")[0] for item in left_out
              if not any(mark.args for mark in item.iter_markers("full"))} - shown
    if hidden:
        raise pytest.UsageError("no case of these is in the sample: say what shows the same there, "
                                f"@pytest.mark.full(\"...\"): {', '.join(sorted(hidden))}")
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_report_collectionfinish(config: pytest.Config) -> str:
    """How much of the tests this is."""
    if config.getoption("full"):
        return "full run: every test and property example"
    count = config.stash.get(LEFT_OUT, 0)
    return f"sample: {count} tests are left out, properties try fewer examples; --full runs all"


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shards and remembered widths of this run only, also in the jobs that tests launch."""
    before = os.environ.get("PIPEINFER_CACHE")
    base = tmp_path_factory.getbasetemp()  # of one of several workers: a folder in the run's
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["PIPEINFER_CACHE"] = str(folder)
    yield
    if before is None:
        del os.environ["PIPEINFER_CACHE"]
    else:
        os.environ["PIPEINFER_CACHE"] = before


@pytest.fixture
def llama() -> Iterator[Callable[..., Any]]:
    """`tests.kit.llama.load`; what it has loaded is closed behind the test."""
    from tests.kit.llama import load

    with contextlib.ExitStack() as loaded:
        yield lambda *args, **given: loaded.enter_context(
            contextlib.closing(load(*args, **given)))


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
