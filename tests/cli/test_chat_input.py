"""Standard input of `pipeinfer chat`, of every kind, and through a launcher."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys

import pytest

from pipeinfer.cli.terminal import note_forwarded_input
from tests.kit import launch
from tests.kit.sample import mostly_full

READER = """
from pipeinfer.cli.chat_terminal import own_terminal
lines, out = own_terminal()
while (line := lines.next("> ", out.write)) is not None:
    out.write(ascii(line) + "\\n")
out.flush()
"""


def read(data=None, **streams):
    """What the reader reads from standard input, and its errors."""
    with subprocess.Popen(
            [sys.executable, "-P", "-c", READER],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
               **streams}, env=launch.environment()) as process:
        out, err = process.communicate(data, timeout=30)
    return out.decode().splitlines(), err


def lines_of(said):
    return [ascii(line) for line in said]


LONG = "x" * 300_000
INPUTS = {
    "a line": (b"hi\n", ["hi"]), "no end": (b"hi", ["hi"]), "nothing": (b"", []),
    "a command": (b"/quit\n", ["/quit"]), "an empty line": (b"\nhi\n", ["", "hi"]),
    "another system's ends": (b"one\r\ntwo\r\n", ["one", "two"]),
    "no UTF-8": (b"\xff\xe4\n", ["\ufffd\ufffd"]), "zeros": (b"a\0b\n", ["a\0b"]),
    "more than a pipe holds": (f"{LONG}\nend\n".encode(), [LONG, "end"]),
    "a sign across pieces": (b"y" * 65_535 + "漢\n".encode(), ["y" * 65_535 + "漢"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_full(INPUTS, "a line", "nothing", "more than a pipe holds"))
def test_all_of_a_pipe_arrives_and_then_its_end(name):
    data, lines = INPUTS[name]
    found, err = read(data)
    assert found == lines_of(lines), err


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_full(
    ["null", "empty", "file", "rest", "socket", "terminal"], "null", "rest", "terminal"))
def test_other_kinds_of_standard_input(kind, tmp_path):
    file = tmp_path / "input"
    file.write_bytes(b"" if kind == "empty" else b"one\ntwo\n")
    wanted, ours = ["one", "two"], None
    with contextlib.ExitStack() as stack:
        if kind in ("socket", "terminal"):  # as over ssh; with output in a file
            if kind == "socket":
                ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
                source = theirs.fileno()
                ours.sendall(b"one\ntwo\n")
                ours.shutdown(socket.SHUT_WR)
            else:
                master, source = pty.openpty()
                stack.callback(os.close, master)
                stack.callback(os.close, source)
                os.write(master, b"one\ntwo\n\x04")
            streams = {"stdin": source}
        else:
            source = stack.enter_context(open(os.devnull if kind == "null" else file, "rb"))
            wanted = [] if kind in ("null", "empty") else wanted
            if kind == "rest":
                os.lseek(source.fileno(), 4, os.SEEK_SET)
                wanted = ["two"]
            streams = {"stdin": source}
        found, err = read(**streams)
    if kind == "terminal":  # there it asks for each line
        found = [line.removeprefix("> ") for line in found[:-1]]
    assert found == lines_of(wanted), err


@pytest.mark.parametrize(("variables", "noted"), [
    ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, True),
    ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True),
    ({"PMI_SIZE": "4", "PMI_RANK": "0"}, False), ({}, False)])
def test_a_plain_launcher_that_may_not_end_is_noted(monkeypatch, capsys, variables, noted):
    for name in ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    note_forwarded_input("launch/run")
    assert ("may hang after forwarding" in capsys.readouterr().err) == noted
