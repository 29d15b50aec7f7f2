"""Calls and reasoning in the forms of every family, in every cut, whole and streamed."""

from __future__ import annotations

import json

import pytest
from pydantic_core import from_json

from pipeinfer.models.text.constraint import Constraint
from pipeinfer.models.text.grammar import compile_grammar
from pipeinfer.models.text.text_stream import TextStream
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.server.answer_parser import AnswerParser
from pipeinfer.server.call_grammar import CallGrammar
from pipeinfer.server.families import FAMILIES, HERMES, QUOTE, family_of
from pipeinfer.server.tools import Call, Thought, ToolUse, Words, joined
from tests.kit.gguf_files import with_template
from tests.kit.server_peer import front
from tests.server.test_http import events

FUNCTIONS = [
    {"name": "f", "parameters": {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "object"},
        "d": {"type": ["boolean", "null"]}, "e": {"enum": ["1", "two"]}}}},
    {"name": "g", "parameters": {"type": "object", "properties": {}}}]
BY_NAME = {family.name: family for family in FAMILIES}
D = "\uff5cDSML\uff5c"
#: f(a="x", b=1) and g(), as the templates of these models write them
LITERAL = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": 1}}\n</tool_call>\n'
              '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=b>\n1\n"
                "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
                "</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b</arg_key>\n"
           "<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n'
               '<parameter name="b">1</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
               "</minimax:tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "x", "b": 1}[TOOL_CALLS]g[ARGS]{}',
    "mistral-list": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "x", "b": 1}}, '
                    '{"name": "g", "arguments": {}}]',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": "x", "b": 1}}, '
               '{"name": "g", "arguments": {}}]',
    "lfm2": "<|tool_call_start|>[f(a='x', b=1), g()]<|tool_call_end|>",
    "llama": '{"name": "f", "parameters": {"a": "x", "b": 1}}; {"name": "g", "parameters": {}}',
    "deepseek-v3": "<!tool_calls_begin!><!tool_call_begin!>function<!tool_sep!>f\n```json\n"
                   '{"a": "x", "b": 1}\n```<!tool_call_end!>\n<!tool_call_begin!>function'
                   "<!tool_sep!>g\n```json\n{}\n```<!tool_call_end!><!tool_calls_end!>",
    "deepseek-v3.1": '<!tool_calls_begin!><!tool_call_begin!>f<!tool_sep!>{"a": "x", "b": 1}'
                     "<!tool_call_end!><!tool_call_begin!>g<!tool_sep!>{}<!tool_call_end!>"
                     "<!tool_calls_end!>",
    "deepseek-v3.2": f'<{D}function_calls>\n<{D}invoke name="f">\n'
                     f'<{D}parameter name="a" string="true">x</{D}parameter>\n'
                     f'<{D}parameter name="b" string="false">1</{D}parameter>\n</{D}invoke>\n'
                     f'<{D}invoke name="g">\n</{D}invoke>\n</{D}function_calls>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": "x", "b": 1}<|tool_call_end|><|tool_call_begin|>'
            "functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
    "gemma": '<|tool_call>call:f{a:<|"|>x<|"|>,b:1}<tool_call|><|tool_call>call:g{}<tool_call|>',
    "gpt-oss": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x", '
               '"b": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g '
               "<|constrain|>json<|message|>{}<|call|>",
}
#: what the template of each has, and only its
SIGNS = {name: text.replace("!", "\uff5c").replace("_", "\u2581") if "<!" in text else text
         for name, text in LITERAL.items()}
SIGNS["deepseek-v3.2"] = D
LITERAL = {name: SIGNS[name] if "<!" in text else text for name, text in LITERAL.items()}
HARD = 'say "a}b{" \\ \'q\' </x> ;\nTwo'
CALLS = {
    "one": [("f", {"a": "x"})],
    "two": [("f", {"a": "x", "b": -2}), ("g", {})],
    "nested": [("f", {"a": "", "c": {"k": [1, {"l": [True, None]}], "m": {"n": "o"}}})],
    "unicode": [("f", {"a": "漢字 é 😀", "c": {"ß": "ü"}})],
    "empty": [("g", {})],
    "hard": [("f", {"a": HARD, "c": {"k": '"}]'}, "d": None, "e": "1"})],
    "unknown": [("h.i", {"z": "x"})],
}


