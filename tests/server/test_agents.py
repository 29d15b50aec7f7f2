"""Agents' loops with the packages of OpenAI and Anthropic: five streamed calls, each with a result.

The templates are short ones that refuse what those of Qwen 3.5 and gpt-oss refuse.
"""

from __future__ import annotations

import json

import pytest

from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.slow
QWEN = """{% if tools %}<|im_start|>system
{{ tools | tojson }} as <function=name>{% if messages[0].role == "system" %}
{{ messages[0].content }}{% endif %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "system" %}{% if not loop.first %}
{{ raise_exception("System message must be at the beginning.") }}{% endif %}
{% elif m.role == "tool" %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif m.role in ("user", "assistant") %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% else %}{{ raise_exception("Unexpected message role.") }}{% endif %}{% endfor -%}
<|im_start|>assistant
<think>
"""
HARMONY = """{% if tools %}<|start|>developer<|message|>{% for tool in tools %}
type {{ tool.function.name }} = (_: any) => any;{% endfor %}<|end|>{% endif %}
{%- set last = namespace(name="") %}{% for m in messages %}{% if m.role == "assistant" %}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{%- if m.content and m.thinking %}{{ raise_exception("Cannot pass both content and thinking") }}
{%- endif %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>
{{- m.content }}<|end|>{% endif %}{% elif m.role == "tool" %}<|start|>functions.{{ last.name }}
{{- " to=assistant" }}<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor -%}
<|start|>assistant"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CALLS = 5
VALUE = 'ü "q" <b>'


def written(family, step):
    """The answer of a model: reasoning, words and a call; in step 3 two of them, at last none."""
    names = ["f", "g"] if step == 3 else ["f"] if step < CALLS else []
    arguments = {"a": f"{step} {VALUE}"}
    if family == "qwen":
        calls = "\n".join(f"<tool_call>\n<function={name}>\n<parameter=a>\n{arguments['a']}\n"
                          "</parameter>\n</function>\n</tool_call>" for name in names)
        return f"Hm {step}.\n</think>\n\nWell {step}.{calls and f'{chr(10)}{calls}'}"
    start = "<|start|>assistant<|channel|>"
    words = "commentary" if names else "final"
    calls = "".join(f"{start}commentary to=functions.{name} <|constrain|>json<|message|>"
                    f"{json.dumps(arguments)}<|call|>" for name in names)
    return (f"<|channel|>analysis<|message|>Hm {step}.<|end|>{start}{words}<|message|>Well {step}."
            + "<|end|>" * bool(names) + calls)


@pytest.fixture(scope="module", params=["qwen", "harmony"])
def agent(request, tmp_path_factory):
    """A server whose model calls functions until it has five results, and the prompts so far."""
    template = QWEN if request.param == "qwen" else HARMONY
    path = with_template(tmp_path_factory.mktemp("model") / "m.gguf", template)
    with front(path, facts={"n_ctx": 8192}, any_model_name=True) as server:
        server.prompts = []

        def answer(frame):
            server.prompts.append(server.tokenizer.decode(list(frame.prompt), True))
            step = len({n for n in range(CALLS) if f"result of f {n}" in server.prompts[-1]})
            return server.peer.say(frame.id, written(request.param, step))

        server.peer.answer = answer
        server.family = request.param
        yield server


def result(name, arguments):
    assert arguments["a"][1:] == f" {VALUE}"
    return f"result of {name} {arguments['a'][0]}"


def by_chat(url):
    """Answers of the loop: reasoning, words, and calls as name and arguments."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."},
                    {"role": "developer", "content": "Now."}]
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}
                 for name in "fg"]
        while True:
            calls, words, thought = {}, "", ""
            for chunk in client.chat.completions.create(
                    model="m", messages=messages, tools=tools, stream=True):
                delta = chunk.choices[0].delta
                words += delta.content or ""
                thought += getattr(delta, "reasoning_content", None) or ""
                for part in delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": part.id, "type": "function",
                                                         "function": {"name": "", "arguments": ""}})
                    call["function"]["name"] += part.function.name or ""
                    call["function"]["arguments"] += part.function.arguments or ""
            found = [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                     for call in calls.values()]
            yield thought, words.strip(), found
            if not found:
                return
            messages.append({"role": "assistant", "content": words, "reasoning_content": thought,
                             "tool_calls": list(calls.values())})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": result(*one)}
                         for call, one in zip(calls.values(), found, strict=True)]


def by_responses(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        items = [{"role": "developer", "content": "Now."}, {"role": "user", "content": "Go."}]
        tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
                 for name in "fg"]
        while True:
            with client.responses.stream(model="m", instructions="Be brief.", input=items,
                                         tools=tools) as stream:
                for _ in stream:
                    pass
                output = stream.get_final_response().output
            calls = [item for item in output if item.type == "function_call"]
            found = [(call.name, json.loads(call.arguments)) for call in calls]
            thought = "".join(item.content[0].text for item in output if item.type == "reasoning")
            words = "".join(item.content[0].text for item in output if item.type == "message")
            yield thought, words.strip(), found
            if not found:
                return
            items += [item.to_dict() for item in output]
            items += [{"type": "function_call_output", "call_id": call.call_id,
                       "output": result(*one)} for call, one in zip(calls, found, strict=True)]


def by_messages(url):
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": "Go."}]
        tools = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
        while True:
            with client.messages.stream(
                    model="m", max_tokens=500, system="Be brief.", messages=messages, tools=tools,
                    thinking={"type": "adaptive"}) as stream:
                blocks = stream.get_final_message().content
            uses = [block for block in blocks if block.type == "tool_use"]
            yield ("".join(block.thinking for block in blocks if block.type == "thinking"),
                   "".join(block.text for block in blocks if block.type == "text").strip(),
                   [(use.name, use.input) for use in uses])
            if not uses:
                return
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": result(
                    use.name, use.input)} for use in uses]}]


@pytest.mark.parametrize("loop", [by_chat, by_responses, by_messages])
def test_a_loop_of_five_calls(agent, loop):
    agent.prompts.clear()
    answers = list(loop(agent.url))
    assert [answer[:2] for answer in answers] == [
        (f"Hm {step}.", f"Well {step}.") for step in range(CALLS + 1)]
    assert [answer[2] for answer in answers] == [
        [(name, {"a": f"{step} {VALUE}"}) for name in ("fg" if step == 3 else "f")]
        for step in range(CALLS)] + [[]]
    last = agent.prompts[-1]
    for step in range(CALLS):  # all of it comes back to the model, in order
        places = [last.index(text) for text in (
            f"Hm {step}.", f"Well {step}.", f"result of f {step}")]
        assert places == sorted(places)
    assert last.count("result of g 3") == 1
    call = "<function=g>" if agent.family == "qwen" else "to=functions.g<|channel|>"
    assert last.count(call) == 1
    if agent.family == "harmony":  # each result has the name of its function
        told = '<|start|>functions.g to=assistant<|channel|>commentary<|message|>"result of g 3"'
        assert told in last
    for text in ("Be brief.", "Go."):
        assert last.count(text) == 1
