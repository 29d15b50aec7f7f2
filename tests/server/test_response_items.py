"""/v1/responses with the official client and a scripted engine."""

from __future__ import annotations

import warnings

import openai
import pydantic
import pytest

from pipeinfer.server.frames import Refused, Submit
from pipeinfer.server.openai_responses import ResponseRequest
from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front
from tests.server.test_http import error
from tests.server.test_tools import CALL

pytestmark = pytest.mark.slow
TOOL = {"type": "function", "name": "add", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False}}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = with_template(tmp_path_factory.mktemp("model") / "plain.gguf", "")
    with front(path, facts={"n_ctx": 4096}, any_model_name=True) as server:
        yield server


@pytest.fixture
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0,
                       timeout=30) as client:
        def create(text="Hello.", /, **more):
            server.peer.answer = lambda f: server.peer.say(f.id, text)
            return client.responses.create(model="gpt-x", **{"input": "Hi", **more})

        create.client = client
        yield create


def prompt(server, count=1):
    return server.tokenizer.decode(server.peer.wait_for(Submit, count).prompt, True)


def test_text_is_answered_with_a_message_and_counts(server, ask):
    response = ask("Hello.", instructions="Be brief.", temperature=0.5, max_output_tokens=50,
                   metadata={"a": "b"}, store=True)
    assert response.output_text == "Hello."
    assert (response.status, response.error) == ("completed", None)
    assert response.usage.total_tokens == response.usage.input_tokens + len(
        server.tokenizer.encode("Hello.", add_bos=False))
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.temperature, response.max_output_tokens) == (0.5, 50)
    submitted = server.peer.wait_for(Submit)
    assert (submitted.params.temperature, submitted.max_tokens) == (0.5, 50)
    assert prompt(server).index("Be brief.") < prompt(server).index("Hi")


@pytest.mark.parametrize("choice", ["none", "auto", {"type": "function", "name": "add"}])
def test_tool_choices(server, ask, choice):
    ask(tools=[TOOL], tool_choice=choice)
    assert bool(server.peer.wait_for(Submit).params.grammar) == (choice != "none")


def test_a_stream_has_the_official_events_in_order(server, ask):
    events = list(ask(f"Well: {CALL}", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in events))
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Well: "
    assert "".join(e.delta for e in events
                   if e.type == "response.function_call_arguments.delta") == '{"a": 1}'
    message, call = events[-1].response.output
    assert (message.content[0].text, call.arguments) == ("Well: ", '{"a": 1}')
    assert [e.item for e in events if e.type == "response.output_item.done"] == [message, call]
    assert events[-1].response.usage.output_tokens > 0


def test_the_clients_own_stream_and_parser(server, ask):
    class Person(pydantic.BaseModel):
        name: str
        age: int

    server.peer.answer = lambda f: server.peer.say(f.id, '{"name": "Ann", "age": 3}')
    with ask.client.responses.stream(model="x", input="Who?", text_format=Person) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Person(name="Ann", age=3)
    parsed = ask.client.responses.parse(model="x", input="Who?", text_format=Person)
    assert parsed.output_parsed == Person(name="Ann", age=3)
    for count in (1, 2):
        assert server.peer.wait_for(Submit, count).params.grammar


def test_an_answer_that_is_cut_off_is_incomplete(server, ask):
    server.peer.answer = lambda f: server.peer.say(f.id, "One two", reason="length")
    response = ask.client.responses.create(model="x", input="Hi", max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    stream = ask.client.responses.create(model="x", input="Hi", max_output_tokens=2, stream=True)
    assert [event.type for event in stream][-1] == "response.incomplete"


@pytest.mark.parametrize(("more", "param", "says"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"background": True}, "background", "answers at once"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
     "input.0.content.0.type", "input_text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
     "input.0.content.0.image_url", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
     "input.0.content.0", "without a projector"),
    ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
    ({"tools": [{"name": "f"}]}, "tools.0.type", "required"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "function"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "strict": True,
                          "schema": {"type": "dog"}}}},
     "text.format", ""),
])
def test_what_cannot_be_done_is_named(server, more, param, says):
    found = error(server.post("/v1/responses", {"input": "Hi", **more}), 400)
    assert found["param"] == param
    assert says in found["message"]


def test_a_stream_that_goes_wrong_ends_with_one_event(server, ask):
    server.peer.answer = lambda f: [Refused(f.id, "request", "the grammar allows no token")]
    events = list(ask.client.responses.create(model="x", input="Hi", stream=True))
    assert [event.type for event in events][-1] == "response.failed"
    assert events[-1].response.error.message == "the grammar allows no token"


OTHERS = [{"type": "web_search"}, {"type": "local_shell"},
          {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
          {"type": "image_generation"}, {"type": "mcp", "server_label": "x", "server_url": "y"},
          {"type": "namespace", "name": "n", "tools": [TOOL]}, {"type": "web_search"}]


def test_tools_that_are_no_functions_are_left_out_and_noted(server, ask):
    response = ask(tools=[*OTHERS, TOOL], tool_choice="auto")
    assert [note.split(" is")[0] for note in response.model_extra["notes"]] == [
        f"tools: {kind}" for kind in dict.fromkeys(one["type"] for one in OTHERS)]
    assert len(response.tools) == 8
    assert "add" in prompt(server)
    assert "apply_patch" not in prompt(server)
    ask(tools=OTHERS)
    assert not server.peer.wait_for(Submit, 2).params.grammar
    events = list(ask(tools=OTHERS[:1], stream=True))
    assert len(events[-1].response.model_extra["notes"]) == 1


def test_requests_are_written_as_they_came():
    """As answers repeat and the journal stores them; the union's branches are found again."""
    body = {"input": [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "web_search_call", "id": "w", "action": {"query": "x"}},
        {"type": "function_call_output", "call_id": "1", "output": "2"}],
        "tools": [*OTHERS, TOOL], "tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}}
    with warnings.catch_warnings(action="error"):
        assert ResponseRequest.model_validate(body).model_dump(exclude_none=True) == body


def test_allowed_tools_may_name_some_of_other_kinds(server, ask):
    choice = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "web_search"}, {"type": "function", "name": "add"}]}
    ask(CALL, tools=[*OTHERS, TOOL], tool_choice=choice)
    assert server.peer.wait_for(Submit).params.grammar
    ask(tools=[*OTHERS, TOOL], tool_choice={**choice, "mode": "auto", "tools": choice["tools"][:1]})
    assert "add" not in prompt(server, 2)
    answer = server.post("/v1/responses", {"input": "x", "tools": OTHERS,
                                           "tool_choice": "required"})
    assert error(answer, 400)["param"] == "tool_choice"


def test_items_of_other_programs_conversations(server, ask):
    response = ask(input=[
        {"type": "message", "role": "user", "content": "Hi", "timestamp": 1, "id": "msg_1"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
        {"type": "local_shell_call", "call_id": "1", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "call_id": "1", "output": "secret"},
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "x"},
        {"role": "assistant", "content": "Well.", "reasoning": "so", "id": "msg_2"},
        {"role": "user", "content": "On."},
    ], extra_body={"client_metadata": {"a": "b"}}, text={"verbosity": "low"})
    assert response.output_text == "Hello."
    assert [note.split(" is")[0] for note in response.model_extra["notes"]] == [
        f"input: {kind}" for kind in ("custom_tool_call", "local_shell_call",
                                      "local_shell_call_output", "web_search_call")]
    assert "secret" not in prompt(server)
    assert prompt(server).index("Well.") < prompt(server).index("On.")
