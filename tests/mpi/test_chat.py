"""`pipeinfer chat`: against a server, on ranks of its own, at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.kit import launch
from tests.kit.sample import full
from tests.kit.served import serve
from tests.mpi.test_jobs import EMBEDDED, PIPEINFER

pytestmark = pytest.mark.slow
CHAT = [*PIPEINFER, "chat"]
GREEDY = ("--temp", "0", "-n", "24")


@pytest.fixture(scope="module")
def server():
    with serve(1, "--parallel", "2", "--api-key", "sesame") as served:
        served.wait_until_ready()
        yield served


def chat(*args, says="", **env):
    """Run it with `says` on standard input."""
    return launch.run(1, [*CHAT, *args], stdin=says, timeout=60, **env)


def ask(server, messages, **fields):
    """The same from the server without `chat`."""
    status, answer = server.post("/v1/chat/completions", {"messages": messages, **fields},
                                 Authorization="Bearer sesame")
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_with_a_server(server):
    lines = ["def fib(n):", "/system You write Python.", "two\\", "lines", "/clear", "def fib(n):",
             "/nonsense", "/quit", "never read"]
    done = chat("--url", server.url, *GREEDY, says="\n".join(lines) + "\n",
                PIPEINFER_API_KEY="sesame")
    assert done.returncode == 0, done.stderr
    system = {"role": "system", "content": "You write Python."}
    first = ask(server, [user("def fib(n):")], temperature=0, max_tokens=24)
    second = ask(server, [system, user("def fib(n):"), {"role": "assistant", "content": first},
                          user("two\nlines")], temperature=0, max_tokens=24)
    third = ask(server, [system, user("def fib(n):")], temperature=0, max_tokens=24)
    assert done.stdout == f"{first}\n{second}\n{third}\n"
    assert "unknown command /nonsense" in done.stderr


def test_seeds_and_sampling_options_reach_the_server(server):
    done = chat("--url", server.url, "--api-key", "sesame", "-n", "16", "--temp", "1.1", "--top-k",
                "9", "-l", "300-5", says="x = \n/seed 7\nx = \n/clear\n/seed 7\nx = \n/seed -3\n")
    assert done.returncode == 0, done.stderr
    sampling = {"temperature": 1.1, "top_k": 9, "max_tokens": 16, "logit_bias": {"300": -5}}
    assert done.stdout.endswith(ask(server, [user("x = ")], seed=7, **sampling) + "\n")
    assert "a seed is a whole number" in done.stderr


def test_a_schema_reaches_the_server(server):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}},
              "required": ["n"], "additionalProperties": False}
    done = chat("--url", server.url, "--api-key", "sesame", "-j", json.dumps(schema),
                says="a number\n")
    assert set(json.loads(done.stdout)) == {"n"}, done.stderr


@pytest.mark.parametrize(("args", "code", "says"), [
    (["--url", "{url}"], 5, "wants an API key"),
    (["--url", "{url}", "--api-key", "sesame", "--top-k", "3", "-l", "999999+1"], 5, "logit_bias"),
    (["--url", "http://127.0.0.1:1"], 5, "start `pipeinfer serve`"),
    (["--url", "host.invalid:80"], 5, "no such host"),
    (["--url", "gopher://x"], 2, "not an address such as"),
    (["--url", "http://x:port"], 2, "--url http://x:port"),
    (["--url", "{url}", "-m", "x.gguf"], 2,
     "--url talks to a running server; -m, --ranks and --hosts start one"),
    (["--url", "{url}", "--api-key", "sesame", "-j", "{{"], 2, "--json-schema is not valid JSON"),
    (["-m", "/nowhere.gguf"], 3, "/nowhere.gguf"),
    (["-m", str(EMBEDDED / "target.gguf"), "--grammar", "root ::= ("], 5, "the grammar cannot"),
])
def test_what_is_wrong_is_said(server, args, code, says):
    done = chat(*(arg.format(url=server.url) for arg in args), says="hello\n")
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stream_that_breaks_off_is_an_error():
    """A server that names a model, begins an answer and dies."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}',
               b"HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n" + b'{"data":[{"id":"one"}]}'[:22],
               b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
               b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n']
    answers[1] = answers[1].replace(b"22\r", b"23\r") + b"}"

    def run():
        for answer in answers:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closed with unread bytes it would be a reset
                pass
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    done = chat("--url", f"http://127.0.0.1:{listener.getsockname()[1]}", says="hello\n")
    thread.join(20)
    listener.close()
    assert done.stdout == "half\n"
    assert "was lost: the stream ended early" in done.stderr
    assert done.returncode == 5


