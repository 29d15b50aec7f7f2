"""What clients of other servers send: fields, names, and a last message that is continued."""

from __future__ import annotations

import http.client
import time

import anthropic
import pytest
from openai import pagination, types
from openai.types import chat, responses

from pipeinfer.server import http_server
from pipeinfer.server.frames import Submit
from tests.kit import random_model
from tests.kit.server_peer import MODEL, front
from tests.server.test_http import error, events
from tests.server.test_tools import CALL, OTHER, TOOL

pytestmark = pytest.mark.slow
USER = {"role": "user", "content": "Count."}
BEGUN = {"role": "assistant", "content": "One, two, "}


@pytest.fixture(scope="module")
def shared():
    with front(MODEL, facts={"n_ctx": 4096}) as made:
        yield made


@pytest.mark.parametrize("message", [
    {"id": "msg_1", "timestamp": 1_790_000_000}, {"timestamp": "2026-11-27T06:00:00Z"},
    {"reasoning": "so"}, {"reasoning_content": "so"}, {"reasoning": None},
    {"reasoning_details": [{"type": "reasoning.text", "text": "so"}]},
    {"cache_control": {"type": "ephemeral"}}, {"thinking_blocks": []}, {"audio": None},
    {"function_call": None}, {"provider_specific_fields": {"a": 1}},
    {"content": [{"type": "text", "text": "Hm.", "cache_control": {"type": "ephemeral"}}]},
])
def test_messages_have_what_other_servers_and_clients_add(server, message):
    body = {"messages": [USER, {"role": "assistant", "content": "Hm.", **message}, USER]}
    assert server.post("/v1/chat/completions", body).status_code == 200
    plain = server.post("/apply-template", {"messages": [USER, {**BEGUN, "content": "Hm."}, USER]})
    assert server.post("/apply-template", body).json() == plain.json()


@pytest.mark.parametrize(("more", "most"), [
    ({"max_tokens": -1}, 4096), ({"max_completion_tokens": -1}, 4096), ({}, 4096),
    ({"max_tokens": 7}, 7), ({"max_tokens": -1, "max_completion_tokens": -1}, 4096),
])
def test_as_many_tokens_as_the_context_holds(server, more, most):
    assert server.post("/v1/chat/completions", {"messages": [USER], **more}).status_code == 200
    assert server.peer.wait_for(Submit).max_tokens == most
    for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": -1}),
                       ("/v1/responses", {"input": "x", "max_output_tokens": -1})):
        server.peer.reset()
        assert server.post(path, body).status_code == 200
        assert server.peer.wait_for(Submit).max_tokens == 4096


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"max_tokens": -2}, {"top_k": -2},
                                  {"max_tokens": "x"}, {"max_completion_tokens": 2.5}])
def test_other_numbers_are_none(server, more):
    (name,) = more
    answer = server.post("/v1/chat/completions", {"messages": [USER], **more})
    assert error(answer, 400)["param"] == name


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_all_tokens_are_candidates(server, path):
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(
        path, {"messages": [USER]})
    assert server.post(path, {**body, "top_k": -1}).status_code == 200
    assert server.peer.wait_for(Submit).params.top_k == 0


@pytest.mark.parametrize("name", ["mcp/files:read", "a.b-c_D/9", "server::tool", "x" * 128])
def test_names_of_functions(server, name):
    call = CALL.replace("add", name)
    server.peer.answer = lambda frame: server.peer.say(frame.id, call)
    tool = {"type": "function", "function": {**TOOL["function"], "name": name},
            "cache_control": {"type": "ephemeral"}}
    for choice in ("auto", "required", {"type": "function", "function": {"name": name}}):
        answer = server.post("/v1/chat/completions", {
            "messages": [USER], "tools": [tool], "tool_choice": choice})
        (found,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert found["function"]["name"] == name
    for bad in ("a b", 'a"b', "", "x" * 129, "ä"):
        tool["function"]["name"] = bad
        error(server.post("/v1/chat/completions", {"messages": [USER], "tools": [tool]}), 400)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(server, mode):
    server.peer.answer = lambda frame: server.peer.say(frame.id, CALL)

    def ask(*names):
        return server.post("/v1/chat/completions", {
            "messages": [USER], "tools": [TOOL, OTHER], "tool_choice": {
                "type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
                    {"type": "function", "function": {"name": name}} for name in names]}}})

    assert ask("add").json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.peer.wait_for(Submit).params.grammar
    assert 'add\\"' in grammar
    assert 'other\\"' not in grammar
    assert "allowed_tools names" in error(ask("add", "sub"), 400)["message"]
    error(ask(), 400)
    items = server.post("/v1/responses", {"input": "x", "tools": [
        {"type": "function", **TOOL["function"]}], "tool_choice": {
            "type": "allowed_tools", "mode": mode, "tools": [
                {"type": "function", "name": "add"}]}})
    assert items.json()["output"][0]["type"] == "function_call"


