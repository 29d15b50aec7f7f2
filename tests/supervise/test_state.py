"""The private folder of a supervisor, and who may command."""

from __future__ import annotations

import asyncio
import fcntl
import os
from types import SimpleNamespace

import pytest

from pipeinfer.errors import RequestError, UsageError
from pipeinfer.server import orders
from pipeinfer.server.orders import OrderServer, ServerState
from pipeinfer.supervise import state
from pipeinfer.supervise.commands import lines_of
from pipeinfer.supervise.keeper import Keeper
from pipeinfer.supervise.logs import Logs
from pipeinfer.supervise.state import Command, Down, Folder, Rescale, call
from pipeinfer.supervise.supervisor import Phase

DASHES = "-" * 74


@pytest.fixture
def folder(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)  # no name of a socket may be as long as this
    monkeypatch.setenv("PIPEINFER_STATE", str(long / "up"))
    long.mkdir()
    found = Folder("one")
    found.make()
    return found


def test_a_folder_that_others_could_write_to_is_refused(folder):
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.path.chmod(0o720)
    for use in (folder.make, folder.connect):
        with pytest.raises(UsageError, match="no other user may write to: chmod 700"):
            use()
    with pytest.raises(UsageError, match=r"'../x': use letters"):
        Folder("../x")


def test_the_folder_is_private_where_groups_may_write_to_new_ones(tmp_path, monkeypatch):
    """As on Debian and Ubuntu, where each user has a group of its own."""
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path / "state" / "up"))
    before = os.umask(0o002)
    try:
        for found in (Folder("one"), Folder("two", state.JOINED)):
            found.make()
            assert found.path.parent.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_only_one_supervisor_has_it(folder):
    other = Folder("one")
    assert not folder.alive
    assert folder.lock()
    assert not other.lock()
    assert other.alive
    with pytest.raises(UsageError, match=r"nothing is up here: .*; running: one"):
        Folder("two").connect()


