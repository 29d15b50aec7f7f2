"""The journal's file: what is written comes back, whatever happens to the file in between."""

from __future__ import annotations

import errno
import logging
import os
import stat
import zlib

import msgspec
import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.server import journal as module
from pipeinfer.server.errors import Failure
from pipeinfer.server.journal import (
    Begun,
    ChoiceEnded,
    Gone,
    Journal,
    Record,
    Story,
    TokenRows,
    check,
)
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.tools import ToolUse
from pipeinfer.strategies.decomposers.base import Specification

ASKED = EngineRequest(
    [[1, 2, 3]], ["é\n"], n=2, max_tokens=9, seed=2**62, stops=["\n\n"], logprobs=True,
    params=SamplingParams(temperature=0.7, logit_bias=((5, -1.5),), key=2**64 - 1),
    decompose=Specification("skeleton", (1, 2), "p", "s", True))
ROWS = [(7, True, -0.5, ((7, -0.5), (8, -3.0)), None), (9, False, None, (), b"\xff\x00")]


def begun(name, **changes):
    fields = {"id": name, "at": 17, "kind": "chat", "owner": "", "key": "k", "body": "d",
              "model": "m", "bits": "x", "asked": ASKED,
              "tools": ToolUse([{"a": 1}], 2), **changes}
    return Begun(**fields)


def end(name, choice=0, count=2, at=99.0, **changes):
    return ChoiceEnded(**{"id": name, "choice": choice, "at": at, "count": count, "reason": "stop",
                    "stats": {"runs": 3}, "failure": None, "seconds": (0.1, 0.2), **changes})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def written(path, *entries):
    """A journal with these entries, closed."""
    journal, records = Journal(path), {}
    records = journal.read()
    for entry in entries:
        if isinstance(entry, Begun):
            records[entry.id] = Record(entry, [Story(), Story()])
        journal.hold(records[entry.id], entry)
    journal.close()


def found(path):
    journal = Journal(path)
    try:
        return journal.read()
    finally:
        journal.close()


def test_what_is_written_comes_back(path):
    written(path, begun("a"), TokenRows("a", 1, 0, ROWS[:1], "x"), begun("b"),
            TokenRows("a", 1, 1, ROWS[1:], "y"), end("a", 1), Gone("b"),
            end("a", 0, 0, failure=Failure("timeout", "too long")))
    assert check(str(path)) == path
    (record,) = found(path).values()
    assert record.begun == begun("a")
    assert record.begun.asked == ASKED
    assert record.stories[1].rows == ROWS
    assert record.stories[1].bits == "y"
    assert record.stories[1].end == end("a", 1)
    assert record.stories[0].end.failure == Failure("timeout", "too long")
    assert record.ended == 99.0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_end_costs_only_what_was_torn(path, cut):
    written(path, begun("a"), TokenRows("a", 0, 0, ROWS[:1]), TokenRows("a", 0, 1, ROWS[1:]))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert found(path)["a"].stories[0].rows == ROWS[:1]
    assert not path.with_name("journal.damaged").exists()
    written(path)  # what was mended can be written on
    assert found(path)["a"].stories[0].rows == ROWS[:1]


def test_a_damaged_line_is_passed_over_and_the_file_is_kept(path, caplog):
    written(path, begun("a"), TokenRows("a", 0, 0, ROWS[:1]), TokenRows("a", 0, 1, ROWS[1:]),
            end("a"), begun("b"), TokenRows("b", 0, 0, ROWS))
    data = bytearray(path.read_bytes())
    data[data.index(b'"tokens"')] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        records = found(path)
    assert "1 damaged lines are passed over" in caplog.text
    story = records["a"].stories[0]
    assert story.rows == []  # what follows a gap comes again, and so does the end
    assert story.end is None
    assert records["b"].stories[0].rows == ROWS
    kept = path.with_name("journal.damaged")
    assert kept.read_bytes() == data
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert found(path)["b"].stories[0].rows == ROWS


@pytest.mark.parametrize("data", [b"[options]\nport = 1\n", b"no line end", b"\0" * 40])
def test_another_file_is_left_alone(path, data):
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="not a journal of pipeinfer"):
        found(path)
    with pytest.raises(UsageError, match="not a journal of pipeinfer"):
        check(str(path))  # before anything starts
    assert path.read_bytes() == data


def test_a_later_format_is_left_alone(path):
    body = msgspec.json.encode(module.JournalHead(module.VERSION + 1))
    data = b"%08x %s\n" % (zlib.crc32(body), body)
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(UsageError, match=r"has format 2; .* reads 1"):
        found(path)
    assert path.read_bytes() == data


def test_who_may_read_it_and_who_has_it(path, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    path.write_bytes(b"")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="no other user may read"):
        check(str(path))
    path.chmod(0o600)
    assert check(str(path)) == path
    journal = Journal(path)
    with pytest.raises(UsageError, match="in use by another server"):
        Journal(path)
    journal.close()
    with pytest.raises(UsageError, match="cannot be written"):
        check(str(tmp_path / "missing" / "journal"))
    with pytest.raises(UsageError, match="cannot be written"):
        check(str(tmp_path))


def test_a_full_disk_costs_nothing_that_was_there(path, monkeypatch, caplog):
    journal = Journal(path)
    journal.read()
    first = Record(begun("a"), [Story(list(ROWS)), Story()])
    for entry in first.entries():
        journal.hold(first, entry)
    journal.flush()
    before = path.read_bytes()
    real, full = os.write, True

    def write(file, data):
        if not full:
            return real(file, data)
        if len(data) > 20:
            return real(file, data[:20])  # a part still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    second = Record(begun("b"), [Story(), Story()])
    journal.hold(second, second.begun)
    journal.flush()
    assert journal.problem == "No space left on device"
    assert path.read_bytes() == before
    journal.replace(journal.render([first, second]))  # which does not fit either
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    journal.hold(second, TokenRows("b", 0, 0, ROWS))
    second.stories[0].rows = list(ROWS)
    journal.flush()
    full = False
    journal.remember()
    made = journal.render([first.copy(), second.copy()])
    journal.hold(second, end("b"))
    journal.flush()  # while the new file was made
    journal.replace(made)
    assert (journal.problem, journal.size) == ("", path.stat().st_size)
    journal.close()
    assert caplog.text.count("No space left on device") == 1
    assert "can be written again" in caplog.text
    records = found(path)
    assert records["a"].stories[0].rows == records["b"].stories[0].rows == ROWS
    assert records["b"].stories[0].end == end("b")
