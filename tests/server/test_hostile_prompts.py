"""Prompts that end the process which tokenises them, with streams of other clients open."""

from __future__ import annotations

import signal
import threading

import psutil
import pytest
import requests

from pipeinfer.server.frames import Submit
from tests.kit.sample import fewer, full
from tests.kit.server_peer import front
from tests.models.test_apart import write_with
from tests.server.test_http import CHAT, error, events

pytestmark = pytest.mark.slow
LONG = 4_000_000
STREAMS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = write_with("gpt-4o", tmp_path_factory.mktemp("model") / "m.gguf")
    with front(path, parallel=32, facts={"n_ctx": 1 << 22}) as made:  # in which it could fit
        yield made


@pytest.fixture
def streams(server):
    """Streams that are open, and end well."""
    server.peer.reset()
    server.peer.answer = lambda frame: None
    opened = [server.stream("/v1/chat/completions", CHAT)
              for _ in range(STREAMS)]
    server.peer.wait_for(Submit, STREAMS)
    held = [frame.id for frame in server.peer.seen if isinstance(frame, Submit)]
    yield
    server.peer.answer = lambda frame: server.peer.say(frame.id, "ok")
    for request_id in held:
        server.peer.news(server.peer.say(request_id, "fine"))
    for response in opened:
        chunks, last = events(response)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "fine"
        assert last == [b"data: [DONE]"]


def helpers(server):
    return [child for child in psutil.Process(server.child.process.pid).children()
            if "pipeinfer.models.text.tokenizing" in child.cmdline()]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    full("/v1/completions", lambda text: {"prompt": text}),
    full("/v1/responses", lambda text: {"input": text}),
    ("/tokenize", lambda text: {"content": text}),
])
def test_a_prompt_that_overflows_the_stack_costs_one_error(server, streams, path, body):
    answer = error(server.post(path, body("z" * LONG)), 400)
    assert "characters: it needs more stack or memory" in answer["message"]
    assert server.post("/tokenize", {"content": "z" * 25_000}).status_code == 200


@pytest.mark.parametrize("ending", [signal.SIGSEGV, full(signal.SIGABRT)])
def test_a_crash_in_native_code_costs_one_request_an_error(server, streams, ending):
    server.post("/tokenize", {"content": "x"})
    (helper,) = helpers(server)
    helper.send_signal(signal.SIGSTOP)
    answers = []
    asking = threading.Thread(target=lambda: answers.append(
        server.post("/tokenize", {"content": "a planted crash"})))
    asking.start()
    server.until(lambda: helper.status() == psutil.STATUS_STOPPED)
    helper.send_signal(ending)
    helper.send_signal(signal.SIGCONT)
    asking.join(20)
    # before it is gone, the next question would be the one that the crash costs
    server.until(lambda: not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE)
    if (answer := answers[0]).status_code == 200:  # the signal came before it, or after its answer
        answer = server.post("/tokenize", {"content": "this may be the one"})
    if answer.status_code != 200:
        assert "shorten" in error(answer, 400)["message"].lower()
    assert server.post("/tokenize", {"content": "next"}).status_code == 200
    assert helpers(server)[0].pid != helper.pid


def memory(server):
    process = psutil.Process(server.child.process.pid)
    return sum(one.memory_info().rss for one in (process, *process.children()))


def test_large_prompts_leave_no_memory_behind(server):
    """The first ones enlarge the heap of a process, which later ones use again."""
    text = "some words of a text, and more. " * (LONG // fewer(32, 256))
    server.post("/v1/chat/completions", CHAT)
    bodies = (("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
              ("/v1/completions", {"prompt": text}), ("/tokenize", {"content": text}))
    for most in (200 << 20, 30 << 20):
        before = memory(server)
        assert {server.post(path, body).status_code for path, body in bodies} <= {200, 400}
        server.until(lambda before=before, most=most: memory(server) - before < most)
DIGITS = "9" * 5000


def nested(opening, count, closing):
    return opening * count + "1" + closing * count


def function(schema):
    return ('"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": '
            f'"object", "properties": {{"a": {schema}}}}}}}]')


@pytest.mark.parametrize("more", [
    f'"chat_template_kwargs": {{"x": {DIGITS}}}', '"chat_template_kwargs": {"x": 1e999}',
    f'"chat_template_kwargs": {{"x": {nested("[", 100_000, "]")}}}',
    f'"chat_template_kwargs": {{"x": {nested("[", 200, "]")}}}',
    f'"seed": {DIGITS}', f'"logit_bias": {{"{DIGITS}": 1}}', f'"stop": "{"a" * 100_000}"',
    function('{"type": "string", "minLength": ' + "9" * 400 + "}"),
    function('{"type": "string", "pattern": "(a{1000}){1000}"}'),
    function('{"type": "string", "pattern": "' + "(" * 9000 + '"}'),
    function(nested('{"items": ', 40, "}")), function(nested('{"not": ', 120, "}")),
    function('{"enum": [' + ",".join(map(str, range(9000))) + "]}"),
    f'"grammar": "root ::= {"(" * 100_000}"', f'"grammar": "root ::= [a]{{{DIGITS}}}"',
    f'"grammar": "root ::= <{"z" * 100_000}>"', f'"grammar": "root ::= {"!<[1]>" * 9000}"',
    '"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}',
], ids=lambda text: text[:30] + text[-20:])
def test_no_number_depth_or_length_costs_more_than_an_answer(server, more):
    server.peer.reset()
    for messages in ('[{"role": "user", "content": "x"}]', (
            '[{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", '
            f'"arguments": "{"[" * 200}"}}}}]}}, {{"role": "user", "content": "x"}}]')):
        answer = requests.post(
            f"{server.url}/v1/chat/completions", timeout=60,
            data=f'{{"messages": {messages}, "max_tokens": 1, {more}}}',
            headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400), answer.text
        assert len(answer.text) < 20_000
    assert server.get("/health").status_code == 200
