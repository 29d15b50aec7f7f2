"""What a model or another server writes never drives the terminal; a pipe gets it unchanged."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeinfer.cli import terminal
from pipeinfer.cli.chat_terminal import Plain
from tests.kit import launch
from tests.kit.references import TARGET

#: into the clipboard, a link that hides its target, clear, the same by C1, backspaces
HOSTILE = "A\x1b]52;c;QUJD\x07B\x1b]8;;http://x\x1b\\C\x1b[2JD\x9b2JE\x08\x08F\nG"
SHOWN = "A]52;c;QUJDB]8;;http://x\\C[2JD2JEF\nG"
GRAMMAR = 'root ::= "' + "".join(
    f"\\x{ord(char):02x}" if char < " " or char == "\\" else
    f"\\u{ord(char):04x}" if char > "~" else char for char in HOSTILE) + '"'
GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-m", str(TARGET), "-p", "x",
            "--no-display-prompt", "--grammar", GRAMMAR, "-n", "200", "-c", "512", "-t", "1"]


def at_a_terminal(command, send=b"", **env):
    """What a terminal gets from a command's standard output and error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdin=subprocess.PIPE if send else subprocess.DEVNULL,
                               stdout=theirs, stderr=theirs, env=os.environ | env)
    os.close(theirs)
    if send:
        process.stdin.write(send)
        process.stdin.close()
    found = b""
    try:
        while data := os.read(ours, 65536):
            found += data
    except OSError:  # the last writer has left
        pass
    finally:
        os.close(ours)
        assert process.wait(60) is not None
    return found.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.mark.slow
def test_generate_shows_text_alone_at_a_terminal_and_all_in_a_pipe():
    done = subprocess.run(GENERATE, capture_output=True, timeout=90, check=True)
    assert done.stdout.decode() == HOSTILE + "\n"
    assert SHOWN in at_a_terminal(GENERATE)


@pytest.mark.mpi
@pytest.mark.slow
def test_a_launcher_that_joins_its_output_to_a_terminals_is_noticed():
    launcher = launch.mpirun_path()
    assert launcher is not None
    command = [launcher, "-np", "2", *GENERATE]
    shown = at_a_terminal(command, **launch.environment(MPIEXEC_TIMEOUT="60"))
    assert SHOWN.partition("\n")[0] in shown
    assert not {"\x1b", "\x07", "\x9b", "\x08"} & set(shown)
    assert launch.run(2, GENERATE).stdout == HOSTILE + "\n"


class Foreign(BaseHTTPRequestHandler):
    """A server whose errors want to drive the terminal."""

    def do_GET(self):
        self.answer(200, '{"data": [{"id": "m\\u001b]0;x\\u0007"}], "status": "ok"}')

    def do_POST(self):
        self.answer(400, '{"error": {"message": "no\\u001b[2J\\u009b31m\\b"}}')

    def answer(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_errors_of_another_server_are_text():
    server = HTTPServer(("127.0.0.1", 0), Foreign)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        shown = at_a_terminal([sys.executable, "-m", "pipeinfer", "chat", "--plain", "--url",
                               f"http://127.0.0.1:{server.server_port}"], b"hi\n", TERM="dumb")
    finally:
        server.shutdown()
        server.server_close()
    assert "no[2J31m" in shown
    assert not {"\x1b", "\x07", "\x9b", "\x08"} & set(shown)


@pytest.mark.parametrize("is_shown", [True, False])
def test_chats_plain_answers(is_shown, monkeypatch):
    monkeypatch.setattr("pipeinfer.cli.chat_terminal.reaches_terminal", lambda _: is_shown)
    out = io.StringIO()
    view = Plain(out)
    for char in HOSTILE:
        view.write(char)
    assert out.getvalue() == (SHOWN if is_shown else HOSTILE)
    assert terminal.plain(HOSTILE) == SHOWN