@pytest.mark.parametrize("own", [False, True])
def test_an_interrupt_stops_the_answer_and_a_second_one_leaves(server, own):
    where = ["-m", str(EMBEDDED / "target.gguf"), "-md", str(EMBEDDED / "draft.gguf"), "-c",
             "8192"] if own else ["--url", server.url, "--api-key", "sesame"]
    process = launch.start([*CHAT, *where, "-n", "2000", "--temp", "1.5", "--seed", "1"],
                           timeout=90, stdin=True)
    def say(text):
        process.stdin.write(text)
        process.stdin.flush()

    def read_until(note):
        """Read what comes until a note is there; the answer's text before it."""
        out, err = "", ""
        while note not in err:
            ready, _, _ = select.select([process.stdout, process.stderr], [], [], 30)
            assert ready, (out, err)
            for stream in ready:
                piece = os.read(stream.fileno(), 65536).decode("utf-8", "replace")
                assert piece, (out, err)
                out, err = (out, err + piece) if stream is process.stderr else (out + piece, err)
        return out

    try:
        for turn in range(2):
            say("Write a long story\n")
            assert os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            say(f"/seed {turn}\n")  # it reads on when the answer has ended
            assert read_until(f"seed: {turn}").endswith("\n")
        process.send_signal(signal.SIGINT)
        read_until("press Ctrl-C again")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if not own:
        auth = {"Authorization": "Bearer sesame"}
        server.until(lambda: all(not slot["is_processing"]
                                 for slot in server.get("/slots", **auth)[1]), "a free server")


@contextlib.contextmanager
def own_ranks():
    """A conversation with a model of its own that has answered; its process, that of its server,
    and the folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for a socket's name
        process = launch.start([*CHAT, "-m", str(EMBEDDED / "target.gguf"), *GREEDY], timeout=90,
                               stdin=True, TMPDIR=folder)
        try:
            process.stdin.write("def fib(n):\n")
            process.stdin.flush()
            assert os.read(process.stdout.fileno(), 1)
            (rank,) = psutil.Process(process.pid).children()
            yield process, rank, Path(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_own_ranks_are_reached_by_nobody_else_and_end_with_their_terminal():
    with own_ranks() as (process, rank, folder):
        (path,) = folder.glob("pipeinfer-chat-*")
        assert path.stat().st_mode & 0o777 == 0o600
        family = [rank, *rank.children(recursive=True)]
        assert any("pipeinfer.server" in one.cmdline() for one in family)
        assert [one.net_connections("inet") for one in family] == [[] for _ in family]
        process.kill()
        assert psutil.wait_procs(family, timeout=30)[1] == []
        assert list(folder.glob("pipeinfer-chat-*")) == []


def test_a_job_that_dies_ends_the_conversation_with_its_exit_code():
    with own_ranks() as (process, rank, _):
        rank.kill()
        _, err = process.communicate("another one\n", timeout=30)
        assert process.returncode == 137
        assert "the server has ended with exit code 137: killed by signal 9 (SIGKILL), maybe" in err


def test_a_request_to_end_ends_a_conversation_that_waits():
    with own_ranks() as (process, rank, folder):
        process.send_signal(signal.SIGTERM)  # once, as `timeout` does
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert psutil.wait_procs([rank], timeout=30)[1] == []
        assert list(folder.glob("pipeinfer-chat-*")) == []


@pytest.mark.mpi
def test_a_launcher_around_it_is_told_what_to_write():
    done = launch.run(2, CHAT, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("write `pipeinfer run -np N chat` instead") == 1


@pytest.mark.mpi
def test_through_a_pipe_and_the_launch_script():
    """What is piped in is read whole, and its end ends the conversation."""
    done = launch.run(1, [str(launch.ROOT / "launch" / "run"), "2", "chat", *GREEDY],
                      stdin="def fib(n):\n/seed 7\n", timeout=60)
    assert done.returncode == 0, done.stderr
    other = launch.answered(1, "--chat", "-p", "def fib(n):", *GREEDY)
    assert done.stdout == other["text"] + "\n"
    assert "seed: 7" in done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [full("1"), "2"])
def test_lines_are_edited_at_a_terminal_through_the_launch_script(ranks, tmp_path):
    env = launch.environment(MPIEXEC_TIMEOUT="80", TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1",
                             XDG_STATE_HOME=str(tmp_path))
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(launch.ROOT / "launch" / "run"), ranks, "chat", *GREEDY], stdin=slave, stdout=slave,
        stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    seen, at = "", 0

    def until(text):
        """Read until `text` comes after what was waited for before."""
        nonlocal seen, at
        deadline = time.monotonic() + 40
        while text not in seen[at:]:
            ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, seen
            seen += os.read(master, 4096).decode("utf-8", "replace")
        at = seen.index(text, at) + len(text)

    try:
        until("/help lists")
        until(">")
        os.write(master, b"/seed 56\x7f\r")
        until("seed: 5\x1b")
        until(">")
        os.write(master, b"def fib(n):\r")
        until("tokens")
        until(">")
        os.write(master, b"\x1b[A\x1b[A7\r")  # the line before the last one, changed
        until("seed: 57")
        until(">")
        os.write(master, b"/quit\r")
        assert process.wait(40) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(master)
    assert "target.gguf on 1 stage" in seen
    assert "Traceback" not in seen
