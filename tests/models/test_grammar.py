"""Grammars: what they allow is a function of the path, whatever was asked before."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipeinfer.errors import ProtocolError, RequestError, UsageError
from pipeinfer.models.text import grammar as grammars
from pipeinfer.models.text import vocabulary as vocabularies
from pipeinfer.models.text.constraint import Constraint, Constraints
from pipeinfer.models.text.grammar import MAX_BYTES, compile_grammar
from pipeinfer.models.text.vocabulary import Vocabulary

pytestmark = pytest.mark.slow
SCHEMA = {
    "type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
}
ARITHMETIC = r'''
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
'''


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    made = Vocabulary.of(tokenizer)
    yield made
    made.compiler.close()


@pytest.fixture(scope="module")
def compiled(vocabulary):
    return [
        compile_grammar("json_object", "", vocabulary),
        compile_grammar("json_schema", SCHEMA, vocabulary),
        compile_grammar("gbnf", ARITHMETIC, vocabulary),
        compile_grammar("regex", r"(\w+@\w+\.(com|org)(, )?){1,4}", vocabulary),
        compile_grammar("lark", 'start: "yes" | "no" | /maybe( not)*/', vocabulary),
    ]


def fresh_mask(vocabulary, text, path):
    """The mask of a matcher that has seen nothing else, taking one token after the other."""
    matcher = vocabulary.matcher(text)
    for token in path:
        if matcher.try_consume_tokens([token]) != 1:
            return None
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error()
    return np.unpackbits(bits, bitorder="little")[: len(vocabulary)].astype(bool)


def walk(constraint, rng, length):
    """A random path of the grammar, without an end-of-generation token."""
    path = []
    for _ in range(length):
        allowed = np.flatnonzero(constraint.allowed(path))
        allowed = allowed[~np.isin(allowed, constraint._vocabulary.end_ids)]
        if not allowed.size:
            break
        path.append(int(rng.choice(allowed.tolist())))
    return path


def accepts(vocabulary, text, tokens):
    mask = Constraint(vocabulary, text).allowed(tokens)
    return mask is not None and bool(mask[vocabulary.end_ids[0]])


@pytest.mark.parametrize("which", range(5))
def test_a_mask_depends_on_the_path_alone(vocabulary, compiled, which):
    rng, text = random.Random(which), compiled[which]
    source = Constraint(vocabulary, text)
    paths = [walk(source, rng, 25) for _ in range(4)]
    paths += [[*path[:-1], rng.randrange(len(vocabulary))] for path in paths if path]
    wanted = {}
    for path in paths:
        for length in range(len(path) + 1):
            part = tuple(path[:length])
            wanted[part] = fresh_mask(vocabulary, text, part)
    assert any(mask is None for mask in wanted.values())
    asked = Constraint(vocabulary, text)
    order = list(wanted) * 3
    rng.shuffle(order)
    for part in order:
        got = asked.allowed(np.array(part, np.int32) if rng.random() < 0.5 else part)
        if wanted[part] is None:
            assert got is None
        else:
            assert np.array_equal(got, wanted[part]), part
    assert asked.failure == ""


def test_an_end_of_generation_token_follows_a_complete_text_only(vocabulary, tokenizer, compiled):
    text = compiled[4]
    ends = sorted(vocabulary.end_ids)
    constraint = Constraint(vocabulary, text)
    yes = tokenizer.encode("yes", add_bos=False)
    assert np.flatnonzero(constraint.allowed(yes)).tolist() == ends
    for path in ([*yes, ends[0]], [*yes, ends[1], ends[0]]):  # with --ignore-eos they repeat
        assert np.flatnonzero(constraint.allowed(path)).tolist() == ends
    assert constraint.allowed([ends[0]]) is None
    maybe = constraint.allowed(tokenizer.encode("maybe", add_bos=False))
    assert maybe[ends].all()
    assert maybe.sum() > len(ends)


def test_what_is_no_token_is_no_path(vocabulary, compiled):
    constraint = Constraint(vocabulary, compiled[0])
    assert constraint.allowed([-1]) is None
    assert constraint.allowed([len(vocabulary)]) is None
    assert constraint.allowed([]).any()


def test_masks_cannot_be_changed(vocabulary, compiled):
    with pytest.raises(ValueError, match="read-only"):
        Constraint(vocabulary, compiled[0]).allowed([])[0] = True


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_allowed_is_json_of_the_schema(vocabulary, tokenizer, compiled, seed):
    rng = random.Random(seed)
    path = walk(Constraint(vocabulary, compiled[1]), rng, 400)
    data = json.loads(tokenizer.decode(path))
    assert set(data) == {"name", "age", "tags"}
    assert isinstance(data["name"], str)
    assert len(data["name"]) <= 12
    assert 0 <= data["age"] <= 120
    assert len(data["tags"]) <= 3
    assert set(data["tags"]) <= {"a", "b", "c"}


GBNF = [
    (r'root ::= "\u0041\u00e9" [\u0041-\u0043]', "A\u00e9[A-C]", ["A\u00e9B", "A\u00e9D", "AB"]),
    (r'root ::= "\[x\]" [\]\[a]', r"\[x\][\]\[a]", ["[x]]", "[x][", "[x]a", "[x]b", "x]"]),
    (r'root ::= [a^] "\\" [\\] [&&~~] [+--]', r"[a^]\\\\[&~][+,\-]",
     ["a\\\\&-", "^\\\\~,", "b\\\\&-", "a\\&-"]),
    ('root ::= (("a"{2})? "b")+ "c"{1,}', "((aa)?b)+c+", ["aabc", "bbcc", "abc", "aab"]),
    ('root ::= Foo foo foo-1\nFoo ::= "a"\nfoo ::= "b"\nfoo-1 ::= "c"', "abc", ["abc", "acb"]),
    ('root ::= start | 1st\nstart ::= "x"\n1st ::= "y" # no "z"\n', "x|y", ["x", "y", "z"]),
    ('# one\nroot ::= "a" | # two\n  "b" start?\nstart ::= [^a-c"]', 'a|b[^a-c"]?',
     ["a", "b", "bd", "ba", 'b"', "bé"]),
    ('root ::= "(" root ")" | "x" # nests', r"x|\(x\)|\(\(x\)\)", ["x", "(x)", "((x))", "(x"]),
    (r'root ::= "a\nb\t\x21" .', "a\nb\t!(.|\n)", ["a\nb\t!q", "a\nb\t!", "anb\t!q"]),
    ('root ::= | "a" "" "b"', "(ab)?", ["", "ab", "a"]),
    (r'root ::= [a-c\-]+', r"[a-c\-]+", ["a-b", "-", "d", ""]),
    (r'root ::= [\-a-c]+ [^\-] "\-"', r"[\-a-c]+[^\-]-", ["a-bx-", "--", "-a-"]),
    (r'root ::= [+\--/] [a\-c]', r"[+\-./][a\-c]", ["/a", "--", ".c", ",a", "+b"]),
    ('root ::= "a" "b"{0} "c"', "ac", ["ac", "abc"]),
    ('root ::= "a"{0,0} [b]{0} foo{0} ("x" | "y"){0} "z"\nfoo ::= "q"', "z", ["z", "az", "qz"]),
    ('root ::= ("a"{0} "b")+ "c" {2}', "b+cc", ["bbcc", "abcc", "bc"]),
    ('root ::= "a" | "b"{0}', "a?", ["", "a", "b"]),
]


@pytest.mark.parametrize(("text", "pattern", "samples"), GBNF)
def test_gbnf_means_what_llama_cpp_means(vocabulary, tokenizer, text, pattern, samples):
    made = compile_grammar("gbnf", text, vocabulary)
    verdicts = set()
    for sample in samples:
        right = re.fullmatch(pattern, sample) is not None
        verdicts.add(right)
        assert accepts(vocabulary, made, tokenizer.encode(sample, add_bos=False)) == right, sample
    assert verdicts == {True, False}


TOKENS = [
    ('root ::= "a" <|im_end|>', ["a", "<|im_end|>"], ["a", "<|endoftext|>"]),
    ('root ::= <|im_start|> "a"', ["<|im_start|>", "a"], ["a"]),
    ('root ::= <[{start}]> [a-z]+', ["<|im_start|>", "ab"], ["<|endoftext|>", "ab"]),
    ('root ::= !<[{start}]> "b"', ["a", "b"], ["<|im_start|>", "b"]),
    ('root ::= !<|im_start|>* <|im_start|> "c"', ["a", "b", "<|im_start|>", "c"], ["a", "c"]),
    ('root ::= (<|im_start|> "a"){{2}}', ["<|im_start|>", "a"] * 2, ["<|im_start|>", "a"]),
    ('root ::= t "a"\nt ::= <|im_start|> | "x" # <no>', ["<|im_start|>", "a"], ["a"]),
    ('root ::= "<" token token-2 ">"\ntoken ::= <|im_start|>\ntoken-2 ::= "b"',
     ["<", "<|im_start|>", "b", ">"], ["<", "b", ">"]),
    ('root ::= "a"<|im_start|>"b"', ["a", "<|im_start|>", "b"], ["a", "b"]),
    ('root ::= !<|im_start|>', ["a"], ["<|endoftext|>"]),
    ('root ::= <|im_start|>? "a"', ["a"], ["<|im_start|>"]),
]


@pytest.mark.parametrize(("text", "good", "bad"), TOKENS)
def test_gbnf_names_tokens_as_llama_cpps_does(vocabulary, tokenizer, text, good, bad):
    def spelled(parts):
        return [token for part in parts
                for token in tokenizer.encode(part, add_bos=False, special=True)]

    (start,) = spelled(["<|im_start|>"])
    made = compile_grammar("gbnf", text.format(start=start), vocabulary)
    for parts, right in ((good, True), (bad, False)):
        path = spelled(parts)
        mask = Constraint(vocabulary, made).allowed(path)
        ends = [i for i, token in enumerate(path) if token in vocabulary.end_ids]
        complete = mask is not None and mask[list(vocabulary.end_ids)].any()
        assert complete == right, parts
        assert not ends or not right or ends == [len(path) - 1]


REFUSED = [
    ("gbnf", "root ::= <think>", "<think> is not one token"),
    ("gbnf", "root ::= !<[99999999999]>", r"<\[99999999999\]> is not one token"),
    ("gbnf", "root ::= <[9999999]>", "9999999"),
    ("gbnf", "root ::= <a", "root"),
    ("gbnf", f"root ::= <{'z' * 9999}>", "zzz is not one token"),
    ("gbnf", 'root ::= "a"{99999999999}', "too large"),
    ("gbnf", "root ::= foo", "'foo' not found"),
    ("gbnf", 'foo ::= "a"', "No 'root' rule"),
    ("gbnf", r'root ::= "\q"', r"unknown escape \\q"),
    ("gbnf", r'root ::= "\ud800"', "not a character"),
    ("gbnf", r'root ::= [\u12]', "not a character"),
    ("gbnf", "root ::= [z-a]", "empty range"),
    ("gbnf", "root ::= []", "unclosed character class"),
    ("gbnf", "root ::= " + "(" * 20000 + '"a"' + ")" * 20000, "nested too deeply"),
    ("gbnf", "x" * (MAX_BYTES + 1), "too big"),
    ("gbnf", "root ::= root", "no text satisfies it"),
    ("gbnf", {}, "a grammar must be a text of kind"),
    ("json_schema", '{"type":', "it is not valid JSON"),
    ("json_schema", "[]", "not an object"),
    ("json_schema", {"type": "strin"}, "Invalid type: strin"),
    ("json_schema", {"not": {}}, r"Unimplemented keys: \[\"not\"\]"),
    ("json_schema", {"pattern": "(?=a)"}, "look-around"),
    ("json_schema", {"$ref": "http://example.org/x"}, "does not fetch"),
    ("json_schema", '{"a":' * 30000, "recursion"),
    ("json_schema", {"a": {1, 2}}, "cannot be written as JSON"),
    ("regex", "(", "unclosed group"),
    ("regex", "\ud800", "must be valid Unicode text"),
    ("lark", "start: b", "unknown name"),
    ("lark", '%llguidance {}\nstart: "a"', "%llguidance is not allowed"),
    ("verse", "x", "a grammar must be a text of kind"),
]


@pytest.mark.parametrize(("kind", "text", "says"), REFUSED, ids=lambda v: str(v)[:20])
def test_what_cannot_be_used_is_refused_with_a_reason(vocabulary, kind, text, says):
    with pytest.raises(RequestError, match=says) as caught:
        compile_grammar(kind, text, vocabulary)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def chain(links):
    """A schema that would overflow the stack of the parser."""
    rules = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": rules | {f"d{links}": {"type": "integer"}}}


def test_a_grammar_that_kills_its_compiler_kills_nothing_else(vocabulary):
    with pytest.raises(RequestError, match="nested too deeply or too large"):
        compile_grammar("json_schema", chain(4000), vocabulary)
    assert compile_grammar("json_schema", chain(20), vocabulary)


def test_a_compiler_that_takes_too_long_is_given_up(vocabulary):
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(8000))
    with pytest.raises(RequestError, match=r"took more than 0\.05 s"):
        vocabulary.compiler.ask({"kind": "gbnf", "text": f'root ::= r0\n{rules}r8000 ::= "b"'},
                                seconds=0.05)
    assert compile_grammar("regex", "after that", vocabulary)


def test_a_compiler_cannot_take_all_memory_nor_outlive_us_for_long(vocabulary):
    compile_grammar("regex", "any(thing)?", vocabulary)
    limits = Path(f"/proc/{vocabulary.compiler._process.pid}/limits")
    if not limits.exists():
        pytest.skip("no /proc here")
    soft = {line[:25].strip(): line[25:].split()[0] for line in limits.read_text().splitlines()}
    assert int(soft["Max address space"]) <= 4 * 1024**3
    assert int(soft["Max cpu time"]) < 60


def test_a_parser_that_gives_up_allows_nothing(vocabulary, monkeypatch):
    import llguidance

    wide = "root ::= " + '"a"? ' * 300
    text = compile_grammar("gbnf", wide, vocabulary)
    assert Constraint(vocabulary, text).allowed([]).any()
    tight = llguidance.LLParserLimits(step_max_items=40, verbose_errors=False)
    monkeypatch.setattr(vocabularies, "_limits", lambda: tight)
    constraint = Constraint(vocabulary, text)
    mask = constraint.allowed([])
    assert mask is not None
    assert not mask.any()
    assert "limit 40" in constraint.failure
    with pytest.raises(RequestError, match="limit 40"):
        grammars.compile_here("gbnf", wide, vocabulary)


def test_constraints_are_kept_by_lane(vocabulary, compiled):
    constraints = Constraints(vocabulary, keep=2)
    first = constraints.of(1, compiled[0])
    assert constraints.of(1, compiled[0]) is first
    assert constraints.of(2, compiled[0]) is not first
    constraints.forget(1)
    assert constraints.of(1, compiled[0]) is not first
    with pytest.raises(UsageError, match="not received the vocabulary"):
        Constraints(None).of(1, compiled[0])


def test_a_vocabulary_travels(vocabulary, tokenizer):
    data = json.loads(json.dumps(vocabulary.to_json()))
    again = Vocabulary.from_json(data)
    assert again == vocabulary
    assert len(again) == tokenizer.n_vocab
    special = [i for i, token in enumerate(again.tokens) if token[:1] == b"\xff" and token[1:]]
    assert set(tokenizer.eog_ids) <= set(special)
    for change in ({"count": 5}, {"packed": "!"}, {"packed": data["packed"][:40]},
                   {"end_ids": "x"}, {"count": None}):
        with pytest.raises(ProtocolError, match="cannot be read"):
            Vocabulary.from_json(data | change)
    with pytest.raises(ProtocolError):
        Vocabulary.from_json({})


def test_grammars_need_an_end_of_text_token():
    with pytest.raises(UsageError, match="end-of-text"):
        Vocabulary([b"a"], [])


def test_lengthening_a_path_costs_no_replay(vocabulary, compiled):
    """What makes speculation affordable: a path that grows consumes its new tokens only."""
    constraint = Constraint(vocabulary, compiled[0])
    path = walk(constraint, random.Random(1), 60)
    consumed = []

    class Counting:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def try_consume_tokens(self, tokens):
            consumed.append(len(tokens))
            return self._inner.try_consume_tokens(tokens)

    constraint = Constraint(vocabulary, compiled[0])
    constraint.allowed(())
    constraint._matcher = Counting(constraint._matcher)
    for shorter, longer in pairwise(range(len(path) + 1)):
        constraint.allowed(path[:shorter])
        constraint.allowed(path[:longer])
    assert sum(consumed) == len(path)