def written(family, calls):
    """Calls as models of the family write them."""
    texts = [family.begin + name + family.then + arguments(family, given) + family.end
             for name, given in calls]
    if family.form == "channels":
        return "<|call|><|start|>assistant".join(texts) + "<|call|>"
    return family.open + family.between.join(texts) + family.close


def arguments(family, given):
    def gemma(value, top=False):
        if isinstance(value, str):
            return QUOTE + value + QUOTE
        if isinstance(value, dict):
            inside = ",".join(f"{key}:{gemma(one)}" for key, one in value.items())
            return inside if top else f"{{{inside}}}"
        if isinstance(value, list):
            return f"[{','.join(map(gemma, value))}]"
        return json.dumps(value)

    if family.form == "gemma":
        return gemma(given, top=True)
    if family.form == "python":
        return ", ".join(f"{name}={value!r}" for name, value in given.items())
    if family.form == "tags":
        before, between, after = family.pair
        return "".join(before + name + between + (
            value if isinstance(value, str) else json.dumps(value)) + after
            for name, value in given.items())
    return json.dumps(given, ensure_ascii=False)


def parser_of(family, functions=FUNCTIONS, most=99, required=False, inside=False):
    return AnswerParser(family, ToolUse(
        [{"function": function} for function in functions], most, required), inside)


def read(family, pieces, **more):
    """The words, the reasoning, and the calls with their arguments."""
    parser = parser_of(family, **more)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts = joined(parts + parser.push("", ended=True))
    return ("".join(p.text for p in parts if isinstance(p, Words)),
            "".join(p.text for p in parts if isinstance(p, Thought)),
            [(p.name, p.arguments) for p in parts if isinstance(p, Call)])


def same_in_every_cut(family, text, **more):
    whole = read(family, [text], **more)
    parser = parser_of(family, **more)
    assert "".join(p.text for p in parser.push(text, ended=True) if isinstance(p, Words)) == \
        whole[0]
    assert read(family, list(text), **more) == whole
    for at in range(1, len(text)):
        assert read(family, [text[:at], text[at:]], **more) == whole, text[:at]
    return whole


def objects(calls):
    return [(name, json.loads(given)) for name, given in calls]


@pytest.fixture(params=list(BY_NAME))
def family(request):
    return BY_NAME[request.param]


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_read_in_every_cut(family, case):
    words, thought, calls = same_in_every_cut(family, written(family, CALLS[case]))
    assert (words, thought, objects(calls)) == ("", "", CALLS[case])


def test_what_templates_write_is_read_and_names_the_family(family):
    words, _, calls = same_in_every_cut(family, LITERAL[family.name])
    assert (words, objects(calls)) == ("", [("f", {"a": "x", "b": 1}), ("g", {})])
    sign = "" if family.name == "llama" else SIGNS[family.name]
    assert family_of(f"{{% if tools %}}{sign}{{% endif %}}").name == family.name


def test_without_calls_all_is_words(family):
    for text in ("", "  ", "a < b, {c} [d] (e)\n\nf: 1", "{not JSON}", '{"name": 1} x', "\n x\n"):
        assert same_in_every_cut(family, text) == (text, "", [])


def around(family, before, calls, after):
    """An answer with words around calls; reasoning comes in `before`."""
    if family.form != "channels":
        return before + calls + after
    said = "<|channel|>final<|message|>"
    return f"{said}{before}<|end|><|start|>assistant{calls}<|start|>assistant{said}{after}<|end|>"


