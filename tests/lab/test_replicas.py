"""Lookahead parallelism over real ranks: the tokens of plain decoding, and the same steps."""

from __future__ import annotations

import contextlib
import json
import sys

import pytest

from benchmarks.methods import replicas
from benchmarks.methods.heldout import prompts
from pipeinfer.core.sampling import noise_key
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from tests.kit import launch
from tests.kit.plain_loop import PlainLoop
from tests.kit.sample import full

TARGET = EMBEDDED / "target.gguf"


@pytest.mark.parametrize("temp", [full(0.0), 0.8])
def test_tokens_are_plain_ones_and_steps_do_not_depend_on_the_ranks(temp):
    """Over 1, 2 and 4 ranks, of which each has a share of the rows."""
    found = []
    for ranks in (1, 2, 4):
        done = launch.run(ranks, [sys.executable, "-m", "benchmarks.methods.replicas", "-n", "40",
                                  "-w", "7", "-g", "7", "--temp", str(temp)], timeout=100)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (prompt,) = prompts(open_tokenizer(TARGET), 1, 200)
    with contextlib.closing(PlainLoop(TARGET)) as loop:
        wanted = loop.generate(prompt, 40, SamplingParams(temp, key=noise_key(1)))
    assert [one["tokens"][0][:40] for one in found] == [wanted] * 3
    assert len({one["steps"] for one in found}) == 1
    assert found[0]["steps"] < 40  # n-grams were accepted
    rows = [one["rows"] for one in found]
    assert rows[0] > 1.3 * rows[1] > 1.3 * rows[2]


def test_the_papers_card_at_16_bits():
    """13.48 GB at 0.8 of 2039 GB/s are 8.26 ms, beside 0.4; two operations per parameter and row
    at half of 312 TFLOPS are 86.4 us, so 95 rows are as long as the weights."""
    assert replicas.seconds_of(1) == replicas.seconds_of(95) == pytest.approx(8.664e-3, rel=1e-3)
    assert replicas.seconds_of(200) == pytest.approx(0.4e-3 + 200 * 86.41e-6, rel=1e-3)
