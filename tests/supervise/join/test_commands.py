"""What the commands about machines that join take."""

from __future__ import annotations

import subprocess

import pytest
from click.testing import CliRunner

from pipeinfer.errors import RequestError, UsageError
from pipeinfer.supervise.join import commands
from pipeinfer.supervise.join.commands import address_of
from pipeinfer.supervise.state import JOINED, Folder


@pytest.mark.parametrize(("text", "host", "port"), [
    ("192.0.2.1", "192.0.2.1", 7700), ("192.0.2.1:80", "192.0.2.1", 80), ("box", "box", 7700),
    ("fd00::1", "fd00::1", 7700), ("[fd00::1]", "fd00::1", 7700), ("[fd00::1]:80", "fd00::1", 80),
    (":80", "", 80)])
def test_addresses_of_heads(text, host, port):
    assert address_of(text) == (host, port)


@pytest.mark.parametrize("text", ["box:", "box:http", "box:65536", "[fd00::1]x", "box:-1"])
def test_addresses_that_are_none(text):
    with pytest.raises(UsageError, match="ADDRESS:PORT"):
        address_of(text)


def test_leave_ends_no_process_that_has_got_the_number_of_an_agent(tmp_path, monkeypatch):
    """On a full disk the state is that of an earlier agent."""
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path))
    folder = Folder("192.0.2.1-7700", JOINED)
    folder.make()
    assert folder.lock()
    other = subprocess.Popen(["sleep", "60"])
    try:
        for state in ({"pid": other.pid}, {}):
            folder.write(state)
            found = CliRunner().invoke(commands.leave_command, []).exception
            assert isinstance(found, RequestError)
            assert "has not ended: Ctrl-C" in str(found)
            assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(("command", "says"), [
    ("echo 'off", "No closing quotation"), ("no-such-program now", "there is no program no-such")])
def test_a_command_to_sleep_that_cannot_run_is_refused(tmp_path, monkeypatch, command, says):
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path))
    found = CliRunner().invoke(commands.join_command, [
        "192.0.2.1", "--sleep-command", command]).exception
    assert isinstance(found, UsageError)
    assert says in str(found)
