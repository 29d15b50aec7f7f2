"""What killed launchers left behind: deleted when it is surely theirs, ours and dead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from pipeinfer.cluster.cleanup import VARIABLE, clear_sessions, end, processes_of

HOST = socket.gethostname().split(".")[0]


def session(folder, name, host=HOST):
    path = folder / name
    (path / "1").mkdir(parents=True)
    (path / f"pmix.{host}.tool").write_text("x")
    (path / f"pmix.{host}.tool.17").write_text("x")
    return path


@pytest.fixture
def dead():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_directories_of_dead_launchers_go(tmp_path, dead):
    made = {session(tmp_path, f"{kind}.{dead}") for kind in ("ompi", "prted", "prterun", "prte")}
    assert set(clear_sessions(tmp_path)) == made
    assert list(tmp_path.iterdir()) == []


def test_others_stay(tmp_path, dead):
    stay = [session(tmp_path, f"ompi.{os.getpid()}"), session(tmp_path, f"ompi.{dead}", "other"),
            session(tmp_path, f"ompi.{dead}0x"), session(tmp_path, f"mine.{dead}")]
    (tmp_path / f"prte.{dead}").write_text("a file")
    (tmp_path / f"prted.{dead}").mkdir()
    (tmp_path / "elsewhere").mkdir()
    theirs = session(tmp_path / "elsewhere", f"ompi.{dead}")
    (tmp_path / f"prterun.{dead}").symlink_to(theirs)
    assert clear_sessions(tmp_path) == []
    assert all(path.exists() for path in [*stay, theirs])


@pytest.mark.parametrize("folder", ["nothing here", "."])
def test_a_folder_without_any(tmp_path, folder):
    assert clear_sessions(tmp_path / folder) == []


def test_of_another_user_stays(tmp_path, dead, monkeypatch):
    path = session(tmp_path, f"ompi.{dead}")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert clear_sessions(tmp_path) == []
    assert path.exists()


def test_processes_that_start_others_meanwhile_leave_none():
    job = f"test-cleanup-{os.getpid()}"
    forking = "while :; do (sleep 0.05; exec sleep 60) & sleep 0.004; done"
    for _ in range(3):
        process = subprocess.Popen(["sh", "-c", forking], env=os.environ | {VARIABLE: job},
                                   start_new_session=True)
        try:
            time.sleep(0.5)
        finally:
            killed = end(job)
            left = processes_of(job)
            while end(job):
                pass
        assert process.wait(10) < 0
        assert process.pid in killed
        assert left == []