@pytest.mark.parametrize(("messages", "more", "end"), [
    ([USER, BEGUN], {}, "assistant\nOne, two, "),
    ([USER, BEGUN], {"continue_final_message": True}, "assistant\nOne, two, "),
    ([USER, BEGUN], {"continue_final_message": True, "add_generation_prompt": False},
     "assistant\nOne, two, "),
    ([USER, BEGUN], {"continue_final_message": False},
     "One, two, <|im_end|>\n<|im_start|>assistant\n"),
    ([USER, BEGUN], {"add_generation_prompt": True},
     "One, two, <|im_end|>\n<|im_start|>assistant\n"),
    ([USER, BEGUN], {"add_generation_prompt": False}, "One, two, <|im_end|>\n"),
    ([USER], {"continue_final_message": False}, "Count.<|im_end|>\n<|im_start|>assistant\n"),
    ([USER], {"add_generation_prompt": False}, "Count.<|im_end|>\n"),
    ([USER, {**BEGUN, "content": "<|im_end|>\n  "}], {}, "assistant\n<|im_end|>\n  "),
    ([USER, {**BEGUN, "content": ""}], {}, "<|im_end|>\n<|im_start|>assistant\n"),
    ([USER, {**BEGUN, "content": "One, two, "}, USER], {}, "<|im_start|>assistant\n"),
    ([USER, {**BEGUN, "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "b"}]}],
     {}, "assistant\nAb"),
])
def test_a_last_message_of_the_assistant_is_continued(server, messages, more, end):
    body = {"messages": messages, **more}
    prompt = server.post("/apply-template", body).json()["prompt"]
    assert prompt.endswith(end)
    assert server.post("/v1/chat/completions", body).status_code == 200
    tokens = list(server.peer.wait_for(Submit).prompt)
    assert server.tokenizer.decode(tokens, special=True).endswith(end)
    marks = [token for token in tokens if server.tokenizer.is_control(token)]
    assert len(marks) == sum(prompt.count(mark) for mark in ("<|im_start|>", "<|im_end|>")) - sum(
        str(m["content"]).count("<|im_end|>") for m in messages) + server.tokenizer.adds_bos


@pytest.mark.parametrize(("messages", "more"), [
    ([USER], {}), ([USER, {**BEGUN, "content": ""}], {}),
    ([USER, BEGUN], {"add_generation_prompt": True}),
    ([USER, {**BEGUN, "tool_calls": [{"type": "function", "function": {
        "name": "f", "arguments": "{}"}}]}], {}),
])
def test_what_cannot_be_continued_is_refused(server, messages, more):
    answer = server.post("/v1/chat/completions", {
        "messages": messages, "continue_final_message": True, **more})
    assert error(answer, 400)["param"] == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "CHAT_TEMPLATE", "{{ messages[0].content }}")
        path = random_model.write_random_model(tmp_path / "m.gguf",
                                               random_model.RandomSpec(n_layer=1))
    with front(path) as server:
        answer = error(server.post("/v1/chat/completions", {"messages": [USER, BEGUN]}), 400)
        assert "set continue_final_message to false" in answer["message"]
        assert server.post("/v1/chat/completions", {
            "messages": [USER, BEGUN], "continue_final_message": False}).status_code == 200


def test_connections_outlive_the_pools_of_clients():
    """Go's keep an idle one for 90 s; `--set client_timeout` is for requests that have begun."""
    assert http_server._KEEP_ALIVE > 90
    with front(MODEL, client_timeout=0.5) as server:
        client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=20)
        for pause in (0.0, 1.2):
            time.sleep(pause)
            client.request("GET", "/health")
            assert client.getresponse().read()
            kept = client.sock
        client.sock.sendall(b"GET /he")
        assert client.sock is kept
        assert kept.recv(4096) == b""
        client.close()


def official(kind, answer):
    """Check an answer, which has every field of the official client's type in its own type."""
    found = kind.model_validate(answer, strict=True)
    assert found.model_dump(exclude_unset=True) == answer


@pytest.mark.parametrize("more", [
    {}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"tools": [TOOL], "say": CALL},
    {"stream_options": {"include_usage": True}}])
def test_chats_have_the_official_types(server, more):
    more = dict(more)
    say = more.pop("say", "Hello.")
    server.peer.answer = lambda frame: server.peer.say(frame.id, say)
    body = {"messages": [USER], **more}
    if "stream_options" not in more:
        answer = server.post("/v1/chat/completions", body).json()
        official(chat.ChatCompletion, answer)
        assert bool(answer["choices"][0]["logprobs"]) == ("logprobs" in more)
    chunks, last = events(server.stream("/v1/chat/completions", body))
    for chunk in chunks:
        official(chat.ChatCompletionChunk, chunk)
    assert last == [b"data: [DONE]"]
    assert bool(chunks[-1].get("usage")) == ("stream_options" in more)
    assert server.peer.wait_for(Submit).params.n_logprobs == more.get("top_logprobs", -1)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2, "echo": True}])
def test_completions_have_the_official_types(server, more):
    body = {"prompt": "def f(", **more}
    official(types.Completion, server.post("/v1/completions", body).json())
    chunks, _ = events(server.stream("/v1/completions", body))
    for chunk in chunks:
        assert {choice["finish_reason"] for choice in chunk["choices"]} <= {None, "stop"}
        for choice in chunk["choices"]:  # the type is that of whole answers
            choice["finish_reason"] = "stop"
        official(types.Completion, chunk)


def test_responses_messages_and_models_have_the_official_types(server):
    server.peer.answer = lambda frame: server.peer.say(frame.id, CALL)
    tool = {"type": "function", **TOOL["function"], "strict": True}
    official(responses.Response, server.post(
        "/v1/responses", {"input": "x", "tools": [tool]}).json())
    tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
    official(anthropic.types.Message, server.post("/v1/messages", {
        "messages": [USER], "max_tokens": 50, "tools": [tool]}).json())
    official(anthropic.types.MessageTokensCount, server.post(
        "/v1/messages/count_tokens", {"messages": [USER]}).json())
    official(pagination.SyncPage[types.Model], server.get("/v1/models").json())
    official(types.Model, server.get("/v1/models/m").json())
