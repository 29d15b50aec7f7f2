"""Tools over HTTP, with a model whose chat template knows none."""

from __future__ import annotations

import json

import pytest

from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.server.frames import Submit
from pipeinfer.server.generic_tools import messages_for, without_system
from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front
from tests.server.test_http import events
from tests.server.test_tools import CALL, OTHER, TOOL

pytestmark = pytest.mark.slow
STRICT = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
          "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
          "{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
HISTORY = [
    {"role": "user", "content": "1+1, 2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": n, "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
        for n in "12"]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "tool", "tool_call_id": "2", "content": "4"},
]
BODY = {"messages": HISTORY[:1], "tools": [TOOL, OTHER]}


@pytest.fixture(scope="module", params=["system", "none"])
def shared(request, tmp_path_factory):
    path = with_template(tmp_path_factory.mktemp("model") / "plain.gguf",
                         STRICT if request.param == "none" else "")
    with front(path, facts={"n_ctx": 4096}) as server:
        yield server


def follows(server, count, text):
    """Whether the grammar of the request number `count` allows a text and its end."""
    compiled = server.peer.wait_for(Submit, count).params.grammar
    vocabulary = Vocabulary.of(server.tokenizer)
    mask = Constraint(vocabulary, compiled).allowed(server.tokenizer.encode(text, add_bos=False))
    return mask is not None and any(mask[i] for i in server.tokenizer.eog_ids)


def test_the_model_is_told_of_the_tools_and_of_calls_and_results(server):
    answer = server.post("/apply-template", {"messages": HISTORY, "tools": [TOOL, OTHER]})
    prompt = answer.json()["prompt"]
    assert json.dumps(TOOL["function"]) in prompt
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>' in prompt
    assert ("<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>" in prompt)
    assert prompt.index("You can call functions") < prompt.index("1+1, 2+2?")


def test_calls_are_found_and_held_to_the_functions(server):
    server.peer.answer = lambda f: server.peer.say(f.id, CALL)
    choice = server.post("/v1/chat/completions", BODY).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    for text, right in (("Just words.", True), ("", True), (CALL, True), (f"So: {CALL}", True),
                        (f"{CALL}\n{CALL}", True), (CALL.replace("add", "sub"), False),
                        (CALL.replace('"a"', '"b"'), False), ("a <tool_call>", False)):
        assert follows(server, 1, text) == right, text


@pytest.mark.parametrize(("more", "rights"), [
    ({"tool_choice": "required"}, (False, True, False)),
    ({"tool_choice": "required", "parallel_tool_calls": True}, (False, True, True)),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, (False, True, False)),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, (False, False, False)),
    ({"parallel_tool_calls": False}, (True, True, False)),
])
def test_choices_and_how_many_calls(server, more, rights):
    server.peer.answer = lambda f: server.peer.say(f.id, CALL)
    assert server.post("/v1/chat/completions", {**BODY, **more}).status_code == 200
    for text, right in zip(("words", CALL, f"{CALL}\n{CALL}"), rights, strict=True):
        assert follows(server, 1, text) == right, text


def test_references_in_parameters_count_from_the_parameters(server):
    tool = {"type": "function", "function": {"name": "User", "parameters": {
        "type": "object", "properties": {"home": {"$ref": "#/$defs/Home"}}, "required": ["home"],
        "$defs": {"Home": {"type": "object", "properties": {"city": {"type": "string"}},
                           "required": ["city"]}}}}}
    for choice in ("required", "auto"):
        server.peer.reset()
        body = {**BODY, "tools": [tool, OTHER], "tool_choice": choice}
        assert server.post("/v1/chat/completions", body).status_code == 200
        for given, right in (('{"home": {"city": "x"}}', True), ('{"home": {"town": 1}}', False)):
            text = f'<tool_call>\n{{"name": "User", "arguments": {given}}}\n</tool_call>'
            assert follows(server, 1, text) == right


def test_none_and_other_formats_need_no_grammar_of_calls(server):
    for more in ({"tool_choice": "none"}, {"ignore_eos": True}):
        server.peer.reset()
        assert server.post("/v1/chat/completions", {**BODY, **more}).status_code == 200
        assert server.peer.wait_for(Submit).params.grammar == ""


def test_one_call_at_most_is_one_also_where_the_model_makes_more(server):
    server.peer.answer = lambda f: server.peer.say(f.id, f"{CALL}\n{CALL}")
    body = {**BODY, "parallel_tool_calls": False}
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    chunks, _ = events(server.stream("/v1/chat/completions", body))
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert {c["index"] for c in calls} == {0}
    assert "".join(c["function"]["arguments"] for c in calls) == '{"a": 1}'


def test_a_model_says_what_it_can_do(server):
    (model,) = server.get("/v1/models").json()["data"]
    assert model["context_length"] == 4096
    assert model["capabilities"]["tools"] == "generic"
    assert model["capabilities"]["embeddings"] is False


def test_any_name_where_the_server_says_so(server, tmp_path):
    path = with_template(tmp_path / "m.gguf", "")
    body = {"prompt": "x", "model": "gpt-4o"}
    assert "--any-model-name" in server.post("/v1/completions", body).json()["error"]["message"]
    with front(path, any_model_name=True) as other:
        assert other.post("/v1/completions", body).json()["model"] == "m"


