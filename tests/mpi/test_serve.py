"""`pipeinfer serve` over real ranks with the official client: answers, leaving, failing."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
import socket
from pathlib import Path

import openai
import psutil
import pytest
import requests

from pipeinfer.cli.serve import serve_command
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from tests.kit import launch
from tests.kit.plain_loop import PlainLoop
from tests.kit.refusals import assert_refused
from tests.kit.served import PIPEINFER, serve

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TARGET = launch.ROOT / "pipeinfer" / "models" / "embedded" / "target.gguf"
PROMPT = "def fibonacci(n):\n"
ENDLESS = {"prompt": "import os\n", "max_tokens": 3000, "stream": True,
           "extra_body": {"ignore_eos": True}}
GREEDY = {"prompt": PROMPT, "stream": True, "temperature": 0, "extra_body": {"ignore_eos": True}}
#: for ENDLESS to last until something happens to it, on any processor
PACED = ("-c", "4096", "--hook", "pace=20")
RANKS = 3
KEY, SECRET = "a-key-for-tests", "a prompt that nobody else may see"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    # tuning may find that guesses do not pay on few cores: some tests want to see them, in time
    with serve(RANKS, "--set", "adapt=false", "--hook", "pace=2", "-c", "4096", "--parallel", "4",
               "--queue", "2", "--alias", "code", "--api-key-file", str(keys)) as served:
        served.wait_until_ready()
        yield served
        served.leave()
        assert KEY not in "".join(served.log)
        assert not any(text in "".join(served.log) for text in (PROMPT, SECRET))


def connect(server, key=KEY, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=60,
                         max_retries=0, **options)


@pytest.fixture
def client(server):
    with connect(server) as made:
        yield made


@pytest.fixture(scope="module")
def plain():
    loop, tokenizer = PlainLoop(TARGET), open_tokenizer(TARGET)

    def text(prompt, count, params):
        return tokenizer.decode(loop.generate(tokenizer.encode(prompt), count, params))

    yield text
    loop.close()
    tokenizer.close()


@contextlib.contextmanager
def ready(ranks, *words, **options):
    """A server of a test's own, and a client of it."""
    with serve(ranks, *words, **options) as server:
        server.wait_until_ready()
        with connect(server) as client:
            yield server, client


def begun(client, **fields):
    """A stream that has begun."""
    stream = iter(client.completions.create(model="embedded", **fields))
    next(stream)
    return stream


def busy(server):
    _, slots = server.get("/slots", Authorization=f"Bearer {KEY}")
    return [slot for slot in slots if slot["is_processing"]]


def test_greedy_and_seeded_text_is_that_of_plain_decoding(client, plain):
    greedy = client.completions.create(model="code", prompt=PROMPT, max_tokens=40, temperature=0,
                                       extra_body={"ignore_eos": True})
    assert greedy.choices[0].text == plain(PROMPT, 40, SamplingParams())
    assert greedy.choices[0].finish_reason == "length"
    params = SamplingParams(temperature=0.8, top_k=30, key=noise_key(7))
    seeded = [client.completions.create(
        model="code", prompt=PROMPT, max_tokens=30, seed=7, temperature=0.8, top_p=1,
        extra_body={"top_k": 30, "min_p": 0, "ignore_eos": True}).choices[0].text
        for _ in range(2)]
    assert seeded == [plain(PROMPT, 30, params)] * 2


def test_a_stream_is_the_answer_in_pieces(client):
    ask = {"model": "code", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 120,
           "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 4
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 120
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-2].choices[0].finish_reason == "length"
    timings = chunks[-2].model_extra["timings"]
    assert timings["predicted_n"] == 120
    assert timings["drafted_n"] >= timings["accepted_n"] > 0
    assert whole.model_extra["timings"]["predicted_per_second"] > 0


def test_a_prompt_that_was_there_before_is_not_computed_again(client):
    ask = {"model": "code", "prompt": "x = [1, 2, 3]\n" * 40, "max_tokens": 5, "temperature": 0}
    first = client.completions.create(**ask)
    again = client.completions.create(**ask)
    assert again.choices[0].text == first.choices[0].text
    reused = again.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens // 2 < reused < first.usage.prompt_tokens
    assert again.model_extra["timings"]["prompt_n"] == first.usage.prompt_tokens - reused


