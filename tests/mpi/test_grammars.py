"""Grammars over real ranks and the embedded models: a plain loop's tokens, and a valid text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.cli.generate import generate
from pipeinfer.core.sampling import choose, noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.grammar import compile_grammar
from pipeinfer.models.text.vocabulary import Vocabulary
from tests.kit import launch
from tests.kit.plain_loop import PlainLoop
from tests.kit.refusals import assert_refused
from tests.kit.sample import full
from tests.mpi.test_jobs import EMBEDDED
from tests.mpi.test_matrix import run_matrix

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT, COUNT = "settings = ", 40
SCHEMA = {"type": "object", "required": ["name", "size"], "additionalProperties": False,
          "properties": {"name": {"type": "string", "maxLength": 10},
                         "size": {"type": "integer", "minimum": 0, "maximum": 9999}}}
CALL = 'root ::= [a-z]+ "(" ([a-z0-9]+ ("," " "? [a-z0-9]+){0,4}) ")" "\\n"'


@pytest.fixture(scope="module")
def wanted():
    """Cases with the tokens of a loop that makes a matcher of its own for every token."""
    tokenizer = open_tokenizer(EMBEDDED / "target.gguf")
    vocabulary, loop = Vocabulary.of(tokenizer), PlainLoop(EMBEDDED / "target.gguf")
    prompt, found = tokenizer.encode(PROMPT), []
    for kind, text in (("json_schema", SCHEMA), ("gbnf", CALL)):
        grammar = compile_grammar(kind, text, vocabulary)
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature, top_k=40, key=noise_key(7), grammar=grammar)
            found.append((params, plain(loop, vocabulary, prompt, params)))
    vocabulary.compiler.close()
    loop.close()
    tokenizer.close()
    return found


def plain(loop, vocabulary, prompt, params):
    loop.reset()
    path, logits = list(prompt), loop.decode(prompt, 0)
    while len(path) < len(prompt) + COUNT:
        matcher = vocabulary.matcher(params.grammar)
        assert matcher.try_consume_tokens(path[len(prompt):]) == len(path) - len(prompt)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = bits[: loop.n_vocab].astype(bool)
        token = choose(logits, params, np.array(path, np.int32), len(path) - 1, mask).token
        if loop.is_eog(token):
            break
        path.append(token)
        logits = loop.decode([token], len(path) - 1)
    return path[len(prompt):]


@pytest.mark.parametrize("np", [full(1), 4])
def test_tokens_under_a_grammar_are_those_of_a_plain_loop(tmp_path, wanted, np):
    todo = [{"prompt": PROMPT, "params": structs.asdict(params), "limits": limits,
             "count": COUNT, "ignore_eos": False}
            for params, _ in wanted
            for limits in ({"policy": "iterative"}, {"policy": "speculative", "branches": 3},
                           {"policy": "pipeinfer", "p_min": 0.0, "path_min": 0.01},
                           {"policy": "pipeinfer", "adapt": True})]
    answer = run_matrix(tmp_path, np, {}, todo)
    expected = [tokens for _, tokens in wanted for _ in range(4)]
    assert [r["tokens"] for r in answer["results"]] == expected
    assert sum(r["accepted_speculative"] for r in answer["results"]) > 20
    assert any(len(tokens) < COUNT for _, tokens in wanted)


def test_the_command_line_gives_json_of_the_schema():
    answer = launch.answered(2, "-p", PROMPT, "-n", "200", "--seed", "3", "-j", json.dumps(SCHEMA))
    assert answer["stats"]["reason"] == "stop"
    data = json.loads(answer["text"])
    assert set(data) == {"name", "size"}
    assert len(data["name"]) <= 10
    assert 0 <= data["size"] <= 9999


@pytest.mark.parametrize(("args", "code", "says"), [
    (["--grammar", "root ::= (foo"], 5, "the grammar cannot be used: Expected ')'"),
    (["--json-schema", '{"type": "objct"}'], 5, "the JSON schema cannot be used: Invalid type"),
    (["--json-schema", "{}", "--grammar", "x"], 2, "give one of --grammar and --json-schema"),
    (["--grammar-file", "/nowhere"], 2, "cannot read /nowhere"),
])
def test_a_grammar_that_cannot_be_used_is_refused_before_anything_loads(args, code, says):
    assert_refused(generate, ["-p", "x", *args], code, says)