def test_who_looks_at_it_keeps_nobody_from_locking_it(folder, monkeypatch):
    other = Folder("one")
    assert other.lock()
    os.close(other._lock)
    looking = os.open(folder.path / "lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert not folder.alive  # two may look
    monkeypatch.setattr(state, "time", SimpleNamespace(sleep=lambda _: os.close(looking)))
    assert folder.lock()


async def execute(command, tell):
    tell("wait")
    if not isinstance(command, Rescale):
        raise UsageError("who?")
    return {"ranks": command.ranks}


@pytest.mark.anyio
async def test_a_command_gets_what_is_said_and_one_answer(folder, monkeypatch):
    heard = []

    def told(command):
        return asyncio.to_thread(call, folder, heard.append, 10, command)

    server = OrderServer(Command, execute)
    await server.start(folder.listen())
    assert (folder.path / "control").stat().st_mode & 0o777 == 0o600
    assert (await told(Rescale(3)))["ranks"] == 3
    assert heard == ["wait"]
    for command, says in ((Down(), "who?"), (Rescale("bad"), "no such command: .*ranks")):
        with pytest.raises(RequestError, match=says):
            await told(command)
    monkeypatch.setattr(orders, "is_ours", lambda link: False)
    with pytest.raises(RequestError, match=r"ended before it answered|connection was lost"):
        await told(Rescale(3))
    await server.close()
    folder.unlisten()
    assert not (folder.path / "control").exists()
    with pytest.raises(UsageError, match="nothing is up here"):
        folder.connect()


def test_another_users_socket_is_not_spoken_to(folder, monkeypatch):
    with folder.listen():
        monkeypatch.setattr(state, "is_ours", lambda link: False)
        with pytest.raises(UsageError, match="belongs to another user"):
            folder.connect()


def test_logs_are_private_and_do_not_grow(folder, monkeypatch):
    shown = []
    monkeypatch.setattr("pipeinfer.supervise.logs.MOST_BYTES", 2000)
    logs = Logs(folder.path / "logs", lambda rank, text: shown.append((rank, text)))
    for number in range(200):
        logs.line(1, 2, f"line {number}")
    logs.line(1, None, "from the launcher")
    logs.close()
    files = {path.name: path for path in (folder.path / "logs").iterdir()}
    assert set(files) == {"rank-2.log", "rank-2.log.1", "rank-2.log.2", "rank-2.log.3",
                          "launcher.log"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files.values())
    assert all(path.stat().st_size <= 2000 for path in files.values())
    assert files["rank-2.log"].read_text().endswith(" line 199\n")
    assert shown[-1] == (None, "from the launcher")


def test_the_first_error_of_a_start_is_known(folder):
    logs = Logs(folder.path / "logs", lambda rank, text: None)
    for start in range(1, 8):
        for text in ("pipeinfer: note: x", f"pipeinfer: error: {start}", "pipeinfer: error: late"):
            logs.line(start, 0, text)
    logs.close()
    assert (logs.error(7), logs.error(5), logs.error(1), logs.error(8)) == ("7", "5", "", "")


def test_the_launchers_eight_lines_about_a_lost_machine_are_one(folder):
    said = []
    logs = Logs(folder.path / "logs", lambda rank, text: said.append(text))
    for text in (DASHES, "PRTE has lost communication with a remote daemon.", "",
                 "  HNP daemon   : [prterun-box-21589@0,0] on node box",
                 "  Remote daemon: [prterun-box-21589@0,1] on node old2", "",
                 "This is usually due to either a failure of the TCP network",
                 "connection to the node, or possibly an internal failure of",
                 "the daemon itself. We cannot recover from this failure, and",
                 "therefore will terminate the job.", DASHES, " \0", "something else"):
        logs.line(1, None, text)
    logs.line(1, 0, DASHES)
    logs.close()
    assert said == ["pipeinfer: the launcher has lost machine old2, so its job ends: see there "
                    "whether it runs and is connected", "something else", DASHES]
    assert "We cannot recover" in (folder.path / "logs" / "launcher.log").read_text()


def test_what_is_written_is_read(folder):
    assert folder.read() == {}
    folder.write({"pid": os.getpid()})
    assert folder.read() == {"pid": os.getpid()}
    (folder.path / "state.json").write_text("[")
    assert folder.read() == {}


def test_a_status_for_people():
    found = lines_of({
        "name": "a", "phase": "ready", "ready": True, "url": "http://h:1", "model": "m", "open": 2,
        "held": 0, "reason": "", "words": ["serve"], "pid": 7, "since": 0.0, "door_pid": 8,
        "ranks": 2, "wanted": 3, "lost": [1], "logs": "/l",
        "hosts": [{"host": "n1", "slots": 1, "state": "used", "why": ""},
                  {"host": "node2", "slots": 0, "state": "missing", "why": "does not answer"}],
        "starts": [{"at": 0.0, "ranks": 3, "exit": 137, "lived": 3.5, "moved": False,
                    "why": ""},
                   {"at": 5.0, "ranks": 3, "exit": 3, "lived": 3.0, "moved": False,
                    "why": "no such file"},
                   {"at": 7.0, "ranks": 3, "exit": 137, "lived": 2.0, "moved": False, "why": "",
                    "lost": "old2 is gone: it has left"},
                   {"at": 9.0, "ranks": 2, "exit": None}]})
    assert any(line.endswith("after 2 s old2 is gone: it has left") for line in found)
    assert found[0] == "a: ready at http://h:1, model m, 2 requests open"
    assert "  ranks     2 ranks of 3, lost: 1" in found
    assert "  host      node2  missing: does not answer" in found
    assert any(line.endswith("3 ranks, after 3.5 s exit code 137: killed by signal 9 (SIGKILL), "
                             "maybe by the kernel for want of memory") for line in found)
    assert any(line.endswith("after 3 s exit code 3: no such file") for line in found)

def test_down_twice_ends_no_request_that_runs(tmp_path, monkeypatch):
    """An impatient user, or a script, says it again."""
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path))
    keeper = Keeper(SimpleNamespace(environ={}), Folder("one"), print, restarts=0, left=("", []),
                    every=0, auto=False)
    supervisor = keeper._supervisor
    supervisor._job = SimpleNamespace(interrupt=lambda *, at_once: asked.append(at_once))
    monkeypatch.setattr(supervisor, "_changed", lambda: None)
    asked = []
    for command in (Down(), Down(), Down(now=True)):
        asyncio.run(keeper._execute(command, print))
    assert asked == [False, True]


@pytest.mark.parametrize(("wanted", "used"), [("", []), ("b", [["serve", "-m", "b"]])])
def test_a_job_that_sleeps_wakes_with_the_model_that_is_asked_for(tmp_path, monkeypatch, wanted,
                                                                  used):
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path))
    taken = []
    keeper = Keeper(SimpleNamespace(environ={}, use=taken.append), Folder("one"), print, restarts=0,
                    left=("", []), every=0, auto=False, models={"b": ["serve", "-m", "b"]})
    keeper._supervisor.phase = Phase.ASLEEP
    keeper._http = SimpleNamespace(pid=1)
    keeper._seen = ServerState(state="asleep")
    asyncio.run(keeper._sleep_if_quiet())
    assert not keeper._supervisor._wake.is_set()
    keeper._seen = ServerState(state="asleep" if wanted else "restarting", wanted=wanted)
    asyncio.run(keeper._sleep_if_quiet())
    assert keeper._supervisor._wake.is_set()
    assert taken == used