def test_words_around_calls_keep_their_blanks(family):
    calls = written(family, CALLS["two"])
    before = "" if family.name == "llama" else "A b, c d. "
    words, _, found = same_in_every_cut(family, around(family, before, calls, "\n\nE f.\n"))
    assert (words, objects(found)) == (f"{before}\n\nE f.\n", CALLS["two"])


def test_arguments_may_be_missing(family):
    text = written(family, CALLS["empty"])
    for left_out in (', "arguments": {}', ', "parameters": {}', "{}"):
        text = text if family.form == "gemma" else text.replace(left_out, "")
    calls = same_in_every_cut(family, text)[2]
    assert calls in ([("g", "{}")], [("g", "")])
    assert calls == [("g", "{}")] or family.name in ("mistral", "gpt-oss")


def test_an_answer_may_be_cut_anywhere(family):
    text = written(family, CALLS["hard"])
    names = set()
    for at in range(len(text)):
        words, thought, calls = read(family, [text[:at]], required=True)
        assert (words, thought) == ("", ""), text[:at]
        assert read(family, list(text[:at]), required=True) == (words, thought, calls)
        assert read(family, list(text[:at])) == read(family, [text[:at]])
        names |= {name for name, _ in calls}
        whole = read(family, [text])[2][0][1]
        assert all(whole.startswith(given) for _, given in calls), text[:at]
    assert names == {"f"}


def test_a_call_within_reasoning_is_none(family):
    call = '{"name": "f", "arguments": {}} to=functions.f' if family.form == "channels" else (
        written(family, CALLS["one"]))
    opened, closed = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant") \
        if family.form == "channels" else family.think
    real = written(family, CALLS["empty"])
    for end, calls in (("", []), (closed + real, [("g", "{}")])):
        assert same_in_every_cut(family, f"{opened}\nI try {call}\n{end}") == (
            "", f"I try {call}", calls)
    if family.form != "channels":
        assert same_in_every_cut(family, f"A {closed}\n\nB", inside=True) == ("B", "A", [])


@pytest.mark.parametrize(("text", "inside", "expected"), [
    ("<think>\na < b</think>\n\nYes.", False, ("Yes.", "a < b")),
    ("\n <think>a", False, ("", "a")), ("a</think>b</think>", True, ("b</think>", "a")),
    ("<thin", False, ("<thin", "")), ("No <think>x</think>", False, ("No <think>x</think>", "")),
    ("a</thin", True, ("", "a</thin")), ("", False, ("", "")), ("\n x", False, ("\n x", "")),
])
def test_reasoning_is_read_in_every_cut(text, inside, expected):
    assert same_in_every_cut(HERMES, text, inside=inside) == (*expected, [])


def test_no_more_calls_than_are_allowed(family):
    assert [name for name, _ in same_in_every_cut(
        family, LITERAL[family.name], most=1)[2]] == ["f"]


def test_without_functions_a_call_is_words():
    text = f"<think>\nA</think>\n\n{LITERAL['hermes']}"
    parser = AnswerParser(HERMES)
    parts = joined([part for char in text for part in parser.push(char)] + parser.push("", True))
    assert parts == [Thought("A"), Words(LITERAL["hermes"])]


OBJECT = '{"name": "f", "arguments": {"a": "%s"}}'
LINES = OBJECT % "1\n2\t3"


