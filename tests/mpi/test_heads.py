"""The target's own head as proposer: right wherever its rows are, and never in the text."""

from __future__ import annotations

import itertools

import gguf
import pytest

from pipeinfer.cli.generate import generate as generate_command
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import SmallVocabulary
from tests.kit import launch
from tests.kit.block_files import write_block_draft
from tests.kit.clockwork import successors, text_behind, write_apart, write_clockwork, write_eagle
from tests.kit.launch import PIPEINFER
from tests.kit.random_model import RandomSpec, finish, tiny, write_random_model
from tests.kit.references import encoded
from tests.kit.refusals import assert_refused, refusal
from tests.kit.sample import full
from tests.mpi.test_turns import TURNS

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
HEADED = ("glm4moe", "deepseek2-mtp", "qwen35-mtp", "qwen35moe-mtp")
PROMPT = "the rain in"
#: ranks, options. Where runs overlap the stages are paced, so that a head on a busy machine comes
#: in time; by turns its tokens travel with the token that they follow
WAYS = {
    "one": (1, ("--set", "adapt=false",)),
    "turns": (3, ("--set", "adapt=false",)),
    "overlap": (4, ("--set", "turns=off", "--hook", "pace=10")),
    "synchronous": (3, ("--policy", "speculative", "--set", "turns=off")),
    "head stage": (2, ("--head-stage", "--set", "turns=off", "--hook", "pace=10")),
    "published": (4, ("--policy", "published", "--set", "turns=off", "--hook", "pace=10")),
    "halves": (3, ("--set", "turns=off", "--hook", "pace=10", "--set", "hidden_type=f16")),
    "grid": (5, ("--grid", "2x2", "--hook", "pace=10")),
    "draft rank": (4, ("--draft-ranks", "1", "--hook", "pace=10")),
    "killed": (4, ("--set", "turns=off", "--hook", "pace=10", "--hook", "fault=kill@2:decode=12")),
}


#: models whose layers keep a state refuse the published policy
CASES = [(name, way) for name, way in itertools.product(HEADED, WAYS)
         if not (name.startswith("qwen35") and way == "published")]
SAMPLED = (("glm4moe", "grid"), ("qwen35-mtp", "overlap"), ("deepseek2-mtp", "halves"),
           ("glm4moe", "turns"), ("glm4moe", "killed"), ("qwen35-mtp", "draft rank"))


def generate(path, ranks, *more, count=60, way=""):
    threads, env = ((), TURNS) if way == "turns" else (("-t", "1"), {})
    return launch.answered(ranks, "-m", path, "-p", PROMPT, "-n", count, "-c", "256", *threads,
                           "--ignore-eos", *more, timeout=90, **env)


def notes_of(path, *more):
    """What one rank says of the drafts that it uses."""
    return "".join(generate(path, 1, *more, count=4)["stats"]["notes"])


def check_always_right(path, found, way):
    """Whether an answer is the clockwork's text, and every guess that was tested was right."""
    assert found["tokens"] == text_behind(encoded(path, PROMPT), 60)
    stats = found["stats"]
    # where only single rows are exact no token travels with another
    least = 15 if way != "turns" or stats["exact_width"] > 1 else 0
    assert stats["accepted_speculative"] >= least
    if way != "killed":  # what was in flight then counts as wrong
        assert stats["accepted_speculative"] == stats["guesses_tested"]
    else:
        assert stats["recovered"] == 1


@pytest.mark.parametrize(("name", "way"), [
    *SAMPLED, *(full(*case) for case in CASES if case not in SAMPLED)])