def test_metrics_count_what_was_done(server, client):
    def figure(name):
        text = requests.get(f"{server.url}/metrics", timeout=30,
                            headers={"Authorization": f"Bearer {KEY}"}).text
        return next(float(line.split()[-1]) for line in text.splitlines()
                    if line.startswith(f"pipeinfer_{name} "))

    names = ("generated_tokens_total", "drafted_tokens_total", "prompt_tokens_total",
             "time_to_first_token_seconds_count", "inter_token_seconds_count")
    before = [figure(name) for name in names]
    got = client.completions.create(model="code", prompt=PROMPT, max_tokens=9, temperature=0,
                                    extra_body={"ignore_eos": True})
    after = [figure(name) for name in names]
    generated, drafted, prompt, first, between = (b - a for a, b in zip(before, after, strict=True))
    assert (generated, first, between) == (9, 1, 8)
    assert prompt == got.usage.prompt_tokens
    assert drafted == got.model_extra["timings"]["drafted_n"]
    assert figure("cells") > figure("cells_used") >= 0


def test_the_pipeline_can_be_watched(server, client):
    seen = set()
    with requests.get(f"{server.url}/pipeline", stream=True, timeout=30,
                      headers={"Authorization": f"Bearer {KEY}"}) as watching:
        stream = client.completions.create(model="code", **ENDLESS)
        for line in watching.iter_lines():
            if line.startswith(b"data: "):
                seen.add(json.loads(line[6:])["op"])
                if {"facts", "status", "runs"} <= seen:
                    break
        stream.close()
    server.until(lambda: not busy(server), "empty lanes")


def test_draining_lets_the_running_request_end_and_exits_0():
    script = str(launch.ROOT / "launch" / "run")
    with ready(2, "-c", "512", "--hook", "pace=40", "--speculation", "off",
               command=(script, "2")) as (server, client):
        stream = begun(client, **GREEDY, max_tokens=200)
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: server.health()[1] == {"status": "draining"}, "the drain")
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="embedded", prompt="x")
        assert caught.value.status_code == 503
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert chunks[-1].model_extra["timings"]["predicted_n"] == 200
        assert server.end() == 0, "".join(server.log)


def test_a_hang_up_drains_too_though_the_shell_sends_a_second_one():
    with ready(1, *PACED) as (server, client):
        stream = begun(client, **GREEDY, max_tokens=300)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: server.health()[1] == {"status": "draining"}, "the drain")
        server.process.send_signal(signal.SIGHUP)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.end() == 0, "".join(server.log)


def test_a_second_signal_leaves_at_once():
    with ready(1, *PACED, "--drain-seconds", "1000") as (server, client):
        stream = begun(client, **ENDLESS)
        server.process.send_signal(signal.SIGINT)
        server.until(lambda: server.health()[1] == {"status": "draining"}, "the drain")
        note = "open requests (1) may take 1000 s; a second"
        server.until(lambda: note in "".join(server.log), "the note")
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="this server is being stopped"):
            list(stream)
        assert server.end() == 130
        server.until(lambda: server.log[-1] == "pipeinfer: stopped\n", "the last word")