@pytest.mark.parametrize(("name", "text", "calls"), [
    ("hermes", f"<tool_call>{OBJECT % 1}\n{OBJECT % 2}</tool_call>", ["1", "2"]),
    ("hermes", f"<tool_call>[{OBJECT % 1}, {OBJECT % 2}]</tool_call>", ["1", "2"]),
    ("hermes", f"<tool_call>{LINES}</tool_call>", ["1\n2\t3"]),
    ("hermes", f"<tool_call>{OBJECT % 'a</tool_call>b'}</tool_call>", ["a</tool_call>b"]),
    ("hermes", '<tool_call>{"arguments": {"a": "1"}, "name": "f"}</tool_call>', ["1"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"1\\"}"}</tool_call>', ["1"]),
    ("hermes", f"<tool_call>{(OBJECT % 1)[:-1]}\n</tool_call>", ["1"]),
    ("llama", '{"name": "f", "parameters": {"a": "1; 2"}}', ["1; 2"]),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "1"}}', ["1"]),
    ("qwen-xml", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", ["1"]),
    ("qwen-xml", f"<tool_call>{OBJECT % 1}</tool_call>", ["1"]),
    ("qwen-xml", "<tool_call><function=f><parameter=a>\n\n1\n\n</parameter></function></tool_call>",
     ["\n1\n"]),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", ["1"]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]ab1[ARGS]{"a": "1"}', ["1"]),
    ("mistral", f"[TOOL_CALLS][{OBJECT % 1}]", ["1"]),
    ("lfm2", '<|tool_call_start|>[f(a="1)"), f(a=\'"2\')]<|tool_call_end|>', ["1)", '"2']),
    ("gpt-oss", ' to=functions.f<|channel|>commentary json<|message|>{"a": "1"}<|call|>', ["1"]),
])
def test_other_ways_to_write_a_call(name, text, calls):
    words, _, found = same_in_every_cut(BY_NAME[name], text)
    assert words.strip() in ("", "</tool_call>")[: 1 + (name == "qwen-xml")]
    assert objects(found) == [("f", {"a": given}) for given in calls]


@pytest.mark.parametrize(("types", "text", "value"), [
    ({"type": "integer"}, "5", 5), ({"type": "string"}, "5", "5"), ({}, "5", 5), ({}, "x y", "x y"),
    ({"type": ["string", "null"]}, "null", None), ({"type": ["string", "null"]}, "5", "5"),
    ({"type": "boolean"}, "True", True), ({"type": "integer"}, "five", "five"),
    ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
    ({"$ref": "#/$defs/n"}, "007", "007"), ({"const": 5}, "5", 5), ({"enum": ["5"]}, "5", "5"),
    ({"type": "object"}, '{"a": "1\n2"}', {"a": "1\n2"})])
def test_arguments_in_tags_have_the_types_of_the_schema(types, text, value):
    functions = [{"name": "f", "parameters": {
        "type": "object", "properties": {"a": types}, "$defs": {"n": {"type": "string"}}}}]
    parser = parser_of(BY_NAME["glm"], functions)
    (call,) = joined(parser.push("<tool_call>f<arg_key>a</arg_key>"
                                 f"<arg_value>{text}</arg_value></tool_call>", ended=True))
    assert json.loads(call.arguments) == {"a": value}


# --- forced calls -----------------------------------------------------------------------------


def forced_by(tokenizer, family, functions, **more):
    """Whether the grammar of forced calls allows a text and its end: a function."""
    vocabulary = Vocabulary.of(tokenizer)
    grammar = CallGrammar(family, {}).of(functions, **more)
    constraint = Constraint(vocabulary, compile_grammar("lark", grammar, vocabulary))

    def follows(text):
        mask = constraint.allowed(tokenizer.encode(text, add_bos=False))
        return mask is not None and any(mask[i] for i in tokenizer.eog_ids)

    return follows


def test_a_forced_call_has_the_form_of_the_family(family, tokenizer):
    follows = forced_by(tokenizer, family, FUNCTIONS, most=2)

    def forced(calls):
        text = written(family, calls)
        text = text.removesuffix("<|call|>")
        if family.form == "python":
            for python, constant in (("'", '"'), ("True", "true"), ("None", "null")):
                text = text.replace(python, constant)
        return text

    for case in ("one", "empty", "nested", *(["two"] if family.between is not None else [])):
        assert follows(forced(CALLS[case])), case
    assert not follows("Words.")
    assert not follows(forced([("h", {"a": "x"})]))
    assert not follows(forced([("f", {"b": 1})]))
    assert not follows(forced([("f", {"a": "x", "e": "three"})]))


