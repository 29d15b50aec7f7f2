"""Tools over HTTP, with a model whose chat template knows them and a scripted engine."""

from __future__ import annotations

import pytest
from pydantic_core import from_json

from pipeinfer.server.frames import Submit
from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front
from tests.server.test_http import error, events

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} "
    "Write <tool_call> around a call.\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}\n{% endfor %}{% if thinking %}think{% endif %}")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False}}}
OTHER = {"type": "function", "function": {"name": "other"}}
BODY = {"messages": [{"role": "user", "content": "1+1"}], "tools": [TOOL, OTHER]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = with_template(tmp_path_factory.mktemp("model") / "tools.gguf", TEMPLATE)
    with front(path, facts={"n_ctx": 2048}) as server:
        yield server


def ask(server, **more):
    return server.post("/v1/chat/completions", BODY | more)


def test_kimi_gets_its_own_ids_of_calls(tmp_path):
    path = with_template(tmp_path / "kimi.gguf", (
        "{{ tools }}<|tool_call_begin|>{% for m in messages %}[{{ m.role }}"
        "{% for c in m.tool_calls or [] %} {{ c.id }}{% endfor %} {{ m.tool_call_id }}]"
        "{% endfor %}"))
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x"}]
    for ids in (("a", "b"), ("a",)):  # the same id again
        messages.append({"role": "assistant", "tool_calls": [{**call, "id": one} for one in ids]})
        messages += [{"role": "tool", "tool_call_id": one, "content": ""} for one in ids[::-1]]
    with front(path) as server:
        prompt = server.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert prompt.partition("[user")[2].replace(" ]", "]") == (
        "][assistant functions.f:0 functions.f:1][tool functions.f:1][tool functions.f:0]"
        "[assistant functions.f:2][tool functions.f:2]")


def test_the_template_gets_tools_calls_as_objects_and_variables(server):
    prompt = server.post("/apply-template", {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"}],
        "tools": [TOOL], "chat_template_kwargs": {"thinking": True}}).json()["prompt"]
    assert '"name": "add"' in prompt
    assert 'assistant: [add {"a": 1}]tool: 2think' in prompt
    assert "<b>" in server.post("/apply-template", {**BODY, "tools": [
        {"type": "function", "function": {"name": "f", "description": "<b>"}}]}).json()["prompt"]


RUN = '<tool_call>{"name": "add", "arguments": {"command": "ls; rm -rf build/tmp"}}</tool_call>'


@pytest.mark.parametrize(("before", "stop", "calls", "reason"), [
    ("", "/tmp", [], "stop"),
    ("", '"}}', [], "stop"),
    (CALL, "/tmp", [{"a": 1}], "stop"),
    ("", "</tool_call>", [{"command": "ls; rm -rf build/tmp"}], "tool_calls"),
])
def test_a_call_that_a_stop_text_cut_is_no_call(server, before, stop, calls, reason):
    """Its arguments could be run, and are not all: {"command": "ls; rm -rf build"}."""
    server.peer.answer = lambda f: server.peer.say(f.id, f"Now {before}{RUN}")
    choice = ask(server, stop=stop).json()["choices"][0]
    assert [from_json(call["function"]["arguments"])
            for call in choice["message"].get("tool_calls", [])] == calls
    assert choice["finish_reason"] == reason
    response = server.stream("/v1/chat/completions", {**BODY, "stop": stop})
    assert events(response)[0][-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("choice", "names"), [
    ("auto", set()), ("required", {"add", "other"}),
    ({"type": "function", "function": {"name": "add"}}, {"add"}),
])
def test_a_required_call_is_a_grammar(server, choice, names):
    server.peer.answer = lambda f: server.peer.say(f.id, CALL)
    assert ask(server, tool_choice=choice).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = server.peer.wait_for(Submit).params.grammar
    assert {name for name in ("add", "other") if f"{name}\\\"" in grammar} == names


def test_none_hides_the_tools_and_finds_no_calls(server):
    server.peer.answer = lambda f: server.peer.say(f.id, CALL)
    message = ask(server, tool_choice="none").json()["choices"][0]["message"]
    assert message["content"] == CALL
    with_tools = len(server.peer.wait_for(Submit).prompt)
    ask(server)
    assert len(server.peer.wait_for(Submit, 2).prompt) > with_tools


@pytest.mark.parametrize(("more", "param"), [
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
])
def test_choices_that_cannot_be_are_refused(server, more, param):
    assert error(ask(server, **more), 400)["param"].startswith(param)


#: fails where a function has no description or parameters, as that of gpt-oss does
DESCRIBED = ("{% for t in tools or [] %}{{ t.function.description + t.function.name }} "
             "{{ t.function.name }} {{ t.function.parameters.properties | dictsort | join }}"
             "{% endfor %}")


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}"
    "{% endfor %}{% endfor %}tools"
    + DESCRIBED,
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ '%s' | format(c.function.arguments.strip()) }}{% endfor %}{% endfor %}tools"
    + DESCRIBED,
])
def test_templates_get_arguments_as_text_and_functions_without_gaps(tmp_path, template):
    path = with_template(tmp_path / "m.gguf", template)
    given = {"messages": [{"role": "user", "content": "x"}], "tools": [OTHER]}
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}}
             for text in ('{"a":  "é"}', "no JSON")]
    with front(path) as server:
        answer = server.post("/apply-template", {"messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": calls}]})
        shown = server.post("/apply-template", given)
    assert answer.json()["prompt"] == 'f{"a": "é"}fno JSONtools'
    assert shown.json()["prompt"] == "tools" + "other " * 2
