"""Whether the next job loads beside the old one: what memory allows, who goes on."""

from __future__ import annotations

import pytest

from pipeinfer import host
from pipeinfer.cli.options import parse
from pipeinfer.supervise import room
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


def job(*words):
    return parse([*words], "model", "cluster", "speculation").config.job


def test_what_ranks_need_by_host():
    embedded = job("-c", "512")
    alone = room.needs(embedded, ["a"])["a"]
    assert alone > room.RANK
    two = room.needs(embedded, ["a", "b"])
    assert two["a"] < two["b"]  # the layers are at b
    more = room.needs(job("-c", "2048"), ["a", "b"])
    assert more["b"] > two["b"]
    four = room.needs(embedded, ["a", "a", "a", "a"])
    assert four["a"] > room.needs(embedded, ["a", "a"])["a"] + 2 * room.RANK


def test_what_is_not_known(tmp_path):
    rooms, why = room.rooms(job("-ngl", "4"), 2, None)
    assert (rooms, why) == ([], "memory of GPUs is not asked for")
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