@pytest.mark.parametrize(("name", "pattern", "good", "bad"), [
    ("qwen-xml", "^[a-c]{2}/\\d$", "ab/1", "ab/x"), ("glm", "^(yes|no)$", "no", "maybe"),
    ("gemma", "^\\d{4}-\\d{2}$", "2026-11", "2026"), ("glm", "b+", "abc", ""),
    ("glm", "^a|b$", "ax", ""), ("hermes", "^[a-c]{2}$", "ab", "abc")])
def test_a_forced_text_has_its_pattern(name, pattern, good, bad, tokenizer):
    """Without quotes only one for the whole text is enforced."""
    functions = [{"name": "f", "parameters": {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "string", "pattern": pattern}, "b": {"type": "integer"}}}}]
    follows = forced_by(tokenizer, BY_NAME[name], functions)

    def call(value):
        return written(BY_NAME[name], [("f", {"a": value, "b": 1})])

    assert follows(call(good))
    assert not bad or not follows(call(bad))


def test_kimis_calls_are_numbered(tokenizer):
    text = LITERAL["kimi"].replace("f:0", "f:12").replace("g:1", "g:13")
    assert forced_by(tokenizer, BY_NAME["kimi"], FUNCTIONS, most=2)(text)


def test_marks_that_are_control_tokens_reach_the_parser(tokenizer):
    tokens = tokenizer.encode("a<|im_end|>b", add_bos=False, special=True)
    for shown, text in (((), "ab"), (tokens[1:2], "a<|im_end|>b")):
        stream = TextStream(tokenizer, (), shown)
        for token in tokens:
            stream.push(token)
        stream.finish()
        assert stream.take() == text


# --- over HTTP --------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": HI, "tools": [
        {"type": "function", "function": f} for f in FUNCTIONS]},
    "/v1/messages": {"messages": HI, "max_tokens": 900, "model": "m", "tools": [
        {"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]},
    "/v1/responses": {"input": HI, "tools": [{"type": "function", **f} for f in FUNCTIONS]}}
FORCED = {"/v1/messages": {"tool_choice": {"type": "any"}}}
ANSWERS = {
    "qwen-xml": "Hm.\n</think>\n\nWell: " + LITERAL["qwen-xml"],
    "gpt-oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
               f"<|message|>Well: <|end|><|start|>assistant{LITERAL['gpt-oss']}",
    "llama": LITERAL["llama"]}


@pytest.fixture(scope="module", params=list(ANSWERS))
def served(request, tmp_path_factory):
    begun = "<think>\n" if request.param == "qwen-xml" else ""
    template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
                "{% endfor %}{% if tools %}{{ tools }}{# " + SIGNS[request.param].replace("#", "")
                + " #}{% endif %}<|im_start|>assistant\n" + begun)
    path = with_template(tmp_path_factory.mktemp("model") / "m.gguf", template)
    with front(path, facts={"n_ctx": 4096}) as server:
        server.family = request.param
        yield server


def gathered(path, answer):
    """The reasoning, words and calls of a whole answer, and why it ended."""
    if path == "/v1/messages":
        blocks = answer["content"]
        kinds = {kind: [b for b in blocks if b["type"] == kind] for kind in (
            "thinking", "text", "tool_use")}
        return ("".join(b["thinking"] for b in kinds["thinking"]),
                "".join(b["text"] for b in kinds["text"]),
                [(b["name"], b["input"]) for b in kinds["tool_use"]], answer["stop_reason"])
    if path == "/v1/responses":
        texts = {kind: "".join(item["content"][0]["text"] for item in answer["output"]
                               if item["type"] == kind) for kind in ("reasoning", "message")}
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return (*texts.values(), [(c["name"], c["arguments"]) for c in calls], answer["status"])
    message = answer["choices"][0]["message"]
    return (message.get("reasoning_content", ""), message["content"] or "",
            [(c["function"]["name"], c["function"]["arguments"])
             for c in message.get("tool_calls", ())], answer["choices"][0]["finish_reason"])


def streamed(path, chunks):
    """The same of a stream."""
    if path == "/v1/responses":
        return gathered(path, chunks[-1]["response"])
    if path == "/v1/chat/completions":
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        calls = {}
        for call in (c for delta in deltas for c in delta.get("tool_calls", ())):
            name, given = calls.get(call["index"], ("", ""))
            calls[call["index"]] = (call["function"].get("name", name),
                                    given + call["function"]["arguments"])
        return ("".join(d.get("reasoning_content", "") for d in deltas),
                "".join(d.get("content", "") for d in deltas), list(calls.values()),
                chunks[-1]["choices"][0]["finish_reason"])
    blocks = [dict(c["content_block"]) for c in chunks if c["type"] == "content_block_start"]
    for block in blocks:
        block["input"] = ""
    names = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking"),
             "input_json_delta": ("input", "partial_json")}
    for chunk in (c for c in chunks if c["type"] == "content_block_delta"):
        own, name = names[chunk["delta"]["type"]]
        blocks[chunk["index"]][own] += chunk["delta"][name]
    for block in (b for b in blocks if b["type"] == "tool_use"):
        block["input"] = from_json(block["input"] or "{}", allow_partial=True)
    return gathered(path, {"content": blocks, "stop_reason": next(
        c["delta"]["stop_reason"] for c in chunks if c["type"] == "message_delta")})


