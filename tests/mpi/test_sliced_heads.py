"""Heads that the members of a wide stage have in slices: right wherever their rows are, and never
in the text, whoever dies."""

from __future__ import annotations

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.planning.wide import shares_of
from tests.kit import launch
from tests.kit.clockwork import text_behind, write_clockwork, write_eagle
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.references import encoded, seeded
from tests.kit.sample import full
from tests.kit.sliced_loop import SlicedLoop

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
PROMPT = "the rain in"
LONG = 60 * PROMPT  #: more rows than fit the memory for sums at once
INSIDE = ("--set", "slice_head=on")
SAMPLED = ("--temp", "0.8", "--seed", "5")


def generate(path, ranks, *more, count=60, prompt=PROMPT):
    return launch.answered(
        ranks, "-m", path, "-p", prompt, "-n", count, "-c", "512", "-t", "1", "--ignore-eos",
        "--speculation", "on", "--hook", "pace=10", "--timeout", "60", *more, timeout=100)


def expected(path, count):
    """The clockwork's text."""
    return text_behind(encoded(path, PROMPT), count)


def plain(path, slices, params, count=60, prompt=PROMPT):
    """The text of a plain loop over the same slices."""
    loop = SlicedLoop(path, (4,), shares_of("", (slices,)))
    found = loop.generate(encoded(path, prompt), count, params, ignore_eos=True)
    loop.close()
    return found


def notes(answer):
    return "\n".join(answer["stats"]["notes"])


@pytest.mark.parametrize(("name", "np", "options"), [
    ("glm4moe", 3, ()),
    ("glm4moe", 2, ("--head-stage",)),
    ("qwen35-mtp", 3, ("--set", "sum_path=messages")),
    full("deepseek2-mtp", 2, ("--head-stage", "--set", "sum_path=messages")),
    full("qwen35moe-mtp", 3, ("--set", "hidden_type=f16", "--sum-type", "f16")),
])
def test_a_sliced_head_that_has_its_rows_is_always_right(name, np, options, tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", name)
    found = generate(path, np, "--temp", "0", "--proposer", "mtp", "--grid", "1x2", *INSIDE,
                     *options)
    assert found["tokens"] == expected(path, 60)
    stats = found["stats"]
    assert stats["accepted_speculative"] == stats["guesses_tested"] >= 15
    first = np - 2
    assert f"the head in model.gguf drafts on rank {first} on" in notes(found)
    assert f"; rank {first + 1} on" in notes(found)


@pytest.mark.parametrize("sampling", [("--temp", "0"), SAMPLED])
def test_a_sliced_head_with_a_small_vocabulary_is_never_in_the_text(sampling, tmp_path):
    path = write_clockwork(tmp_path / "model.gguf", "glm4moe")
    found = generate(path, 3, "--proposer", "mtp", "--grid", "1x2", *INSIDE, "--head-vocabulary",
                     "128", *sampling)
    params = seeded(5) if sampling == SAMPLED else SamplingParams()
    assert found["tokens"] == plain(path, 2, params)
    assert found["stats"]["accepted_speculative"] > 5


@pytest.mark.parametrize(("width", "sampling"), [
    (3, SAMPLED), full(2, ("--temp", "0")), full(3, ("--temp", "0"))])
def test_a_sliced_eagle_head_is_never_in_the_text(width, sampling, tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(
        n_layer=4, n_head=6, n_head_kv=3, n_embd=192, n_ff=192, n_vocab=512, qtype="Q8_0"))
    head = write_eagle(tmp_path / "head.gguf", path, (0, 1, 3), heads=width, ff=96)
    found = generate(path, width + 1, "--grid", f"1x{width}", *INSIDE, "--proposer", "eagle3",
                     "--eagle", str(head), "--policy", "speculative", *sampling, prompt=LONG)
    params = seeded(5) if sampling == SAMPLED else SamplingParams()
    assert found["tokens"] == plain(path, width, params, prompt=LONG)
    assert found["stats"]["guesses_tested"] > 10
    assert f"; rank {width} on" in notes(found)


@pytest.mark.parametrize(("np", "options", "fault"), [
    (4, ("--spares", "1"), "kill@2:decode=9"), (3, (), "kill@1:decode=9"),
    full(3, (), "kill@2:decode=10"), full(4, ("--spares", "1"), "kill@1:decode=11"),
    full(3, (), "error@2:decode=9"), full(3, (), "kill@2:prefill=1"),
])
def test_others_take_the_slices_of_a_member_that_dies_amid_a_chain(np, options, fault, tmp_path):
    """The head decodes most often, so its ninth decode comes first."""
    path = write_clockwork(tmp_path / "model.gguf", "glm4moe")
    found = generate(path, np, "--temp", "0", "--proposer", "mtp", "--grid", "1x2", *INSIDE,
                     *options, "--hook", f"fault={fault}", count=200)
    assert found["tokens"] == expected(path, 200)
    stats = found["stats"]
    assert stats["recovered"] == 1
    assert stats["accepted_speculative"] > 50


def test_a_head_that_cannot_be_sliced_is_refused_or_stays_on_rank_0(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", RandomSpec(n_layer=4, n_vocab=512))
    head = write_eagle(tmp_path / "head.gguf", path, (0, 1, 3), heads=1)
    words = ["-m", path, "-p", "x", "-n", "4", "--eagle", head, "--grid", "1x2", "-t", "1"]
    launch.answered(3, *words)
    launch.refused(3, "generate", *words, *INSIDE, code=4, lines=1,
                   says="head.gguf cannot be cut into 2 slices")
