"""/v1/messages with Anthropic's official client and a scripted engine."""

from __future__ import annotations

import json
import warnings

import anthropic
import pytest
import requests

from pipeinfer.server.anthropic_messages import MessagesRequest
from pipeinfer.server.frames import Refused, Submit
from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front
from tests.server.test_response_items import prompt
from tests.server.test_tools import CALL, TEMPLATE

pytestmark = pytest.mark.slow
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
          "additionalProperties": False}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
USER = {"role": "user", "content": "Hi"}
PICTURE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
THOUGHT = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}({{ m.reasoning_content }})") + (
    "{% if enable_thinking is defined %}{{ enable_thinking }}<think>\n{% endif %}")


def written(tmp_path_factory, template):
    return with_template(tmp_path_factory.mktemp("model") / "m.gguf", template)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with front(written(tmp_path_factory, THOUGHT), facts={"n_ctx": 4096},
               any_model_name=True) as server:
        yield server


@pytest.fixture
def ask(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0,
                             timeout=30) as client:
        def create(text="Hello.", /, **more):
            server.peer.answer = lambda f: server.peer.say(f.id, text, reused=2)
            return client.messages.create(**{
                "model": "claude-x", "max_tokens": 50, "messages": [USER], **more})

        create.client = client
        yield create


def test_text_is_answered_with_a_block_and_counts(server, ask):
    message = ask(system=[{"type": "text", "text": "Be brief.",
                           "cache_control": {"type": "ephemeral"}},
                          {"type": "text", "text": "x-anthropic-billing-header: cch=1"}],
                  metadata={"user_id": "u"},
                  extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.text for block in message.content] == ["Hello."]
    assert message.stop_sequence is None
    assert message.usage.output_tokens == len(server.tokenizer.encode("Hello.", add_bos=False))
    submitted = server.peer.wait_for(Submit)
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.input_tokens == len(submitted.prompt) - 2
    params = submitted.params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    assert submitted.max_tokens == 50
    assert prompt(server).endswith(">system: Be brief.()user: Hi()")


def test_a_call_and_its_result_go_back_as_they_came(server, ask):
    first = ask(f"Well: {CALL}", tools=[TOOL], tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    text, call = first.content
    assert (text.text, call.name, call.input) == ("Well: ", "add", {"a": 1})
    assert server.peer.wait_for(Submit).params.grammar
    second = ask("It is 42.", tools=[TOOL], messages=[
        USER, {"role": "assistant", "content": first.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id,
             "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
            {"type": "tool_result", "tool_use_id": call.id, "is_error": True},
            {"type": "text", "text": "Go on."}]}])
    assert second.content[0].text == "It is 42."
    assert prompt(server, 2).endswith(
        'assistant: Well: ()[add {"a": 1}]tool: 42()tool: ()user: Go on.()')