def both(server, path, text, reason="stop", **more):
    """The answer with this text, which is the same whole and streamed."""
    server.peer.answer = lambda frame: server.peer.say(frame.id, text, reason)
    whole = gathered(path, server.post(path, PATHS[path] | more).json())
    stream = server.post(path, {**PATHS[path], "stream": True, **more}, stream=True)
    assert streamed(path, events(stream)[0]) == whole
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_reasoning_words_and_calls_have_their_places(served, path):
    thought, words, calls, reason = both(served, path, ANSWERS[served.family])
    assert (thought, words) == (("", "") if served.family == "llama" else ("Hm.", "Well: "))
    if path != "/v1/messages":
        calls = objects(calls)
    assert calls == [("f", {"a": "x", "b": 1}), ("g", {})]
    assert reason == {"/v1/messages": "tool_use", "/v1/responses": "completed"}.get(
        path, "tool_calls")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stop_text_within_reasoning_ends_nothing(served, path):
    stop = {"stop_sequences" if path == "/v1/messages" else "stop": ["Hm", "ell"]}
    thought, words, calls, _ = both(served, path, ANSWERS[served.family], **stop)
    if served.family != "llama":
        assert (thought, words, calls) == ("Hm.", "W", [])


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, "Hm"])
def test_reasoning_may_stay_in_the_content(served, cut):
    """As llama.cpp's server does with --reasoning-format none."""
    text = ANSWERS[served.family]
    text = text[:text.index(cut) + len(cut)] if cut and cut in text else text
    thought, words, calls, _ = both(served, "/v1/chat/completions", text, reasoning_format="none")
    opened = "" if served.family == "qwen-xml" else "<think>\n"  # the template has begun it
    assert thought == ""
    if served.family == "llama":
        assert (words, len(calls)) == ("", 2)
    elif cut:
        assert (words, calls) == (f"{opened}Hm", [])
    else:
        assert (words, len(calls)) == (f"{opened}Hm.\n</think>\n\nWell: ", 2)
        only = text.replace("Well: ", "")
        assert both(served, "/v1/chat/completions", only, reasoning_format="none")[1:3] == (
            f"{opened}Hm.\n</think>\n\n", calls)
    for name in ("deepseek", "auto"):
        assert both(served, "/v1/chat/completions", text, reasoning_format=name)[0] == (
            "" if served.family == "llama" else (cut or "Hm."))


