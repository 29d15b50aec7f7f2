"""`pipeinfer up` as its users run it: a real server, moved and reloaded under streams."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeinfer import host
from pipeinfer.errors import RequestError, UsageError
from pipeinfer.supervise.serving import models_of, on_numa_nodes, ranks_here
from pipeinfer.supervise.state import Folder, Reload, Rescale, SocketStatus, call
from tests.kit import launch
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full
from tests.kit.served import PIPEINFER, Served
from tests.mpi.test_supervised import Stream, job_processes

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
MODEL = launch.ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
SERVE = ["serve", "-c", "512", "-t", "1", "--hook", "pace=5"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the supervisor, a private one."""
    monkeypatch.setenv("PIPEINFER_STATE", str(tmp_path / "state"))
    return Folder("default")


def ranks(folder):
    """The processes of the job that serve."""
    return [p for p in job_processes(folder.read().get("job", "-")).values()
            if "serve" in p.cmdline()]


class Up:
    """`pipeinfer up`, and commands to it."""

    def __init__(self, *words):
        self.served = Served(launch.start([*PIPEINFER, "up", *words], timeout=200))

    def call(self, *words):
        """Exit code, standard output and error."""
        done = subprocess.run([*PIPEINFER, *words], capture_output=True, text=True, timeout=120,
                              env=launch.environment(), check=False)
        return done.returncode, done.stdout, done.stderr

    def status(self):
        """What `pipeinfer status --json` shows, without a process of its own."""
        return call(Folder("default"), print, 20, SocketStatus())


@contextlib.contextmanager
def up(*words):
    with started(*words) as one:
        one.served.wait_until_ready()
        # the supervisor hears of it a moment after the clients do
        one.served.until(lambda: one.status()["ready"], "the supervisor to know")
        yield one


@contextlib.contextmanager
def started(*words):
    one = Up(*words)
    process = one.served.process
    try:
        yield one
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        process.stdout.close()
        one.served._reader.join(10)
        process.stderr.close()


def test_streams_go_on_while_the_job_is_moved(folder, tmp_path):
    # slow enough that a busy machine's supervisor acts long before a stream's end
    words = [*SERVE, "--hook", "pace=40", "--speculation", "off", "--port", str(launch.free_port())]
    with up("-np", "2", "--", *words) as one:
        served = one.served
        whole = Stream(served).ended().tokens
        assert len(whole) == 120
        _, answered = served.ask(urllib.request.Request(
            f"{served.url}/v1/responses", b'{"input": "x", "max_output_tokens": 3}',
            {"Content-Type": "application/json"}))
        stream = Stream(served)
        served.until(lambda: len(stream.tokens) > 5, "tokens")
        said = call(folder, print, 120, Rescale(3))["message"]
        assert "moved to 3 ranks: ready again after" in said
        assert stream.ended().tokens == whole
        assert stream.last["timings"]["restarts_n"] == 1
        assert stream.last["timings"]["same_arithmetic"] is True
        # without --journal, and in the folder that only this user reads
        assert served.get(f"/v1/responses/{answered['id']}")[1]["output"] == answered["output"]
        status = json.loads(one.call("status", "--json")[1])
        assert (status["ready"], status["ranks"], status["words"]) == (True, 3, words)
        stream = Stream(served)
        served.until(lambda: len(stream.tokens) > 5, "tokens")
        with pytest.raises(RequestError, match=r"the changed job does not start \(exit code 3; "):
            call(folder, print, 120, Reload([*words, "-md", str(tmp_path / "none")]))
        assert stream.ended().tokens == whole  # the former job has come back
        assert stream.last["timings"]["restarts_n"] == 1
        status = one.status()
        assert (status["ready"], status["ranks"], status["words"]) == (True, 3, words)
        assert "does not start" in status["not_moved"]
        logs = tmp_path / "state" / "default" / "logs"
        assert " with 2 stages" in (logs / "rank-0.log").read_text()
        assert "the job is moved to 3 ranks" in (logs / "up.log").read_text()
        code, _, err = one.call("up", "-np", "2")
        assert (code, "is up already" in err) == (2, True)
        assert one.call("down")[0] == 0
        assert served.process.wait(30) == 0
        assert one.call("status")[0] == 2


