"""The comparison's arithmetic, and what it asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipeinfer.config import JobConfig
from pipeinfer.errors import PipeinferError, UsageError
from pipeinfer_lab.commands import compare, comparison
from pipeinfer_lab.commands.compare import (
    compare_command,
    configs_for,
    judge_all,
    normals,
    parse_method,
    superset,
)
from pipeinfer_lab.commands.comparison import Answer, by_kind, geometric, rows_of
from pipeinfer_lab.quality.judge import controlled
from pipeinfer_lab.quality.prompt import Prompt
from tests.kit.answering import answering, spoken


def answer(method, seconds, steps, tokens, visible, *, exact=True, text="t"):
    return Answer(method, seconds, tokens, visible, steps, runs=tokens, cells=9, busy=0.5,
                  wasted=0.0, acceptance=None, quality=float(exact), exact=exact, text=text)


def test_means_are_geometric_and_against_the_plain_answer_to_the_same_prompt():
    table = {row["method"]: row for row in rows_of({
        "plain": [answer("plain", 4.0, 40, 40, 40), answer("plain", 1.0, 10, 10, 10)],
        "pasta": [answer("pasta", 1.0, 10, 44, 40), answer("pasta", 1.0, 10, 12, 10, exact=False,
                                                           text="u")]})}
    pasta = table["pasta"]
    assert pasta["speedup"] == pytest.approx(2.0)  # of 4 and 1
    assert pasta["steps_speedup"] == pytest.approx(2.0)
    assert pasta["parallelism"] == pytest.approx(2.0)  # of 4 and 1
    assert pasta["compression"] == pytest.approx((4.4 * 1.2) ** 0.5)
    assert pasta["exact"] == 0.5
    assert pasta["same_text"] == 1
    assert table["plain"]["speedup"] == pytest.approx(1.0)
    text = comparison.table_text(list(table.values()))
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "| pasta " in text


def test_pdos_is_compared_with_its_prompt_decoded_in_sequence_too():
    configs, _ = configs_for(JobConfig(), ["pdos", "pdos+prompt-lookup", "apar"])
    assert [*configs] == ["plain", "pdos", "pdos+prompt-lookup", "apar", "pdos-plain"]
    assert configs["pdos-plain"].speculation.policy == "iterative"
    rows = rows_of({"plain": [answer("plain", 4.0, 40, 40, 40)],
                    "pdos": [answer("pdos", 2.0, 10, 50, 40)],
                    "pdos-plain": [answer("pdos-plain", 6.0, 50, 50, 50)],
                    "apar": [answer("apar", 2.0, 10, 50, 40)]}, normals=normals(configs))
    table = {row["method"]: row for row in rows}
    assert table["pdos"]["speedup"] == pytest.approx(2.0)
    assert table["pdos"]["speedup_over_normal"] == pytest.approx(3.0)
    assert table["pdos"]["steps_speedup_over_normal"] == pytest.approx(5.0)
    assert table["apar"]["speedup_over_normal"] is None
    head, *_ = comparison.table_text(rows).splitlines()
    assert "| in steps | over Normal | its steps |" in head


def test_judgements_count_against_the_plain_answer_and_by_kind(monkeypatch):
    monkeypatch.setattr("pipeinfer_lab.training.pasta.endpoint.time.sleep", lambda seconds: None)
    plain = [answer("plain", 1.0, 9, 9, 9, text="ab"), answer("plain", 1.0, 9, 9, 9, text="a")]
    cod = [answer("cod", 1.0, 3, 3, 3, text="abcd"), answer("cod", 1.0, 3, 3, 3, text="abc")]
    asked = [Prompt("Which?", reference="a", kind="x"), Prompt("Why?", kind="y")]
    for one, prompt in zip([*plain, *cod], asked * 2, strict=True):
        one.kind = prompt.kind
    asked_for = []

    def judge(body, headers):
        asked_for.append(body["messages"][0]["content"])
        return spoken(judgement(asked_for[-1]))

    assert "Connection refused" in judge_all("http://127.0.0.1:1/v1", "m", "both", asked,
                                             {"plain": plain, "cod": cod})
    with answering(judge) as url:
        assert "1 judgements" in judge_all(f"{url}/v1", "m", "both", asked,
                                           {"plain": plain, "cod": cod})
    assert [a.rating for a in (*plain, *cod)] == [2, 1, 4, 3]
    assert [a.won for a in cod] == [1.0, None]  # longer is better, and once it cannot be read
    rows = {row["method"]: row for row in rows_of({"plain": plain, "cod": cod}, controlled)}
    assert (rows["cod"]["rating"], rows["cod"]["won"], rows["plain"]["won"]) == (3.5, 1.0, None)
    kinds = by_kind({"plain": plain, "cod": cod})
    assert [(r["kind"], r["method"], r["rating"]) for r in kinds] == [
        ("x", "plain", 2), ("x", "cod", 4), ("y", "plain", 1), ("y", "cod", 3)]
    assert "| mark |" in comparison.table_text(kinds)
    assert "| won |" not in comparison.table_text([rows["plain"]])  # nothing is known of it
    assert "Reference answer: a\n" in asked_for[1]  # the first only asks whether it is there


def judgement(text):
    """Of a judge who marks by length and says that the longer text wins; "Why?" has no winner."""
    if "Answer A:" not in text:
        return f"Reason: 5 of them. Score: {len(text.rpartition('answer: ')[2])}"
    first, second = text.split("Answer A:\n")[1].split("\n\nAnswer B:\n")
    return "neither" if "Why?" in text else "A" if len(first) > len(second) else "B 0.9"


def test_methods_that_take_more_steps_than_plain_decoding_are_named():
    plain = [answer("plain", 1.0, 100, 100, 100), answer("plain", 1.0, 100, 100, 100)]
    slow = [answer("pasta", 1.0, 110, 100, 100), answer("pasta", 1.0, 150, 100, 100)]
    slow[1].gave_up = 2
    assert comparison.slow_answers({"plain": plain, "apar": plain}) == []
    assert comparison.slow_answers({"plain": plain, "pasta": slow}) == [
        "pasta: more than a tenth more steps than plain decoding in 1 of 2 answers, at most 1.50 "
        "times as many; 2 threads ended because they were too long, in 1 answers"]


def test_methods_are_parts_in_any_order():
    config = parse_method("lookahead+pasta@speculative", JobConfig()).speculation
    assert (config.decomposer, config.proposer, config.policy) == ("pasta", ("lookahead",),
                                                                  "speculative")
    plain = parse_method("plain", JobConfig()).speculation
    assert (plain.decomposer, plain.proposer, plain.policy) == ("", (), "iterative")
    for wrong in ("pasta+pdos", "magic", "plain@fast", "plain+pasta"):
        with pytest.raises(UsageError, match="--method"):
            parse_method(wrong, JobConfig())


def test_what_is_loaded_suffices_for_every_method():
    base = JobConfig()
    configs = [parse_method(m, base) for m in ("plain", "pdos", "pasta+lookahead", "draft")]
    whole = superset(configs, base).speculation
    assert whole.decomposer == "pasta"  # it needs the most of the stages
    assert set(whole.proposer) == {"lookahead", "draft"}
    assert whole.partitions > 8 * 5  # windows in every thread


def test_what_is_loaded_is_the_same_on_every_rank():
    program = ("from pipeinfer_lab.commands.compare import parse_method, superset\n"
               "from pipeinfer.config import JobConfig\n"
               "configs = [parse_method(m, JobConfig()) for m in ('pdos', 'skeleton', 'apar')]\n"
               "print(superset(configs, JobConfig()).speculation.decomposer)")
    found = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            check=True, timeout=60,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout
             for seed in ("1", "2", "3", "4")}
    assert found == {"apar\n"}


def test_another_models_plain_answers_are_the_baseline(tmp_path):
    pytest.importorskip("matplotlib")
    others = {"plain": [answer("plain", 4.0, 40, 40, 40)]}
    comparison.write(tmp_path, "title", "text", rows_of(others), others, ["Why?"])
    answers = {"baseline": comparison.read_baseline(tmp_path, ["Why?"]),
               "plain": [answer("plain", 2.0, 20, 20, 20)],
               "pasta": [answer("pasta", 1.0, 10, 20, 20, text="u")]}
    rows = {row["method"]: row for row in rows_of(answers)}
    assert [rows[name]["speedup"] for name in rows] == pytest.approx([1.0, 2.0, 4.0])
    assert [rows[name]["same_text"] for name in rows] == [1, 1, 0]
    with pytest.raises(UsageError, match="other questions"):
        comparison.read_baseline(tmp_path, ["Where?"])
    with pytest.raises(UsageError, match="is not what compare -o writes"):
        comparison.read_baseline(tmp_path / "none", [])


def test_stage_time_is_counted_by_fate():
    runs = [{"id": 1, "rows": 1},
            {"id": 1, "spans": [[0.0, 0.5, "computed", 0.0], [1.0, 0.25, "x", 0.1]]},
            {"id": 2, "spans": [[0.0, 1.0, "computed", 0.0]]}, {"id": 2, "fate": "rejected"},
            {"id": 1, "fate": "non-speculative"}]
    assert comparison.use_of_stages(runs) == (1.75, 1.0)


def test_the_mean_of_nothing_is_no_number():
    assert geometric([]) != geometric([])


def test_results_are_written_with_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    answers = {"plain": [answer("plain", 1.0, 4, 4, 4)], "pdos": [answer("pdos", 0.5, 2, 5, 4)]}
    comparison.prepare(tmp_path / "out", plots=True)
    comparison.write(tmp_path / "out", "title", "text", rows_of(answers), answers)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "table.md", "results.json", "speedup.png", "quality.png"}
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["answers"]["pdos"][0]["steps"] == 2


def test_prompts_beyond_the_context_are_named_before_any_is_answered(tmp_path, monkeypatch):
    def answered(*given):
        raise AssertionError(f"{given} is answered")

    monkeypatch.setattr(compare, "ask", answered)
    path = tmp_path / "prompts.txt"
    path.write_text(f"short\n{'long ' * 600}\n{'long ' * 900}\n")
    done = CliRunner().invoke(compare_command, [
        "-m", "task", "-c", "512", "-n", "40", "--method", "plain", "--prompts", str(path)])
    assert isinstance(done.exception, UsageError), done.exception
    said = str(done.exception)
    assert "2 of 3 prompts are longer than the context of 512 tokens" in said
    assert "the first is prompt 2" in said
    needed = int(said.rpartition("-c ")[2])
    assert needed > 900 + 40
    with pytest.raises(AssertionError, match="is answered"):
        CliRunner().invoke(compare_command, [
            "-m", "task", "-c", str(needed), "-n", "40", "--method", "plain", "--prompts",
            str(path)], catch_exceptions=False)


def test_what_cannot_be_written_is_said_before_anything_is_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["--tasks", "1", "--method", "plain", "-n", "4", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(compare_command, command)
    assert "pip install 'pipeinfer[plot]', or give --no-plots" in str(done.exception)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(PipeinferError, match="cannot write to"):
        comparison.prepare(tmp_path / "file" / "out", plots=False)
    comparison.prepare(tmp_path / "out", plots=False)
    comparison.write(tmp_path / "out", "title", "text", [], {}, plots=False)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"table.md", "results.json"}
