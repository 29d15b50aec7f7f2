"""Prompts on the hosts' disks: read instead of computed, with the tokens of before."""

from __future__ import annotations

import pytest

from tests.kit import launch
from tests.kit.random_model import tiny, write_random_model
from tests.kit.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
TEXT = "def read(path):\n    return open(path).read()\n\n\n" * 12
ASK = ["-p", TEXT, "-n", "40", "--temp", "0.8", "--seed", "5", "--ignore-eos", "-c", "1024", "-t",
       "1", "--set", "split=equal", "--set", "chunk=32"]


def generate(np, *more):
    found = launch.answered(np, *ASK, *more)
    return found["tokens"], found["stats"]


@pytest.mark.parametrize(("name", "others"), [
    ("embedded", (4,)), ("qwen35", (2,)), full("gemma3", (1, 4)), full("mamba2", (3, 2)),
    full("deepseek32", (3, 2)), full("deepseek4", (3,)), full("minimax-m3", (3,)),
    full("qwen3vl", (3, 1))])
def test_another_job_reads_the_prompt_whatever_its_ranks(name, others, tmp_path):
    model = () if name == "embedded" else (
        "-m", write_random_model(tmp_path / "model.gguf", tiny(name)))
    wanted, _ = generate(3, *model)
    disk = ("--kv-disk", tmp_path / "kv")
    tokens, stats = generate(3, *model, *disk)
    assert (tokens, stats["restored"]) == (wanted, 0)
    whole = (stats["n_prompt"] - 1) // 32 * 32
    for np in others:
        tokens, stats = generate(np, *model, *disk)
        assert (tokens, stats["restored"]) == (wanted, whole), np


def test_a_lost_stage_costs_no_second_reading(tmp_path):
    wanted, _ = generate(1)
    # paced, so that what writes behind the runs has the prompt on the disk before the stage dies
    tokens, stats = generate(4, "--kv-disk", tmp_path / "kv", "--hook", "fault=kill@2:decode=12",
                             "--hook", "pace=30")
    assert tokens == wanted
    assert stats["recovered"] == 1
    assert stats["restored"] == (stats["n_prompt"] - 1) // 32 * 32
    assert stats["rows"] < 3 * len(tokens)


def test_files_of_another_arithmetic_are_not_read(tmp_path):
    disk = ("--kv-disk", tmp_path / "kv")
    generate(1, *disk)
    wanted, _ = generate(2, "-ctk", "f16", "-ctv", "bf16")
    tokens, stats = generate(2, "-ctk", "f16", "-ctv", "bf16", *disk)
    assert (tokens, stats["restored"]) == (wanted, 0)


def test_a_stage_of_several_members_says_that_nothing_is_kept(tmp_path):
    _, stats = generate(3, "--grid", "1x2", "--kv-disk", tmp_path / "kv")
    note, = [one for one in stats["notes"] if "--kv-disk" in one]
    assert note == "no prompts are kept on disks (--kv-disk): stages of several members"
