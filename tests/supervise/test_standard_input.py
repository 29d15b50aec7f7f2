"""Standard input on its way to `pipeinfer chat` under a launch script, without ranks: the program
that reads stands in rank 0's place."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys

import pytest

from pipeinfer.cli.chat_terminal import own_terminal
from pipeinfer.cli.terminal import note_forwarded_input
from pipeinfer.errors import UsageError
from tests.rig import launch
from tests.support.sample import mostly_full

READER = """
from pipeinfer.cli.chat_terminal import own_terminal
with own_terminal() as (lines, out):
    while (line := lines.next("> ", out.write)) is not None:
        out.write(ascii(line) + "\\n")
    out.flush()
"""
EMBEDDED = launch.ROOT / "pipeinfer" / "models" / "embedded"


def supervised(*words, **streams):
    """Start `words` as `pipeinfer run` starts mpirun."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", launch.SUPERVISED, *words],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
           **streams}, env=launch.environment(), start_new_session=True)


@contextlib.contextmanager
def reader(**streams):
    process = supervised(sys.executable, "-c", READER, "chat", **streams)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


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
    with reader() as process:
        out, err = process.communicate(data, timeout=30)
    assert out.decode().splitlines() == lines_of(lines), err


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_full(
    ["null", "empty", "file", "rest", "socket", "terminal", "closed"], "null", "rest", "terminal"))
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
        elif kind == "closed":
            streams, wanted = {"stdin": None, "preexec_fn": lambda: os.close(0)}, []
        else:
            source = stack.enter_context(open(os.devnull if kind == "null" else file, "rb"))
            wanted = [] if kind in ("null", "empty") else wanted
            if kind == "rest":
                os.lseek(source.fileno(), 4, os.SEEK_SET)
                wanted = ["two"]
            streams = {"stdin": source}
        process = stack.enter_context(reader(**streams))
        out, err = process.communicate(timeout=30)
    assert out.decode().splitlines() == lines_of(wanted), err


@pytest.mark.parametrize("variable", ["PIPEINFER_INPUT", "PIPEINFER_TERMINAL"])
@pytest.mark.parametrize(("place", "says"), [
    ("elsewhere:/dev/pts/0", "put elsewhere on the first line"),
    (f"{socket.gethostname()}:/no/such/place", "No such file or directory; start the job again"),
])
def test_input_that_cannot_be_had_is_an_error(monkeypatch, variable, place, says):
    monkeypatch.setenv(variable, place)
    with pytest.raises(UsageError, match=says), own_terminal():
        pass


@pytest.mark.slow
def test_a_request_to_end_ends_a_conversation_that_waits():
    process = supervised(
        sys.executable, "-P", "-m", "pipeinfer", "chat", "-m", str(EMBEDDED / "target.gguf"),
        "-n", "4", "--temp", "0", bufsize=0)
    try:
        process.stdin.write(b"def fib(n):\n")
        assert process.stdout.read(1)
        process.send_signal(signal.SIGTERM)  # once, as `timeout` does
        _, err = process.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 130, err
    assert b"Traceback" not in err


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