def test_where_the_model_decides_it_sees_an_answer_and_then_a_call():
    question = {"role": "user", "content": "x"}
    function = {"name": "look", "description": "Look up a word.\nSlow.", "parameters": {
        "type": "object", "required": ["word", "how", "most"], "properties": {
            "word": {"type": "string"}, "how": {"enum": ["fast", "slow"]},
            "most": {"type": "integer"}, "more": {"type": "boolean"}}}}
    told = {"role": "system", "content": "Be brief."}
    _, hello, greeting, asked, called, last = messages_for([told, question], [function], False)
    assert (hello["role"], greeting["role"]) == ("user", "assistant")
    assert asked == {"role": "user", "content": "Look up a word."}
    assert json.loads(called["content"].splitlines()[1])["arguments"] == {
        "word": "some word", "how": "fast", "most": 1}
    assert last == question
    assert [m["role"] for m in messages_for([question], [function], True)] == ["system", "user"]


@pytest.mark.parametrize("parameters", [
    None, {}, {"properties": 5, "required": 7}, {"properties": {"a": True, "b": {"type": ["x"]}}},
    {"required": [1, None]}])
def test_what_is_shown_of_odd_parameters_is_a_call(parameters):
    function = {"name": "f", "parameters": parameters}
    messages = messages_for([{"role": "user", "content": "x"}], [function], False)
    assert messages[3]["content"] == "Call f."
    assert json.loads(messages[4]["content"].splitlines()[1])["name"] == "f"


def test_words_of_a_system_go_to_the_first_user():
    messages = messages_for([{"role": "system", "content": "Be brief."},
                             {"role": "user", "content": "x"}], [TOOL["function"]], True)
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions")
    assert "Call a function now." in messages[0]["content"]
    (only,) = without_system(messages)
    assert only["role"] == "user"
    assert only["content"].endswith("\n\nx")
    assert without_system(messages[:1])[0]["role"] == "user"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function",
                                                         "function": {"name": "f"}}])
@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {}}],
                         ids=["absent", "null", "empty"])
def test_a_function_without_parameters_is_called_without(server, more, choice):
    tool = {"type": "function", "function": {"name": "f", **more}}
    body = {**BODY, "tools": [tool], "tool_choice": choice}
    assert server.post("/v1/chat/completions", body).status_code == 200
    for given, right in (("{}", True), ('{"ARGUMENT": "VALUE"}', False), ("[]", False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {given}}}\n</tool_call>'
        assert follows(server, 1, text) == right, given


ODD = {"type": "object", "properties": {
    "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "file": {"type": "string", "format": "path"}}, "required": ["tags", "more"]}
LEFT_OUT = ["uniqueItems", "format path"]


def odd_tool(**more):
    return {"type": "function", "function": {"name": "odd", "parameters": ODD, **more}}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_a_grammar_cannot_hold_is_named_and_the_rest_holds(server, choice):
    body = {**BODY, "tools": [TOOL, odd_tool()], "tool_choice": choice}
    notes = [f"tool odd: {one} is not enforced" for one in LEFT_OUT]
    assert server.post("/v1/chat/completions", body).json()["notes"] == notes
    for given, right in (('{"tags": [1, 1], "file": "", "more": null}', True),
                         ('{"tags": ["x"], "more": 1}', False), ('{"tags": [1]}', False)):
        text = f'<tool_call>\n{{"name": "odd", "arguments": {given}}}\n</tool_call>'
        assert follows(server, 1, text) == right, given
    chunks, _ = events(server.stream("/v1/chat/completions", body))
    assert [c["notes"] for c in chunks if "notes" in c] == [notes]
    items = server.post("/v1/responses", {"input": "x", "tool_choice": choice, "tools": [
        {"type": "function", **odd_tool()["function"]}]})
    assert items.json()["notes"] == notes
    assert "notes" not in server.post("/v1/chat/completions", BODY).json()


def test_a_format_of_answers_is_held_as_far_as_possible_too(server):
    def ask(**more):
        return server.post("/v1/chat/completions", {
            "messages": BODY["messages"], "response_format": {
                "type": "json_schema", "json_schema": {"name": "odd", "schema": ODD, **more}}})

    assert ask().json()["notes"] == [f"response_format: {one} is not enforced" for one in LEFT_OUT]
    assert ask(strict=False).status_code == 200
    error = ask(strict=True).json()["error"]
    assert error["param"] == "response_format"
    assert all(one in error["message"] for one in LEFT_OUT)
    answer = server.post("/v1/responses", {"input": "x", "text": {"format": {
        "type": "json_schema", "name": "odd", "schema": ODD, "strict": True}}})
    assert answer.json()["error"]["param"] == "text.format"


def test_strict_tools_are_held_or_refused(server):
    body = {**BODY, "tools": [TOOL, odd_tool(strict=True)]}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools"
    assert all(one in error["message"] for one in ("tool odd", *LEFT_OUT))