def test_a_job_without_requests_sleeps_until_the_next_one(folder):
    with up("-np", "2", "--sleep-after", "0.1", "--", *SERVE, "--port",
            str(launch.free_port())) as one:
        served = one.served
        whole = Stream(served).ended().tokens
        assert len(whole) == 120
        for sleeps in (1, 2):
            served.until(lambda: one.status()["phase"] == "asleep", "sleep", 60)
            assert ranks(folder) == []
            assert served.health() == (200, {"status": "asleep"})
            code, out, _ = one.call("status")
            assert (code, out.startswith("default: asleep at http")) == (1, True)
            assert out.count("slept after") == sleeps
            stream = Stream(served)
            assert stream.ended().tokens == whole
            assert (stream.ends, stream.last["timings"].get("restarts_n")) == (1, None)
        assert one.call("down")[0] == 0
        assert served.process.wait(30) == 0


def test_a_request_brings_the_model_that_it_names(tmp_path):
    other, table = tmp_path / "other.gguf", tmp_path / "models.toml"
    write_random_model(other, RandomSpec(seed=5))
    table.write_text(f'one = "-m {MODEL}"\nother = "-m {other} -md none"\n'
                     f'"lost/one" = "-m {tmp_path / "none.gguf"}"\n')
    with up("-np", "2", "--models", str(table), "--", *SERVE, "--port",
            str(launch.free_port())) as one:
        served, body = one.served, {"prompt": "def f(", "max_tokens": 8, "temperature": 0}

        def answer(name):
            return served.post("/v1/completions", {**body, "model": name})

        def names():
            return [one["id"] for one in served.get("/v1/models")[1]["data"]]

        assert names() == ["one", "other", "lost/one"]
        first = answer("one")[1]["choices"][0]["text"]
        stream = Stream(served)  # goes on to its end before another model comes
        served.until(lambda: len(stream.tokens) > 5, "tokens")
        with ThreadPoolExecutor() as pool:
            second, again = pool.map(answer, ["other", "other"])
            assert len(stream.ended().tokens) == 120
        assert second[0] == again[0] == 200
        assert second[1]["model"] == "other"
        assert second[1]["choices"] == again[1]["choices"]
        assert second[1]["choices"][0]["text"] != first
        assert names() == ["other", "one", "lost/one"]
        code, error = answer("lost/one")
        assert (code, error["error"]["code"]) == (503, "model_not_loaded")
        assert "none.gguf" in error["error"]["message"]
        assert served.get("/v1/models/other")[1]["id"] == "other"  # has come back
        assert answer("nobody's")[0] == 404


@pytest.mark.parametrize(("text", "says"), [
    ("", "names none"), ("one = 3", "write a name and its options"), ('one = "-c"', "one: serve: "),
    ('one = "-m \'x"', "one: No closing quotation"), ('one = "--port 9"', "such options to all"),
    ("[one]", "write a name"), ("one = ", "is not valid TOML")])
def test_a_file_of_models_that_cannot_be_used(tmp_path, text, says):
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)):
        models_of(str(file), ["serve"])


@pytest.mark.parametrize(("cores", "words", "ranks"), [
    ([], "", 1), ([8], "", 1), ([4, 4], "", 2), ([2, 2, 2, 2], "--kv-disk auto", 4),
    ([8, 8], "", 1),  # a container may use half of them
    ([4, 4], "--numa off", 1), ([4, 4], "-ngl 9", 1)])
