"""The journal's file: what is written comes back, whatever happens to the file in between."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.server import journal as module
from pipeinfer.server.errors import Failure
from pipeinfer.server.journal import Begun, ChoiceEnded, Journal, TokenRows, check
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.tools import ToolUse
from pipeinfer.strategies.decomposers.base import Specification

ASKED = EngineRequest(
    [[1, 2, 3]], ["é\n"], n=2, max_tokens=9, seed=2**62, stops=["\n\n"], logprobs=True,
    params=SamplingParams(temperature=0.7, logit_bias=((5, -1.5),), key=2**64 - 1),
    decompose=Specification("skeleton", (1, 2), "p", "s", True), tools=ToolUse([{"a": 1}], 2))
ROWS = [(7, True, -0.5, ((7, -0.5), (8, -3.0)), None), (9, False, None, (), b"\xff\x00")]
END = ChoiceEnded(1, 99.0, "stop", {"runs": 3}, Failure("timeout", "too long"), (0.1, 0.2))


def begun(name):
    return Begun(name, 17, "chat", "", "k", "d", "m", "x", ASKED)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def found(path):
    journal = Journal(path)
    try:
        return journal.read()
    finally:
        journal.close()


def test_what_is_written_comes_back(path):
    journal = Journal(path)
    entries = [begun("a"), TokenRows(1, ROWS[:1], "x"), TokenRows(1, ROWS[1:], "y"), END]
    for entry in entries:
        journal.add("a", entry)
    journal.add("b", begun("b"))
    journal.drop("b")
    journal.write(sync=True)
    assert journal.size > 0
    journal.close()
    assert check(str(path)) == path
    assert found(path) == {"a": entries}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_written_outlives_a_kill(path):
    """Also without a sync, and though the file was not closed."""
    program = (f"import os, pathlib; from tests.server.test_journal import *; "
               f"journal = Journal(pathlib.Path({str(path)!r})); journal.add('a', begun('a')); "
               "journal.write(); os.kill(os.getpid(), 9)")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert found(path) == {"a": [begun("a")]}


@pytest.mark.parametrize("data", [b"[options]\nport = 1\n", b"no line end", b"\0" * 40])
def test_another_file_is_left_alone(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    for opened in (lambda: found(path), lambda: check(str(path))):
        with pytest.raises(UsageError, match="not a journal of this version"):
            opened()
    assert path.read_bytes() == data


def test_another_database_is_left_alone(path):
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE a (b)")
    other.close()
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not a journal of this version"):
        found(path)


def test_who_may_read_it_and_who_has_it(path, monkeypatch, tmp_path):
    path.write_bytes(b"")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="no other user may read"):
        check(str(path))
    path.chmod(0o600)
    assert check(str(path)) == path
    program = (f"import pathlib, sys; from pipeinfer.server.journal import Journal; "
               f"journal = Journal(pathlib.Path({str(path)!r})); print(1, flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
        with pytest.raises(UsageError, match="in use by another server"):
            Journal(path)
        process.communicate(b"\n")
    with pytest.raises(UsageError, match="cannot be written"):
        check(str(tmp_path / "missing" / "journal"))
    with pytest.raises(UsageError, match="cannot be written"):
        check(str(tmp_path))


def test_a_full_disk_costs_nothing(path, caplog):
    journal = Journal(path)
    journal.add("a", begun("a"))
    journal.write(sync=True)
    (pages,) = journal._file.execute("PRAGMA page_count").fetchone()
    journal._file.execute(f"PRAGMA max_page_count = {pages}")
    rows = TokenRows(0, ROWS * 2000)
    journal.add("a", rows)
    journal.write()
    assert journal.problem == "database or disk is full"
    journal.add("a", END)
    journal.write()
    journal._file.execute("PRAGMA max_page_count = 100000")
    journal.write(sync=True)
    assert journal.problem == ""
    journal.close()
    assert found(path) == {"a": [begun("a"), rows, END]}
    assert caplog.text.count("is full") == 1
    assert "can be written again" in caplog.text
