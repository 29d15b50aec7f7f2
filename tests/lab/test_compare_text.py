"""`pipeinfer compare-text`: answers that differ between two ways to ask are counted and shown."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pipeinfer_lab.commands.compare_text import compare_text_command, first_difference
from tests.kit.answering import answering

PROMPTS = ["one", "two", "three", "four"]


def echo(body, headers):
    """The prompt, and another last letter where the server guesses and the prompt has a t."""
    assert body["temperature"] == 0
    assert body["max_tokens"] == 5
    assert headers["Authorization"] == "Bearer secret"
    end = "B" if body.get("guesses") and "t" in body["prompt"] else "A"
    return 500 if body["prompt"] == "fail" else 200, {
        "choices": [{"text": f"so {body['prompt']} {end}"}]}


@pytest.fixture
def url():
    with answering(echo) as found:
        yield found


def run(tmp_path, *words, prompts=PROMPTS):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    return CliRunner().invoke(compare_text_command, [
        *words, "--prompts", str(file), "-n", "5", "--api-key", "secret"])


def test_answers_that_differ_are_shown_with_their_first_place(url, tmp_path):
    done = run(tmp_path, f"{url}/v1", "--other-fields", '{"guesses": 4}')
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-3:] == [
        "prompt 2, character 7: 'so two A' | 'so two B'",
        "prompt 3, character 9: 'so three A' | 'so three B'", "2 of 4 answers differ"]


def test_two_servers_that_agree(url, tmp_path):
    done = run(tmp_path, url, url, "--json")
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "answers": 4, "differ": 0, "first": [None] * 4}


@pytest.mark.parametrize(("words", "prompts", "error"), [
    (["--fields", "[1]"], PROMPTS, "is no JSON object"), ([], ["fail"], "answers 500")])
def test_what_is_wrong_is_said(url, tmp_path, words, prompts, error):
    done = run(tmp_path, url, *words, prompts=prompts)
    assert done.exit_code
    assert error in str(done.exception)


def test_the_first_difference():
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("ab", "abd") == 2
