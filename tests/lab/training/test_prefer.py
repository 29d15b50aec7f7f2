"""PASTA's second stage for models that people have: answers of the runtime, and what is learnt."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json
import sys

import pytest

for _package in ("torch", "transformers", "safetensors", "tokenizers"):
    pytest.importorskip(_package, reason=f"training needs {_package}")

import torch

from pipeinfer.errors import UsageError
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer_lab.training.adapt.lora import LoraSettings, load_adapter
from pipeinfer_lab.training.adapt.prefer import pairs_of, prefer, run
from pipeinfer_lab.training.adapt.trainee import Arithmetic, Trainee
from pipeinfer_lab.training.pasta import bonbon, pasta
from pipeinfer_lab.training.pasta.bonbon import Round
from pipeinfer_lab.training.tasks import markup
from pipeinfer_lab.training.tasks.batches import collate
from tests.kit import launch
from tests.lab.training.conftest import do

TASK = EMBEDDED / "task.gguf"
PLAIN = Arithmetic("cpu", torch.float32, False)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Three prompts, four answers each, of the task model: its answers have threads."""
    path = tmp_path_factory.mktemp("s") / "samples.jsonl"
    ask = [sys.executable, "-m", "pipeinfer", "sample", "-m", str(TASK), "--samples", "4", "-t",
           "1", "-n", "400", "--seed", "3", "--out", str(path), "--tasks"]
    for count in ("2", "3"):  # the second goes on behind the first
        done = launch.run(1, [*ask, count], timeout=100)
        assert done.returncode == 0, done.stderr
    return path


def silent(line):
    del line


def file_of(tmp_path, one, *others):
    """A file of one prompt's samples: `one`, and it with the values of each of the others."""
    record = pasta.record_of(one) | {"speedup": 1.0, "quality": 1.0}
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"samples": [record, *(record | other for other in others)]}))
    return path


def tagged(flat, split):
    """Places of `<async>`, of `</async>` and of `<sync/>`, and what promises say, by the tags."""
    begin, end, sync, tokens, close = (split(tag)[0] for tag in (
        markup.ASYNC, markup.ASYNC_END, markup.SYNC, markup.TOKENS, markup.CLOSE))
    digits = {split(str(value))[0]: str(value) for value in range(10)}
    ids = flat.tokens
    places = [[at for at in range(flat.prompt, len(ids)) if ids[at] == tag]
              for tag in (begin, end, sync)]
    promised = []
    for at in places[0]:
        assert ids[at - 1] == close
        first = max(k for k in range(at) if ids[k] == tokens)
        promised.append(int("".join(digits[token] for token in ids[first + 1 : at - 1])))
    return *places, promised


def test_answers_are_laid_out_as_training_reads_them(sampled):
    """What the interpreter did with an answer's tokens is what their tags say."""
    tokenizer = open_tokenizer(TASK)
    records = [json.loads(line) for line in sampled.read_text().splitlines()]
    assert len(records) == 3
    flats = [pasta.flat_of(one) for record in records for one in record["samples"]]
    assert len(flats) >= 9
    assert sum(len(flat.blocks) for flat in flats) > 15
    for flat in flats:
        begins, ends, syncs, promised = tagged(
            flat, lambda text: tokenizer.split(text, special=True))
        assert [block.promise + 1 for block in flat.blocks] == begins
        assert [block.start for block in flat.blocks] == begins
        assert [block.end for block in flat.blocks] == ends
        assert [block.room for block in flat.blocks] == [10 * units for units in promised]
        assert list(flat.syncs) == syncs
    texts = [one["text"] for record in records for one in record["samples"]]
    for flat, text in zip(flats, texts, strict=True):
        own = len(flat.tokens) - flat.prompt - flat.control  # digits of numbers are tokens
        assert 0.8 < own / len(tokenizer.split(text, special=False)) < 1.2
        assert own < len(flat.tokens) - flat.prompt
    tokenizer.close()
    assert all(one["speedup"] > 0.3 and 0 <= one["quality"] <= 1
               for record in records for one in record["samples"])


def test_the_better_answers_become_likelier_than_the_worse(sampled, tmp_path):
    do("pasta-bonbon", "--model", TASK, "--data", sampled, "--out", tmp_path, "--steps", 4,
       "--batch", 2, "--rate", 2e-3, "--rank", 4, "--device", "cpu", "--dtype", "float32",
       "--threads", 1)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses[-1] < losses[0]
    adapter = load_adapter(tmp_path)
    pairs, samples = pairs_of(sampled, 2.0, 2048, silent)
    assert samples == 4
    trainee = Trainee(TASK, PLAIN, LoraSettings(4, 8.0))

    def margin():
        with torch.no_grad():
            both = [trainee.log_probabilities(collate(pair)) for pair in pairs]
        return sum(float(one[0] - one[1]) for one in both)

    before = margin()
    for name, weight in adapter.weights.items():
        trainee.learnt[name].data.copy_(weight)
    assert margin() > before + 1.0


