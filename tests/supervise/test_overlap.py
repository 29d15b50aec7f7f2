"""Whether the next job loads beside the old one: what memory allows, who goes on."""

from __future__ import annotations

import pytest

from pipeinfer import host
from pipeinfer.cli import doctor_hosts
from pipeinfer.cli.doctor_hosts import HostAnswer
from pipeinfer.cli.options import parse
from pipeinfer.models.bundled import EMBEDDED
from pipeinfer.nodes import HostEntry, NodeSettings, RankInfo
from pipeinfer.supervise import room
from pipeinfer.supervise.hosts import Roster
from pipeinfer.supervise.overlap import RESERVE, Room, choose, inherits

GIB = 1 << 30


@pytest.mark.parametrize(("overlap", "rooms", "unknown", "both", "says"), [
    ("auto", [Room("a", 9 * GIB, 4 * GIB), Room("b", 5 * GIB, 4 * GIB)], "", True, "b has 5.0"),
    ("auto", [Room("a", 9 * GIB, 4 * GIB), Room("b", 4.8 * GIB, 4 * GIB)], "", False,
     "b has 4.8 GiB free, the next job needs 4.9 there"),
    ("auto", [Room("a", RESERVE, 0.0)], "", True, "a has 0.5"),
    ("auto", [Room("a", 9 * GIB, 1.0), Room("b", 0, 1.0)], "", False, "is not known on b"),
    ("auto", [Room("a", 9 * GIB, None)], "", False, "what its ranks need is not known on a"),
    ("auto", [], "memory of GPUs is not asked for", False, "GPUs"),
    ("always", [Room("a", 1.0, 4 * GIB)], "", True, "--overlap always"),
    ("never", [Room("a", 9 * GIB, 1.0)], "", False, "--overlap never")])
def test_where_memory_allows_it(overlap, rooms, unknown, both, says):
    choice = choose(overlap, rooms, unknown)
    assert choice.both is both
    assert says in choice.why


@pytest.mark.parametrize(("reachable", "same", "count", "force", "takes"), [
    (True, True, 3, False, True), (True, False, 3, False, False), (True, False, 0, False, True),
    (True, False, 3, True, True), (False, True, 0, False, False)])
def test_who_follows_a_job_that_dies_while_the_next_one_loads(reachable, same, count, force, takes):
    assert inherits(reachable=reachable, same=same, open_requests=count, force=force) is takes


def needs(config, names):
    return room.needs(config, [RankInfo(rank, name) for rank, name in enumerate(names)])


def job(*words):
    return parse([*words], "model", "cluster", "speculation").config.job


def test_what_ranks_need_by_host():
    embedded = job("-c", "512")
    alone = needs(embedded, ["a"])["a"]
    assert alone > room.RANK
    two = needs(embedded, ["a", "b"])
    assert two["a"] < two["b"]  # the layers are at b
    more = needs(job("-c", "2048"), ["a", "b"])
    assert more["b"] > two["b"]
    four = needs(embedded, ["a", "a", "a", "a"])
    assert four["a"] > needs(embedded, ["a", "a"])["a"] + 2 * room.RANK


def test_drafts_need_memory_where_they_are_and_hold_no_layers():
    embedded = job("-c", "512")
    two, own = needs(embedded, ["a", "b"]), NodeSettings(draft=str(EMBEDDED / "draft.gguf"))
    found = room.needs(embedded, [RankInfo(0, "a"), RankInfo(1, "b"), RankInfo(
        2, "c", settings=own)])
    assert room.RANK < found["c"] < found["b"] == two["b"]
    moved = needs(job("-c", "512", "--draft-ranks", "1"), ["a", "b", "c"])
    assert (moved["a"], moved["b"], moved["c"]) == (room.RANK, two["b"], two["a"])


def test_layers_on_gpus_need_their_memory_and_not_the_hosts():
    names, there = ["a", "b"], room.GPUS.format("b")
    plain, found = needs(job(), names), needs(job("-ngl", "99"), names)
    assert found["b"] == room.RANK
    assert found[there] > plain["b"] - room.RANK > 0
    partly = needs(job("-ngl", "6"), names)
    assert (partly["b"] > room.RANK, 0 < partly[there] < found[there]) == (True, True)
    assert found["a"] >= plain["a"]  # the draft
    drafts = needs(job("-ngld", "99"), names)
    assert drafts[room.GPUS.format("a")] == plain["a"] - room.RANK
    assert drafts["a"] == room.RANK


def test_the_memory_of_a_hosts_gpus_is_compared(monkeypatch):
    entries = [HostEntry("a", 1, 1), HostEntry("b", 1, 2)]
    roster = Roster("hosts", "openmpi", None, used=entries)
    asked = []

    def answers(entry, question=""):
        asked.append((entry.host, question))
        return HostAnswer(entry, {"free": 7 if question else 9})

    monkeypatch.setattr(doctor_hosts, "ask", answers)
    rooms, _ = room.rooms(job("-ngl", "99"), 2, roster)
    assert [(one.host, one.free) for one in rooms] == [
        ("a", 9), ("b", 9), (room.GPUS.format("b"), 7)]
    assert [name for name, question in asked if question] == ["b"]


def test_what_is_not_known(tmp_path):
    rooms, why = room.rooms(job("--backend", "torch"), 2, None)
    assert (rooms, why) == ([], "memory of GPUs is not asked for where torch computes")
    rooms, why = room.rooms(job("-m", str(tmp_path / "none.gguf")), 2, None)
    assert rooms == []
    assert "none.gguf" in why
    (found,), why = room.rooms(job(), 2, None)
    assert (found.host, why) == (room.HERE, "")
    assert found.free == pytest.approx(host.free_memory(), rel=0.5)


def test_pages_that_somebody_has_mapped_are_not_free(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\nMapped:  2000 kB\nHuge: 0\n")
    assert host.free_memory(path) == 3000 * 1024
    path.write_text("MemTotal: 9000 kB\n")
    assert host.free_memory(path) == 0
