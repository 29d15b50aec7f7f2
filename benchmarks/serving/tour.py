"""A tour with the clients that people use: openai, anthropic, LangChain, LiteLLM, Instructor, an
agent's loop.

    python3 -m venv tour
    tour/bin/pip install openai anthropic langchain-openai langchain-anthropic
    tour/bin/pip install litellm mcp instructor
    mpirun -np 4 pipeinfer serve -m model.gguf --any-model-name
    tour/bin/python benchmarks/serving/tour.py http://127.0.0.1:8080

Imports nothing of pipeinfer: these clients have an environment of their own. Every step prints what
it got; the status is 1 if one failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable

STEPS: list[Callable[[str], object]] = []
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city now.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"]}}}
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Bonn", "Bern")
MODEL = "any-name"


def step(call: Callable[[str], object]) -> Callable[[str], object]:
    STEPS.append(call)
    return call


def client(url: str):
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)


@step
def openai_chat(url: str) -> object:
    """openai: an answer, and the same in a stream."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 24,
             "messages": [{"role": "user", "content": "Name three colours."}]}
    whole = client(url).chat.completions.create(**asked).choices[0].message.content
    parts = [c.choices[0].delta.content or ""
             for c in client(url).chat.completions.create(**asked, stream=True) if c.choices]
    assert "".join(parts) == whole
    return whole


@step
def openai_tools(url: str) -> object:
    """openai: a call that is asked for, whole and with its arguments in a stream."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 100, "tools": [WEATHER],
             "tool_choice": "required",
             "messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    whole = client(url).chat.completions.create(**asked).choices[0]
    (call,) = whole.message.tool_calls
    pieces = [c for chunk in client(url).chat.completions.create(**asked, stream=True)
              if chunk.choices for c in chunk.choices[0].delta.tool_calls or ()]
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    assert whole.finish_reason == "tool_calls"
    assert json.loads(arguments) == json.loads(call.function.arguments)
    return f"{call.function.name} {arguments}, in {len(pieces)} pieces"


@step
def openai_responses(url: str) -> object:
    """openai: the Responses API, a call and its result, then an answer in a stream."""
    api, tool = client(url).responses, {"type": "function", **WEATHER["function"]}
    items: list = [{"role": "user", "content": "What is the weather in Rome?"}]
    first = api.create(model=MODEL, input=items, tools=[tool], tool_choice="required",
                       temperature=0, max_output_tokens=100)
    (call,) = first.output
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id,
                              "output": "sunny, 20 degrees"}]
    events = list(api.create(model=MODEL, input=items, temperature=0, max_output_tokens=24,
                             stream=True))
    words = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert words == events[-1].response.output_text
    return call.arguments, words


@step
def openai_models(url: str) -> object:
    """openai: what the model can do."""
    (model,) = client(url).models.list().data
    return f"{model.id}: {model.context_length} tokens, tools {model.capabilities['tools']}"


@step
def langchain_tools(url: str) -> object:
    """LangChain: bind_tools with its default choice, which is the model's own, and with a name."""
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0,
                     max_tokens=100)
    asked = "What is the weather in Paris? Call get_weather."
    answers = [llm.bind_tools([WEATHER]).invoke(asked),
               llm.bind_tools([WEATHER], tool_choice="get_weather").invoke(asked)]
    for answer in answers:
        assert not answer.invalid_tool_calls
        assert answer.tool_calls, f"no call but {answer.content!r}"
    return [answer.tool_calls for answer in answers]


@step
def langchain_structured(url: str) -> object:
    """LangChain: structured output, by its default and by function calling."""
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        """A person."""

        name: str = Field(max_length=30)
        age: int

    llm = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0,
                     max_tokens=100)
    text = "Jason is 25 years old."
    found = [llm.with_structured_output(Person).invoke(text),
             llm.with_structured_output(Person, method="function_calling").invoke(text)]
    assert all(isinstance(one, Person) for one in found)
    return found


@step
def litellm_tools(url: str) -> object:
    """LiteLLM: an answer and a call."""
    import litellm

    litellm.suppress_debug_info = True
    asked = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none",
             "temperature": 0, "max_tokens": 60}
    words = litellm.completion(messages=[{"role": "user", "content": "Say hello."}], **asked)
    call = litellm.completion(
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}], tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}}, **asked)
    (made,) = call.choices[0].message.tool_calls
    return words.choices[0].message.content, made.function.arguments