def ranks(server):
    """Rank to process."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return {p.environ()["OMPI_COMM_WORLD_RANK"]: p for p in found
            if "serve" in p.cmdline() and "OMPI_COMM_WORLD_RANK" in p.environ()}


def test_a_job_on_one_host_listens_on_no_outside_interface(server):
    below = psutil.Process(server.process.pid).children(recursive=True)
    waiting = [(socket_.type, ipaddress.ip_address(socket_.laddr.ip))
               for process in below for socket_ in process.net_connections("inet")
               if socket_.laddr and socket_.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
    assert [kind for kind, _ in waiting].count(socket.SOCK_STREAM) == 1  # HTTP
    assert [kind for kind, _ in waiting].count(socket.SOCK_DGRAM) == RANKS  # heartbeats
    assert all(address.is_loopback for _, address in waiting)


def own_memory(process):
    """What a process may write to and no file holds: where its secrets would be."""
    for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split()
        if rights.startswith("rw") and inode == "0":
            begin, end = (int(edge, 16) for edge in span.split("-"))
            with open(f"/proc/{process.pid}/mem", "rb", 0) as memory:
                memory.seek(begin)
                yield memory.read(end - begin)


def test_stages_hold_neither_keys_nor_prompts(server, client):
    client.completions.create(model="code", prompt=SECRET, max_tokens=2)
    found = ranks(server)
    assert len(found) == RANKS
    for rank, process in found.items():
        holds = [text for text in (KEY, SECRET)
                 if any(text.encode() in part for part in own_memory(process))]
        assert holds == ([KEY] if rank == "0" else [])  # that one has told the HTTP process
        assert KEY not in " ".join([*process.cmdline(), *process.environ().values()])


def test_when_the_last_stage_dies_streams_end_with_an_error_and_the_job():
    with ready(2, *PACED) as (server, client):
        stream = begun(client, **ENDLESS)
        ranks(server)["1"].kill()
        with pytest.raises(openai.APIError, match="cluster has failed"):
            list(stream)
        status, body = server.health()
        assert (status, body["status"]) == (503, "failed")
        assert "rank 1 is dead" in body["reason"]
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="embedded", prompt="x")
        assert server.end(timeout=10) != 0


def test_a_server_goes_on_without_a_draft_rank_that_died():
    """Before any stage has changed: what is told is this loss."""
    with ready(3, "--draft-ranks", "1", "--hook", "pace=8", "--hook",
               "fault=kill@2:decode=4") as (served, client):
        for _ in range(2):
            answer = client.completions.create(
                model="embedded", prompt=PROMPT, max_tokens=40, temperature=0,
                extra_body={"ignore_eos": True})
            assert answer.usage.completion_tokens == 40
        served.leave()
    assert "which drafted, is dead: decoding continues without this draft" in "".join(served.log)


def test_without_its_http_process_the_job_ends():
    with serve(1, "-c", "512") as server:
        server.wait_until_ready()
        server.door().kill()
        assert server.end(timeout=20) == 6
        assert "HTTP process has died" in "".join(server.log)


@pytest.mark.parametrize(("args", "code", "says"), [
    (["--host", "no.such.host.invalid"], 2, "--host"),
    (["--api-key-file", "/nowhere"], 2, "/nowhere"),
    (["-m", "/nowhere.gguf"], 3, "/nowhere.gguf"),
    (["--api-key", "\u00e9"], 2, "ASCII"),
    (["--api-key", " "], 2, "empty"),
    (["--trace", "/tmp/t.json"], 2, "--trace"),
    (["-l", "x"], 2, "--logit-bias"),
])
def test_what_cannot_be_served_is_said_at_once(args, code, says):
    assert_refused(serve_command, args, code, says)


def test_a_port_that_is_taken_is_named(server):
    port = server.url.rsplit(":", 1)[1]
    with serve(1, "--port", port) as second:
        assert second.end() == 2
        assert "Traceback" not in "".join(second.log)
        assert f"port {port} of 127.0.0.1 is in use" in "".join(second.log)


def test_keys_are_hidden_from_show_config():
    done = launch.run(1, [*PIPEINFER, "serve", "--show-config", "--api-key", "secret-key"])
    assert done.returncode == 0
    assert "secret-key" not in done.stdout + done.stderr
    assert "(hidden)" in done.stdout


def test_answers_are_guessed_from_others_to_the_same_key_alone():
    def accepted(served, key):
        with connect(served, key) as client:
            answer = client.completions.create(
                model="code", prompt=PROMPT, max_tokens=60, seed=5, temperature=0.8, top_p=1.0,
                extra_body={"ignore_eos": True, "top_k": 30, "min_p": 0.0})
        return answer.choices[0].text, answer.timings["accepted_n"]

    with serve(2, "--set", "adapt=false", "--hook", "pace=5", "--alias", "code", "-md", "",
               "--proposer", "prompt-lookup", "--remember-answers",
               PIPEINFER_API_KEY=f"{KEY},another-key") as served:
        served.wait_until_ready()
        text, alone = accepted(served, KEY)
        again, guessed = accepted(served, KEY)
        theirs, apart = accepted(served, "another-key")
        assert again == theirs == text
        assert guessed > 40
        assert max(alone, apart) < guessed
        served.leave()