def test_padding_changes_no_likelihood(sampled):
    """Of rows side by side, whose lengths differ."""
    pairs, _ = pairs_of(sampled, 2.0, 2048, silent)
    rows = [row for pair in pairs for row in pair]
    assert len({len(row.tokens) for row in rows}) > 1
    trainee = Trainee(TASK, PLAIN, LoraSettings(4, 8.0))
    with torch.no_grad():
        together = trainee.log_probabilities(collate(rows))
        alone = [trainee.log_probabilities(collate([row]))[0] for row in rows]
    assert torch.allclose(together, torch.stack(alone), atol=1e-2, rtol=1e-4)


def test_a_model_that_has_the_tags_as_tokens_learns_from_annotated_answers(tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "adapter"
    do("annotate", "--rules", "--tasks", 4, "--out", data)
    do("pasta-sft", "--model", TASK, "--data", data, "--out", out, "--steps", 2, "--batch", 2,
       "--rank", 4, "--device", "cpu", "--dtype", "float32", "--threads", 1)
    assert load_adapter(out).weights


@pytest.mark.parametrize("changed", [
    {"speedup": float("nan")}, {"quality": float("inf")}, {"prompt": float("inf")},
    {"speedup": -1.0}])
def test_files_with_figures_that_are_no_numbers(tmp_path, changed):
    path = file_of(tmp_path, pasta.Flat((1, 2, 3), 1, (), ()), changed)
    with pytest.raises(UsageError, match="record 1: is not of pipeinfer sample"):
        pairs_of(path, 2.0, 2048, silent)


def test_parallelism_of_samples_that_count_no_tags_is_refused(tmp_path):
    one = pasta.record_of(pasta.Flat((1, 2, 3), 1, (), ())) | {"speedup": 1.0, "quality": 1.0}
    del one["control"]
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"samples": [one, one | {"speedup": 2.0}]}))
    assert pairs_of(path, 2.0, 2048, silent)[1] == 2
    with pytest.raises(UsageError, match="does not count tags, as --term harmonic needs"):
        pairs_of(path, 2.0, 2048, silent, "harmonic")


def test_the_loss_compares_with_the_reference(sampled):
    """BoNBoN's theta_init: of a model that is right by c already, its square is of what is left."""
    pairs, samples = pairs_of(sampled, 2.0, 2048, silent)
    learner, other = (Trainee(TASK, PLAIN, LoraSettings(4, 8.0), seed=seed) for seed in (0, 0))
    for name, weight in other.learnt.items():
        weight.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    with torch.no_grad():
        mine, theirs = (one.log_probabilities(collate(pairs[0])) for one in (learner, other))
    settings = Round(steps=1, batch=1)
    (found,) = prefer(learner, pairs[:1], samples, settings, silent, other)
    gained = float(mine[0] - mine[1]) - float(theirs[0] - theirs[1])
    constant = bonbon.constant(samples)
    assert abs(gained) > 0.5
    assert found == pytest.approx(
        -0.005 * float(mine[0]) + 0.995 * (gained - constant) ** 2, rel=1e-3)


def test_samples_of_another_model_are_refused(tmp_path):
    path = file_of(tmp_path, pasta.Flat((1, 2, 10**6), 1, (), ()),
                   {"quality": 0.0, "tokens": [1, 3, 2]})
    with pytest.raises(UsageError, match="has token 1000000"):
        run(TASK, path, tmp_path / "a", Round(), LoraSettings(4, 8.0), PLAIN, report=silent)
    path = file_of(tmp_path, pasta.Flat((1, -1, 2), 1, (), ()))
    with pytest.raises(UsageError, match="a token below 0"):
        pairs_of(path, 2.0, 2048, silent)


def test_files_of_samples_that_teach_nothing(sampled, tmp_path):
    record = json.loads(sampled.read_text().splitlines()[0])
    record["samples"] = [record["samples"][0]] * 2
    path = tmp_path / "same.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="no two answers"):
        pairs_of(path, 2.0, 2048, silent)
    for samples in ([{"tokens": [1]}], ["a"], "a", None):
        path.write_text(json.dumps({"samples": samples}))
        with pytest.raises(UsageError, match="record 1: is not of pipeinfer sample"):
            pairs_of(path, 2.0, 2048, silent)


@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
def test_weights_that_an_adapters_config_cannot_hold(tmp_path, weight):
    with pytest.raises(UsageError, match="no finite number"):
        run(TASK, tmp_path / "none.jsonl", tmp_path / "a", Round(weight=weight),
            LoraSettings(4, 8.0), PLAIN, report=silent)