def test_a_call_that_a_stop_sequence_cut_is_no_call(server, ask):
    message = ask(f"Well: {CALL}", tools=[TOOL], stop_sequences=["1}"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "1}")
    assert [block.type for block in message.content] == ["text"]


def test_the_clients_own_tool_runner(server, ask):
    """It first sends a field of conversations that the server stores, and goes on without it."""
    given = []

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds."""
        given.append(a)
        return "42"

    server.peer.answer = lambda f: server.peer.say(f.id, "It is 42." if given else CALL)
    runner = ask.client.beta.messages.tool_runner(model="x", max_tokens=50, tools=[add],
                                                  messages=[USER])
    assert runner.until_done().content[0].text == "It is 42."
    assert given == [1]


@pytest.mark.parametrize(("choice", "is_held"), [
    ({"type": "auto"}, False), ({"type": "none"}, False), ({"type": "any"}, True),
    ({"type": "tool", "name": "add"}, True),
    ({"type": "any", "disable_parallel_tool_use": True}, True)])
def test_tool_choices(server, ask, choice, is_held):
    ask(tools=[TOOL], tool_choice=choice)
    assert bool(server.peer.wait_for(Submit).params.grammar) == is_held
    assert ("Adds." in prompt(server)) == (choice["type"] != "none")


def test_one_call_where_more_are_not_wanted(ask):
    two = f"{CALL}\n{CALL}"
    assert len(ask(two, tools=[TOOL]).content) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(two, tools=[TOOL], tool_choice=choice).content) == 1


def test_tools_of_other_kinds_are_left_out_and_noted(server, ask):
    message = ask(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"},
                         {"type": "bash_20250124", "name": "bash"}])
    assert [note.split(" is")[0] for note in message.model_extra["notes"]] == [
        "tools: web_search_20250305", "tools: bash_20250124"]
    assert "Adds." in prompt(server)
    assert "bash" not in prompt(server)
    events = list(ask(tools=[{"type": "bash_20250124", "name": "bash"}], stream=True))
    assert len(events[-2].model_extra["notes"]) == 1


def test_a_stream_begins_with_the_counts_with_which_it_ends(server, ask):
    """Clients show the first ones, and add them up."""
    server.peer.answer = lambda f: server.peer.say(f.id, "Hello.", reused=3)
    with ask.client.messages.stream(model="x", max_tokens=50, messages=[USER]) as stream:
        first, last = [e for e in stream if e.type in ("message_start", "message_delta")]
        whole = stream.get_final_message()
    n_prompt = len(server.peer.wait_for(Submit).prompt)
    for usage in (first.message.usage, last.usage, whole.usage):
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (n_prompt - 3, 3)


def test_nothing_comes_before_a_message_begins(server):
    """Not even a ping while the prompt is read: the official clients expect message_start."""
    server.peer.answer = lambda f: []
    body = {"max_tokens": 5, "model": "x", "messages": [USER], "stream": True}
    answers = []
    with requests.post(server.url + "/v1/messages", json=body, stream=True, timeout=20) as got:
        frame = server.peer.wait_for(Submit)
        server.peer.news(server.peer.say(frame.id, "Hi"))
        answers = [line for line in got.iter_lines() if line.startswith(b"event:")]
    assert answers[:2] == [b"event: message_start", b"event: ping"]


def test_a_stream_has_the_official_events_in_order(server, ask):
    events = [e.model_dump() for e in ask(
        f"<think>\nHm.</think>\n\nWell: {CALL}{CALL}", tools=[TOOL], stream=True)]
    kinds = [event["type"].removeprefix("content_") for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    block = ["block_start", "block_delta", "block_stop"]
    assert [k for k, before in zip(kinds, [None, *kinds], strict=False) if k != before][1:-2] == \
        block * 4
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["content_block"]["type"] for e in starts] == [
        "thinking", "text", "tool_use", "tool_use"]
    assert [e["index"] for e in starts] == list(range(4))

    def joined(index, field):
        deltas = [e["delta"] for e in events
                  if e["type"] == "content_block_delta" and e["index"] == index]
        assert len({delta["type"] for delta in deltas}) == 1
        return deltas[0]["type"], "".join(delta[field] for delta in deltas)

    assert joined(0, "thinking") == ("thinking_delta", "Hm.")
    assert joined(1, "text") == ("text_delta", "Well: ")
    for index in (2, 3):
        assert joined(index, "partial_json") == ("input_json_delta", '{"a": 1}')
    assert all(e["content_block"]["id"].startswith("toolu_") for e in starts[2:])
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == len(server.peer.seen[0].prompt) - 2
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["cache_read_input_tokens"] == 2
    assert events[-2]["usage"]["output_tokens"] > 20


def test_a_stop_sequence_is_named(server, ask):
    for stream in (False, True):
        message = ask("one two three", stop_sequences=["three", "two"], stream=stream)
        if stream:
            events = list(message)
            end = events[-2].delta
            assert "".join(e.delta.text for e in events
                           if e.type == "content_block_delta") == "one "
        else:
            end = message
            assert message.content[0].text == "one "
        assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "two")


@pytest.mark.parametrize("reason", ["length", "context"])
def test_an_answer_that_is_cut_off(server, ask, reason):
    ask()
    server.peer.answer = lambda f: server.peer.say(f.id, "one", reason)
    message = ask.client.messages.create(model="x", max_tokens=1, messages=[USER])
    assert (message.stop_reason, message.content[0].text) == ("max_tokens", "one")


def test_an_empty_answer_has_no_block(ask):
    assert ask("").content == []
    assert [e.type for e in ask("", stream=True)] == [
        "message_start", "message_delta", "message_stop"]


def test_thoughts_go_back_and_a_last_answer_is_continued(server, ask):
    turns = [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes."}]}, USER]
    ask(messages=turns)
    assert "assistant: Yes.(Hm.)user" in prompt(server)
    ask(messages=turns[:2])
    assert prompt(server, 2).endswith("assistant: Yes.")


@pytest.mark.parametrize(("thinking", "is_on"), [
    ({"type": "disabled"}, False), ({"type": "enabled", "budget_tokens": 1024}, True),
    ({"type": "adaptive"}, True)])
def test_thinking_is_a_variable_of_the_template(server, ask, thinking, is_on):
    message = ask("Hm.</think>\nYes.", thinking=thinking)
    assert prompt(server).endswith(f"{is_on}<think>\n")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes.")


@pytest.mark.parametrize(("body", "says"), [
    ({"messages": [{"role": "user", "content": [PICTURE]}]},
     "messages.0.content.0: this model is served without a projector"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                                 "content": [PICTURE]}]}]},
     "messages.0.content.0.content.0: this model is served without a projector"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
     "document"),
    ({"messages": []}, "messages"), ({}, "messages"),
    ({"container": "c"}, "runs no code"), ({"thread": {"type": "create"}}, "stores no"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tool_choice": {"type": "any"}}, "tools is empty"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs the field name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "not in tools"),
    ({"tools": [{"input_schema": SCHEMA}]}, "name"), ({"stop_sequences": [""]}, "stop_sequences"),
])
def test_a_bad_request_is_a_400_in_anthropics_form(server, body, says):
    body = body if "messages" in body or not body else {"messages": [USER], **body}
    paths = ["/v1/messages"]
    if not body.keys() & {"container", "thread", "max_tokens", "stop_sequences"}:
        paths.append("/v1/messages/count_tokens")  # of the answer's fields it knows none
    for path in paths:
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        found = answer.json()
        assert found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error"
        assert says in found["error"]["message"]


def test_errors_of_every_layer_have_that_form(server, ask):
    with pytest.raises(anthropic.NotFoundError, match="--journal"):
        ask.client.messages.batches.list()
    found = requests.get(server.url + "/v1/messages", timeout=10)
    assert (found.status_code, found.json()["error"]["type"]) == (405, "invalid_request_error")
    server.peer.answer = lambda f: [Refused(f.id, "request", "too odd")]
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask.client.messages.create(model="x", max_tokens=1, messages=[USER])
    assert caught.value.body["error"] == {
        "type": "invalid_request_error", "message": "too odd",
        "details": {"error_code": "request_refused"}}
    with pytest.raises(anthropic.APIStatusError, match="too odd"):
        list(ask.client.messages.create(model="x", max_tokens=1, messages=[USER], stream=True))
    with pytest.raises(anthropic.BadRequestError, match="context"):
        ask(messages=[{"role": "user", "content": "word " * 5000}])


def test_keys_and_limits_have_that_form(tmp_path_factory):
    with front(written(tmp_path_factory, TEMPLATE), facts={"n_ctx": 512}, keys=("secret",),
               max_body=2000) as server:
        for key, more in (("secret", {}), ("wrong", {"default_headers": {
                "Authorization": "Bearer secret"}})):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0,
                                     **more) as client:
                assert client.messages.create(model="m", max_tokens=5, messages=[USER]).content
        with anthropic.Anthropic(base_url=server.url, api_key="no", max_retries=0) as client, \
                pytest.raises(anthropic.AuthenticationError, match="a valid API key") as caught:
            client.messages.create(model="m", max_tokens=5, messages=[USER])
        assert caught.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.RequestTooLargeError) as caught:
                client.messages.create(model="m", max_tokens=5, messages=[
                    {"role": "user", "content": "x" * 3000}])
            assert caught.value.body["error"]["type"] == "request_too_large"
            with pytest.raises(anthropic.NotFoundError, match="--any-model-name"):
                client.messages.create(model="claude", max_tokens=5, messages=[USER])


@pytest.mark.parametrize("more", [
    {}, {"system": "Be brief."}, {"tools": [TOOL]}, {"tools": [TOOL], "system": "x"},
    {"tools": [TOOL], "tool_choice": {"type": "none"}}, {"thinking": {"type": "disabled"}}])
def test_counted_tokens_are_those_of_the_prompt(server, ask, more):
    count = ask.client.messages.count_tokens(model="x", messages=[USER], **more).input_tokens
    assert server.peer.seen == []
    ask(**more)
    assert count == len(server.peer.wait_for(Submit).prompt)


def test_what_does_not_fit_is_counted_too(server, ask):
    turns = [{"role": "user", "content": "word " * 9000}]
    assert ask.client.messages.count_tokens(model="x", messages=turns).input_tokens > 4096


def test_requests_are_written_as_they_came():
    """As the journal stores them; the union's branches are found again."""
    system = [{"type": "text", "text": "x"}]
    body = {"messages": [USER, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm."}, {"type": "tool_use", "id": "1", "name": "add",
                                                  "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
                                      "content": system}]}],
        "system": system, "tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}
    with warnings.catch_warnings(action="error"):
        assert MessagesRequest.model_validate(body).model_dump(exclude_none=True) == body


def test_a_format_becomes_a_grammar(server, ask):
    ask(output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    assert server.peer.wait_for(Submit).params.grammar


def test_a_journaled_answer_comes_again(tmp_path_factory):
    """The same events, with the same ids of blocks."""
    path = written(tmp_path_factory, TEMPLATE)
    with front(path, facts={"n_ctx": 512}, journal=str(path.parent / "journal")) as server:
        server.peer.answer = lambda f: server.peer.say(f.id, CALL)
        body = {"messages": [USER], "tools": [TOOL], "stream": True}
        streams = [requests.post(f"{server.url}/v1/messages", json=body, timeout=10, headers={
            "Idempotency-Key": "k"}).text for _ in range(2)]
        assert streams[0] == streams[1]
        start = json.loads(streams[0].split("data: ")[1].split("\n")[0])
        again = requests.get(f"{server.url}/v1/messages/{start['message']['id']}",
                             timeout=10).json()
    assert again["content"][0]["id"] in streams[0]
    assert again["content"][0]["input"] == {"a": 1}
