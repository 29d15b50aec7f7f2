"""The comparison's arithmetic, and what it asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pipeinfer.cli import compare
from pipeinfer.cli.compare import Answer, file_prompts, geometric, parse_method, rows_of, superset
from pipeinfer.config import JobConfig
from pipeinfer.errors import UsageError


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
    text = compare.table_text(list(table.values()))
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "| pasta " in text


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
    program = ("from pipeinfer.cli.compare import parse_method, superset\n"
               "from pipeinfer.config import JobConfig\n"
               "configs = [parse_method(m, JobConfig()) for m in ('pdos', 'skeleton', 'apar')]\n"
               "print(superset(configs, JobConfig()).speculation.decomposer)")
    found = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            check=True, timeout=60,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout
             for seed in ("1", "2", "3", "4")}
    assert found == {"apar\n"}


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('plain question\n\n{"question": "2+2?", "answer": 4}\n')
    first, second = file_prompts(path)
    assert (first.question, first.score) == ("plain question", None)
    assert (second.score(" 4\n"), second.exact("5")) == (1.0, False)
    for bad in ("", '{"answer": 1}', "{"):
        path.write_text(bad)
        with pytest.raises(UsageError):
            file_prompts(path)


def test_stage_time_is_counted_by_fate():
    runs = [{"id": 1, "rows": 1}, {"id": 1, "spans": [[0.0, 0.5, "computed"], [1.0, 0.25, "x"]]},
            {"id": 2, "spans": [[0.0, 1.0, "computed"]]}, {"id": 2, "fate": "rejected"},
            {"id": 1, "fate": "non-speculative"}]
    assert compare.use_of_stages(runs) == (1.75, 1.0)


def test_the_mean_of_nothing_is_no_number():
    assert geometric([]) != geometric([])


def test_results_are_written_with_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    answers = {"plain": [answer("plain", 1.0, 4, 4, 4)], "pdos": [answer("pdos", 0.5, 2, 5, 4)]}
    compare.write(tmp_path / "out", "title", rows_of(answers), answers)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "table.md", "results.json", "speedup.png", "quality.png"}
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["answers"]["pdos"][0]["steps"] == 2
