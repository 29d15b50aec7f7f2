"""Which hosts a job gets: those that answer, as many ranks as wanted."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from pipeinfer.cli import doctor_hosts
from pipeinfer.errors import UsageError
from pipeinfer.host import SECRET_NAMES
from pipeinfer.supervise.hosts import Roster, others
from pipeinfer.supervise.job import SupervisedJob
from pipeinfer.supervise.launcher import Launcher

OWN = doctor_hosts._own_facts()


@pytest.fixture
def answering(monkeypatch):
    """Names of the hosts that answer."""
    names = {"head"}

    def ask(entry):
        if entry.host in names:
            return doctor_hosts.HostAnswer(entry, OWN | {"host": entry.host, "cores": 64})
        return doctor_hosts.HostAnswer(entry, {}, "does not answer", "switch it on")

    monkeypatch.setattr(doctor_hosts, "ask", ask)
    return names


@pytest.fixture
def files(tmp_path):
    """A hostfile, and the file that a roster writes for the launcher."""
    return tmp_path / "hosts", tmp_path / "out"


def test_a_job_starts_on_the_hosts_that_answer(files, answering):
    hosts, out = files
    hosts.write_text("head slots=2\nann@b slots=3\nc\n")
    roster = Roster(str(hosts), "openmpi", out, 4)
    notes = roster.ask()
    assert [note.partition(" does")[0] for note in notes] == [
        "note: host b", "note: host c", "2 ranks instead of 4"]
    assert {host: one.detail for host, one in roster.place.gone.items()} == dict.fromkeys(
        "bc", "does not answer")
    assert (roster.place.ranks, roster.wanted, out.read_text()) == (2, 4, "head slots=2\n")
    assert [entry.host for entry in roster.missing] == ["b", "c"]
    answering.add("b")
    roster.ask()
    assert (roster.place.ranks, roster.missing) == (4, [])
    assert [entry.host for entry in roster.place.used] == ["head", "b"]
    assert others(str(out)) == ["head", "ann@b"]
    answering.remove("head")
    with pytest.raises(UsageError, match="host head, on which rank 0 runs, does not answer"):
        roster.ask()


@pytest.mark.parametrize(("kind", "lines"), [
    ("openmpi", "head slots=1\n2001:db8::2 slots=2\nann@2001:db8::9 slots=2\n"),
    ("hydra", "head:1\n[2001:db8::2]:2\n[2001:db8::9]:2 user=ann\n")])
def test_addresses_of_ipv6_are_whole_for_every_launcher(files, answering, kind, lines):
    hosts, out = files
    answering |= {"2001:db8::2", "2001:db8::9"}
    hosts.write_text("head slots=1\n2001:db8::2 slots=2\nann@2001:db8::9 slots=2\n")
    Roster(str(hosts), kind, out).ask()
    assert out.read_text() == lines
    assert others(str(out)) == ["head", "2001:db8::2", "ann@2001:db8::9"]


def test_hosts_that_were_added_are_missing_until_they_are_used(files, answering):
    hosts, out = files
    hosts.write_text("head\n")
    roster = Roster(str(hosts), "hydra", out)
    roster.ask()
    assert (roster.place.ranks, roster.missing) == (1, [])
    hosts.write_text("head\nnew slots=2\n")
    answering.add("new")
    assert ([entry.host for entry in roster.missing], roster.wanted) == (["new"], 3)
    roster.ask()
    assert roster.place.ranks == 3
    hosts.write_text("head\nbroken slots=\n")
    assert (roster.missing, roster.wanted) == ([], 3)


def test_on_a_full_disk_the_hosts_of_before_stay(files, answering):
    hosts, out = files
    hosts.write_text("head slots=2\nb slots=3\n")
    roster = Roster(str(hosts), "openmpi", out)
    roster.ask()
    answering.add("b")
    out.with_name("out.new").symlink_to("/dev/full")
    with pytest.raises(UsageError, match=r"cannot write .*out: No space left on device"):
        roster.ask()
    assert (out.read_text(), roster.place.ranks) == ("head slots=2\n", 2)


@pytest.mark.parametrize("kind", ["openmpi", "hydra"])
def test_keys_go_to_no_other_host(kind, tmp_path):
    secrets = {*SECRET_NAMES, "PIPEINFER_API_KEY", "PIPEINFER_JOIN_TOKEN", "HF_TOKEN"}
    environ = {"PIPEINFER_CACHE": "/c"} | dict.fromkeys(secrets, "secret")
    words = Launcher("/opt/bin/mpirun", kind).command(
        4, ["serve"], environ, hosts=str(tmp_path / "hosts"))
    assert any("PIPEINFER_CACHE" in word for word in words)
    assert not any(name in word for word in words
                   for name in (*secrets, "secret"))


RANK = """
import json, os
from pipeinfer import host
before = json.dumps(dict(os.environ))
host.take_secrets()
print(json.dumps(["sesame" in before, os.environ.get("PIPEINFER_API_KEY"),
                  os.environ.get("HF_TOKEN"), "PIPEINFER_SECRETS" in os.environ]))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_no_launcher_has_keys_and_rank_0_gets_them(rank, tmp_path, monkeypatch):
    """The launcher is a rank here: whatever it has, it may give to every rank (MPICH's does)."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = []
    environ = os.environ | {"PIPEINFER_API_KEY": "sesame", "HF_TOKEN": "sesame 2",
                            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
    job = SupervisedJob([sys.executable, "-c", RANK], environ, lambda _, text: said.append(text))
    asyncio.run(job.run())
    assert json.loads(said[-1]) == [
        False, *(["sesame", "sesame 2"] if rank == 0 else [None, None]), False]
    assert list(tmp_path.iterdir()) == []