def test_each_numa_node_of_this_host_gets_a_rank(monkeypatch, cores, words, ranks):
    monkeypatch.setattr(host, "numa_nodes", lambda: [
        host.NumaNode(k, count, 0, ()) for k, count in enumerate(cores)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    said = []
    assert ranks_here(["serve", *words.split()], said.append) == ranks
    assert ["whole layers" in line for line in said] == ["--kv-disk" in words] * (ranks > 1)


@pytest.mark.parametrize(("words", "sliced"), [
    ("", True), ("-md small.gguf", True), ("--kv-disk auto", False), ("--grid 1x2", False),
    ("--layers 9,21", False), ("--bita prompts.npz", False)])
def test_numa_nodes_share_each_layer_unless_an_option_needs_whole_ones(words, sliced):
    given = ["serve", *words.split()]
    assert on_numa_nodes(given) == [*given, "--head-stage", *["--grid", "auto"] * sliced]


def test_a_reload_keeps_the_options_by_which_members_share_the_model(folder):
    words = [*SERVE, "--port", str(launch.free_port())]
    with up(f"--join=127.0.0.1:{launch.free_port()}", "--", *words):
        call(folder, print, 90, Reload([*words, "--queue", "9"]))
        assert folder.read()["words"] == [*words, "--queue", "9", "--head-stage", "--distribute"]


def test_one_rank_without_a_launcher_is_reloaded_and_starts_again(folder, tmp_path):
    """Another file in the model's place: no stream may have tokens of both."""
    model = tmp_path / "model.gguf"
    shutil.copy(MODEL, model)
    words = [*SERVE, "--speculation", "off", "--hook", "pace=30", "--port", str(launch.free_port()),
             "-m", str(model)]
    with up("--", *words[1:]) as one:
        served = one.served
        whole = Stream(served).ended().tokens
        stream = Stream(served)
        served.until(lambda: len(stream.tokens) > 5, "tokens")
        shutil.copy(MODEL, tmp_path / "new.gguf")
        (tmp_path / "new.gguf").replace(model)
        heard = []
        with pytest.raises(RequestError, match="1 requests still run after 0 s, so nothing was ch"):
            call(folder, heard.append, 60, Reload())
        call(folder, heard.append, 90, Reload(wait=60))
        assert heard[-1].startswith("the model's file is another one: waiting for 1 open")
        assert stream.ended().tokens == whole
        assert stream.last["timings"].get("restarts_n") is None

        for more, says in ((["-m", str(tmp_path / "none")],
                            r"does not start \(exit code 3; .*/none: no such file"),
                           (["--port", "1"], "--port cannot change while .* give --port"),
                           (["--nothing"], "serve: No such option")):
            with pytest.raises(RequestError, match=says):
                call(folder, heard.append, 90, Reload([*words, *more]))
        assert folder.read()["words"] == words

        (rank,) = ranks(folder)
        rank.kill()
        served.until(lambda: len(folder.read()["starts"]) == 5, "another start", 30)
        assert Stream(served).ended().tokens == whole  # it has waited
        assert [start["exit"] for start in folder.read()["starts"]][2:] == [3, 137, None]


@pytest.mark.parametrize(("killed", "says"), [
    full(3, "all ranks of the job have ended without an error: were they killed, maybe"),
    (1, "of 3 ranks of this host, 1 ended before all had met: were they killed, maybe by the"),
])
def test_ranks_that_are_killed_at_their_start_are_no_normal_end(folder, killed, says):
    """As the kernel kills them for want of memory: systemd starts a service again for this."""
    def three():
        found = [p for p in ranks(folder) if "PMIX_RANK" in p.environ()]
        return found if len(found) == 3 else []

    with started("-np", "3", "--restarts", "0", "--", *SERVE, "--port",
                 str(launch.free_port())) as one:
        one.served.until(three, "three ranks")
        for rank in three()[:killed]:
            rank.kill()
        assert one.served.process.wait(60) != 0
        one.served.until(lambda: says in "".join(one.served.log), "the reason")