@step
def instructor_default(url: str) -> object:
    """Instructor: its default mode, which is tools."""
    import instructor
    from pydantic import BaseModel, Field

    class Address(BaseModel):
        city: str = Field(max_length=30)

    class User(BaseModel):
        name: str = Field(max_length=30)
        age: int
        address: Address

    user = instructor.from_openai(client(url)).chat.completions.create(
        model=MODEL, response_model=User, temperature=0, max_tokens=120, max_retries=1,
        messages=[{"role": "user", "content": "Jason is 25 years old and lives in Paris."}])
    assert isinstance(user, User)
    return user


def anthropic_client(url: str):
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", timeout=120, max_retries=0)


@step
def anthropic_messages(url: str) -> object:
    """anthropic: an answer, the same in a stream, and its prompt counted."""
    api = anthropic_client(url).messages
    turns = [{"role": "user", "content": "Name three colours."}]
    asked = {"model": MODEL, "max_tokens": 24, "messages": turns, "system": "Be brief.",
             "extra_body": {"temperature": 0}}
    whole = api.create(**asked)
    with api.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    count = api.count_tokens(model=MODEL, messages=turns, system="Be brief.").input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    return whole.content[0].text


@step
def anthropic_tools(url: str) -> object:
    """anthropic: a call and its result, and the tool runner, which makes calls by itself."""
    import anthropic

    api, function = anthropic_client(url), WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"],
            "input_schema": function["parameters"]}
    turns: list = [{"role": "user", "content": "What is the weather in Rome? Call get_weather."}]
    asked = {"model": MODEL, "max_tokens": 100, "extra_body": {"temperature": 0}}
    first = api.messages.create(messages=turns, tools=[tool], tool_choice={"type": "any"}, **asked)
    call = first.content[-1]
    assert first.stop_reason == "tool_use"
    turns += [{"role": "assistant", "content": first.content},
              {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id,
                                            "content": "sunny, 20 degrees"}]}]
    words = api.messages.create(messages=turns, tools=[tool], tool_choice={"type": "none"}, **asked)

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city now.

        Args:
            city: its name
        """
        return f"sunny in {city}, 20 degrees"

    last = api.beta.messages.tool_runner(messages=turns[:1], tools=[get_weather],
                                         max_iterations=3, **asked).until_done()
    return call.input, words.content, last.content


@step
def anthropic_by_others(url: str) -> object:
    """LangChain, LiteLLM and Instructor: the same API under them."""
    import instructor
    import litellm
    from langchain_anthropic import ChatAnthropic
    from pydantic import BaseModel, Field

    class User(BaseModel):
        """A person."""

        name: str = Field(max_length=30)
        age: int

    text = "Jason is 25 years old."
    turns = [{"role": "user", "content": text}]
    chain = ChatAnthropic(base_url=url, api_key="none", model=MODEL, max_tokens=100)
    found = chain.with_structured_output(User).invoke(text)
    call = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=url, api_key="none", messages=turns, max_tokens=60,
        tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls[0]
    made = instructor.from_anthropic(anthropic_client(url)).messages.create(
        model=MODEL, response_model=User, messages=turns, max_tokens=100, max_retries=1)
    assert isinstance(found, User)
    assert isinstance(made, User)
    return found, call.function.arguments, made


@step
def agent(url: str) -> object:
    """An agent: ten calls one after the other, each with the results of those before."""
    api = client(url)
    messages: list = [{"role": "system", "content": "You look up the weather."}]
    made = []
    for city in CITIES:
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        answer = api.chat.completions.create(
            model=MODEL, messages=messages, tools=[WEATHER], tool_choice="required",
            temperature=0, max_tokens=100).choices[0]
        (call,) = answer.message.tool_calls
        made.append(json.loads(call.function.arguments)["city"])
        messages += [answer.message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": "sunny, 20 degrees"}]
        words = api.chat.completions.create(
            model=MODEL, messages=messages, tools=[WEATHER], tool_choice="none", temperature=0,
            max_tokens=16).choices[0].message.content
        messages.append({"role": "assistant", "content": words})
    return made


def main() -> int:
    """Every step; how many failed."""
    url, failed = sys.argv[1].rstrip("/"), 0
    for call in STEPS:
        try:
            print(f"{call.__name__}: {call(url)!r}", flush=True)
        except Exception:
            failed += 1
            print(f"{call.__name__}: FAILED\n{traceback.format_exc(limit=3)}", flush=True)
    print(f"{len(STEPS) - failed} of {len(STEPS)} steps passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
