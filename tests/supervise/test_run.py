"""`pipeinfer run`: the command line that its launcher gets; tests/mpi/test_launchers.py has real
jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from pipeinfer.errors import ClusterError
from pipeinfer.supervise.launcher import find
from tests.kit import launch
from tests.kit.served import serve

COMMAND = [sys.executable, "-m", "pipeinfer", "run"]


@pytest.fixture
def said(tmp_path):
    """Calls `pipeinfer run` with a launcher that prints its settings and words."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\ncase "$*" in --version) echo "Open MPI 5.0"; exit ;; esac\n'
                      'echo "$PIPEINFER_NODES"; echo "$@"\n'
                      'for one; do case "$one" in */pipeinfer-*) cat "$one" ;; esac; done\n')
    mpirun.chmod(0o755)

    def call(*words, **more):
        return launch.run(1, [*COMMAND, *words], PIPEINFER_MPIRUN=str(mpirun), **more)
    return call


def test_the_hosts_and_their_settings(said, tmp_path):
    hosts, nodes = tmp_path / "hosts", tmp_path / "hosts.toml"
    hosts.write_text("localhost slots=3\n")
    nodes.write_text("")
    done = said("--hosts", str(hosts), "-np", "2", "doctor", PIPEINFER_API_KEY="secret")
    lines = done.stdout.splitlines()
    assert lines[0] == str(nodes), done.stderr
    assert "-np 2 " in lines[1]
    assert lines[1].endswith(" doctor")
    assert "PIPEINFER_API_KEY" not in lines[1]
    assert "localhost slots=3" in lines[2:]
    assert " -np 3 " in said("--hosts", str(hosts), "doctor").stdout


@pytest.mark.parametrize("words", [("-f", "-"), ("--file", "-"), ("--file=-",), ("-f-",)])
def test_standard_input_goes_through_a_file(said, words):
    done = said("-np", "2", "generate", *words, stdin="long text")
    assert not done.stdout.splitlines()[1].endswith("-")
    assert (words != ("-f", "-")) or done.stdout.endswith("long text")


def test_a_server_that_ends_by_itself_was_killed(said):
    """A launcher returns 0 for ranks that were killed before they had met."""
    done = said("-np", "2", "serve")
    assert done.returncode == ClusterError.exit_code
    assert "were they killed" in done.stderr
    assert said("-np", "2", "serve", "--help").returncode == 0
    assert said("-np", "2", "generate").returncode == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_the_last_line_after_an_interrupt(signals):
    """Also after a second one amid an answer, which ends the ranks before they can say so."""
    with serve(2, command=[*COMMAND, "-np", "2"]) as served:
        served.wait_until_ready()
        body = json.dumps({"prompt": "def f(", "max_tokens": 20_000, "stream": True,
                           "ignore_eos": True}).encode()
        with urlopen(Request(f"{served.url}/v1/completions", body,
                             {"Content-Type": "application/json"}), timeout=30) as answer:
            answer.readline()
            for _ in range(signals):
                os.killpg(served.process.pid, signal.SIGINT)
                served.until(lambda: "a second signal" in "".join(served.log), "the note")
        served.end()
        assert served.log.count("pipeinfer: stopped\n") == 1, served.log


def test_settings_of_an_old_cluster_are_named_in_the_last_line(tmp_path):
    file = tmp_path / ".openmpi" / "mca-params.conf"
    file.parent.mkdir()
    file.write_text("# the old cluster\nbtl = openib,self\nmpi_show = 1\n pml=ucx\n")
    done = launch.run(1, [*COMMAND, "-np", "2", "generate", "-p", "x"], HOME=str(tmp_path))
    assert done.returncode not in (0, 2)
    assert done.stderr.rstrip().splitlines()[-1].endswith(
        f"remove {file}, line 2 (btl = openib,self); {file}, line 4 (pml=ucx)")


def test_of_two_launchers_that_of_this_installation_is_taken(tmp_path, monkeypatch):
    own = Path(sys.executable).with_name("mpirun")
    if not own.exists():
        pytest.skip("this installation has no launcher of its own")
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho Open MPI 4.1.0\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = [find(environ) for environ in ({}, {"PIPEINFER_MPIRUN": str(other)})]
    assert [one.path for one in found] == [str(own), str(other)]


@pytest.mark.parametrize(("text", "ranks", "says"), [
    ("localhost\n", "2", "1 slots"), ("localhost\n", "x", "'x' is not a valid integer"),
    ("localhost\n", "0", "not in the range"), ("localhost\nlocalhost\n", "1", "listed twice")])
def test_what_cannot_be_started_is_told(said, tmp_path, text, ranks, says):
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    done = said("--hosts", str(hosts), "-np", ranks, "doctor")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
