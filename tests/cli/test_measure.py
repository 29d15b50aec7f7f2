"""`pipeinfer measure` on real ranks: what its record says, and what it does not."""

from __future__ import annotations

import socket
import sys

import msgspec
import pytest
from msgspec import structs

from pipeinfer.cli import measuring
from tests.kit import launch, llama_programs


@pytest.mark.slow
def test_a_job_of_three_ranks_is_measured_and_nobody_is_named(tmp_path):
    path = tmp_path / "ours.json"
    done = launch.run(3, [sys.executable, "-m", "pipeinfer", "measure", "--share", str(path),
                          "--note", "three ranks", "--programs",
                          str(llama_programs.write(tmp_path / "programs", worker=False))],
                      timeout=240.0)
    assert done.returncode == 0, done.stderr
    record = msgspec.json.decode(path.read_bytes(), type=measuring.Record)
    assert record.equal
    assert record.note == "three ranks"
    assert sum(record.layers) == 12
    assert len(record.layers) == 2
    assert [one.ranks for one in record.hosts] == [(0, 1, 2)]
    assert len(record.links) == 2
    assert not record.missing
    assert record.baseline == measuring.Baseline("llama.cpp 0000000", 0, (74.0, 522.0), 10.0)
    assert "one process, beside it: 10.0 tokens/s" in done.stdout
    assert {(run.users, run.prompt, run.policy) for run in record.runs} == {
        (users, length, policy) for users in measuring.USERS for length in measuring.PROMPTS
        for policy in (measuring.PLAIN, measuring.SPECULATION)}
    assert all(run.rate > 0 and run.prompt_rate > 0 for run in record.runs)
    text = path.read_text()
    assert socket.gethostname() not in text.replace("pipeinfer", "")
    assert str(tmp_path) not in text
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "the texts are equal" in done.stdout
    one, *others = record.runs
    unlike = (structs.replace(one, texts="0"), *others)
    assert not measuring.equal(unlike)
    assert "NOT EQUAL" in measuring.paragraph(structs.replace(record, equal=False))


def test_a_run_is_foreseen_by_the_lowest_rates():
    """A slow job leaves out what would not end in time, instead of ending late."""
    assert measuring.foreseen([], 4, 512, 64) == 0
    runs = [measuring.Run("plain", 1, 64, 8, prompt_rate, rate, "")
            for prompt_rate, rate in ((100.0, 4.0), (50.0, 8.0), (80.0, 6.0))]
    assert measuring.foreseen(runs, 4, 500, 40) == 4 * (500 / 50 + 40 / 4)
    assert measuring.foreseen([structs.replace(runs[0], rate=0.0)], 1, 100, 1) > 180