def test_a_head_that_has_its_rows_is_always_right(name, way, tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", name)
    ranks, options = WAYS[way]
    check_always_right(path, generate(path, ranks, "--temp", "0", "--proposer", "mtp",
                                      "--speculation", "on", *options, way=way), way)


@pytest.mark.parametrize(("name", "way", "sampling"), [
    ("glm4moe", "one", ("--temp", "0")), *(
        full(name, way, ("--temp", "0.8", "--seed", "5"))
        for name, way in zip(HEADED, ("overlap", "draft rank", "overlap", "turns"), strict=True))])
def test_a_head_with_a_small_vocabulary_is_right_where_it_has_the_token(name, way, sampling,
                                                                        tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", name)
    ranks, options = WAYS[way]
    small = SmallVocabulary.of(ModelFile(path), 128)
    plain = generate(path, 1, *sampling, "--speculation", "off", count=100)
    found = generate(path, ranks, *sampling, "--proposer", "mtp", "--speculation", "on",
                     "--head-vocabulary", "128", *options, count=100, way=way)
    assert found["tokens"] == plain["tokens"]
    has = sum(one in small.tokens for one in found["tokens"])
    assert 20 < has < 80
    assert 10 < found["stats"]["accepted_speculative"] <= has + 16


@pytest.mark.parametrize("fault", ["kill@3:decode=9", full("error@3:decode=9")])
def test_a_lost_head_costs_its_proposals_and_no_token(fault, tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", "glm4moe")
    found = generate(path, 4, "--temp", "0", "--speculation", "on", "--hook", "pace=10",
                     "--draft-ranks", "1", "--hook", f"fault={fault}")
    assert found["tokens"] == text_behind(encoded(path, PROMPT), 60)
    notes = "".join(found["stats"]["notes"])
    assert "the head in model.gguf drafts on rank 3" in notes
    assert "decoding continues without this draft" in notes


def test_of_two_draft_ranks_one_has_the_head_and_the_other_computes_layers(tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", "glm4moe")
    done = launch.run(4, [*PIPEINFER, "generate", "-m", str(path), "-p", "x", "-n", "2",
                          "--draft-ranks", "2"], timeout=60)
    assert done.returncode == 0, done.stderr
    assert "1 draft needs one, so the others compute layers" in done.stderr


def test_an_eagle_head_of_another_model_is_refused(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4))
    other = write_random_model(tmp_path / "other.gguf", RandomSpec(n_layer=4, n_embd=256))
    unnamed = "does not name 3 layers"
    for head, why in ((write_eagle(tmp_path / "one.gguf", other, (0, 1, 2)), "give the head of"),
                      (write_eagle(tmp_path / "two.gguf", path, (1, 2, 9)), unnamed),
                      (path, unnamed), (tmp_path / "none.gguf", "no such file")):
        assert why in refusal(generate_command, ["-m", str(path), "-p", "x", "--eagle",
                                                 str(head)])[1]


def test_a_file_with_a_head_is_guessed_for_by_it_unless_asked_otherwise(tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", "glm4moe")
    assert "the head in model.gguf" in notes_of(path)
    for more in (("--proposer", "prompt-lookup"), ("--speculation", "off"), ("-md", "none")):
        assert "the head in" not in notes_of(path, *more)


def test_an_eagle_head_beside_the_model_is_used_if_it_fits(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4))
    other = write_random_model(tmp_path / "other.gguf", RandomSpec(n_layer=4, n_embd=256))
    write_eagle(tmp_path / "eagle3-a.gguf", other, (0, 1, 2))
    assert "eagle3" not in notes_of(path)
    write_eagle(tmp_path / "eagle3-b.gguf", path, (0, 1, 2))
    assert "eagle3" in notes_of(path)


def test_a_head_may_be_a_file_beside_the_model(tmp_path):
    whole = ModelFile(write_clockwork(tmp_path / "whole.gguf", "glm4moe"))
    (tmp_path / "apart").mkdir()
    model, head = tmp_path / "apart" / "model.gguf", tmp_path / "apart" / "mtp-model.gguf"
    write_apart(whole, model, head)
    assert "mtp" in notes_of(model)
    found = generate(model, 3, "--temp", "0", "--speculation", "on", "--set", "turns=off",
                     "--proposer", "mtp", "--hook", "pace=10")
    assert found["stats"]["accepted_speculative"] == found["stats"]["guesses_tested"] > 20
    assert "has only a prediction head" in refusal(
        generate_command, ["-m", str(head), "-p", "x"])[1]
    head.unlink()
    assert "the head in" not in notes_of(model)


@pytest.mark.parametrize("option", ["-md", full("-m")])
def test_an_assistant_that_reads_the_models_cache_is_refused_with_the_reason(option, tmp_path):
    path = tmp_path / "mtp-gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    writer.add_block_count(4)
    writer.add_embedding_length(64)
    finish(writer)
    assert "reads the KV cache of Gemma 4's last layers" in refusal(
        generate_command, ["-p", "x", option, str(path)])[1]


@pytest.mark.parametrize(("name", "why"), [
    ("llama", "heads of llama models are not supported"),
    full("glm4moe", "has no head of one layer")])
def test_a_model_without_a_head_is_refused_with_the_reason(name, why, tmp_path):
    path = write_random_model(tmp_path / "model.gguf", tiny(name) if name != "llama" else None)
    path.write_bytes(path.read_bytes().replace(b"nextn.eh_proj", b"nextn.eh_gone"))
    assert_refused(generate_command, ["-m", str(path), "-p", "x", "--proposer", "mtp"], 2, why)


@pytest.mark.parametrize("way", ["overlap", *map(full, (
    "one", "turns", "synchronous", "head stage", "published", "halves", "draft rank", "killed"))])
def test_a_block_that_is_right_is_accepted_whole(way, tmp_path):
    path = write_clockwork(tmp_path / "m.gguf", "qwen3moe")
    write_block_draft(tmp_path / "dspark-a.gguf", path, (1, 2), "dspark", after=successors())
    ranks, options = WAYS[way]
    check_always_right(path, generate(path, ranks, "--temp", "0", "--proposer", "dflash",
                                      "--speculation", "on", *options, way=way), way)


def test_a_draft_of_blocks_is_recognised_wherever_it_is(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4))
    other = write_random_model(tmp_path / "other.gguf", RandomSpec(n_layer=4, n_embd=256))
    write_block_draft(tmp_path / "dflash-a.gguf", other, (0, 1, 2))
    given = write_block_draft(tmp_path / "any name.gguf", path, (0, 1, 2), "dflash2")
    assert "the head" not in notes_of(path)
    for more in ((), ("--proposer", "dflash")):
        notes = notes_of(path, "-md", given, *more)
        assert "the head in any name.gguf" in notes
    write_block_draft(tmp_path / "dspark-b.gguf", path, (0, 1, 2), "dspark")
    assert "the head in dspark-b.gguf" in notes_of(path)


def test_drafts_of_blocks_that_do_not_fit_are_refused(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4))
    other = write_random_model(tmp_path / "other.gguf", RandomSpec(n_layer=4, n_embd=256))
    own, taps = write_block_draft(tmp_path / "own.gguf", path, (0, 1, 2)), (0, 1, 2)
    eagle = write_eagle(tmp_path / "eagle.gguf", path, taps)
    for why, more in (
            ("give the head of", ("-md", write_block_draft(tmp_path / "a.gguf", other, taps))),
            ("does not name layers", ("-md", write_block_draft(tmp_path / "b.gguf", path, (2, 9)))),
            ("no usable dflash.block_size",
             ("-md", write_block_draft(tmp_path / "c.gguf", path, taps, block_size=1))),
            ("use --proposer dflash", ("-md", own, "--proposer", "draft")),
            ("both prediction heads", ("-md", own, "--eagle", eagle)),
            ("give one with -md", ("--proposer", "dflash")),
            ("this file with --eagle", ("-md", eagle)), ("this file with -md", ("-m", own))):
        assert why in refusal(generate_command, ["-m", str(path), "-p", "x", *map(str, more)])[1]