@pytest.mark.slow
def test_a_server_may_leave_reasoning_in_the_content(tmp_path):
    path = with_template(tmp_path / "m.gguf", "{{ messages[0].content }}{# <think> #}")
    with front(path, reasoning_format="none") as server:
        text = "<think>\nHm.\n</think>\n\nYes."
        assert both(server, "/v1/chat/completions", text, tools=None)[:2] == ("", text)
        assert both(server, "/v1/messages", text, tools=None)[:2] == ("", text)
        assert both(server, "/v1/chat/completions", text, tools=None, reasoning_format="auto")[
            :2] == ("Hm.", "Yes.")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_forced_call_that_is_cut_off_is_a_call_without_its_end(served, path):
    text = written(BY_NAME[served.family], [("f", {"a": "one two"})])
    more = FORCED.get(path, {"tool_choice": "required"})
    for cut in (3, text.index("one") + 3):
        thought, words, calls, reason = both(served, path, text[:cut], "length", **more)
        assert (thought, words, bool(calls)) == ("", "", cut > 3)
        assert reason == {"/v1/messages": "max_tokens", "/v1/responses": "incomplete"}.get(
            path, "length")
    ((name, given),) = calls
    if path != "/v1/messages":
        assert given.replace(" ", "") == '{"a":"one'
    assert name == "f"


@pytest.mark.slow
def test_an_answer_of_one_grammar_is_no_reasoning(served):
    """A grammar that cannot end the reasoning that the template has begun has none."""
    body = {"tools": None, "grammar": 'root ::= "yes"'}
    assert both(served, "/v1/chat/completions", "yes", **body)[:2] == ("", "yes")
    if served.family == "qwen-xml":
        body["grammar"] = 'root ::= "yes</think>no"'
        assert both(served, "/v1/chat/completions", "yes</think>no", **body)[:2] == ("yes", "no")


BROKEN = '{"name": "f", "arguments": '


@pytest.mark.parametrize(("name", "text", "calls"), [
    # null, an empty text and blanks are no arguments; other texts are no call
    ("hermes", f"<tool_call>{BROKEN}null}}</tool_call>", [("f", {})]),
    ("hermes", f'<tool_call>{BROKEN}""}}</tool_call>', [("f", {})]),
    ("hermes", f'<tool_call>{BROKEN}" "}}</tool_call>', [("f", {})]),
    ("hermes", f'<tool_call>{BROKEN}"ls -l"}}</tool_call>', []),
    ("hermes", f'<tool_call>{BROKEN}"[1]"}}</tool_call>', []),
    ("hermes", f"<tool_call>{BROKEN}[1]}}</tool_call>", []),
    ("deepseek-v3.1", "<!tool_calls_begin!><!tool_call_begin!>f<!tool_sep!>null"
                      "<!tool_call_end!><!tool_calls_end!>", [("f", {})]),
    # whatever braces are missing, closing marks and later words are no arguments
    ("hermes", f'<tool_call>{BROKEN}{{"a": 1}}</tool_call>\nGood bye', [("f", {"a": 1})]),
    ("hermes", f'<tool_call>{BROKEN}{{"a": 1</tool_call>\nGood bye', [("f", {"a": 1})]),
    ("hermes", f'<tool_call>{BROKEN}{{"a": [true, {{"b": null</tool_call>\nGood bye',
     [("f", {"a": [True, {"b": None}]})]),
    ("hermes", '<tool_call>{"name": "f"</tool_call>\nGood bye', [("f", {})]),
    ("llama", '{"name": "f", "parameters": {"a": 1.5e3 Now I wait', [("f", {"a": 1500.0})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1 Now I wait', [("f", {"a": 1})]),
])
def test_arguments_are_an_object_and_end_where_json_ends(name, text, calls):
    text = text.replace("!", "\uff5c").replace("_", "\u2581") if "<!" in text else text
    words, _, found = same_in_every_cut(BY_NAME[name], text)
    assert [(called, json.loads(given)) for called, given in found] == calls
    assert not calls or "tool_call" not in words
    if "Good bye" in text:
        assert words.strip().endswith("Good bye")
