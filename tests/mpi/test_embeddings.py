"""/v1/embeddings over real ranks with the official client equals llama.cpp in one process."""

from __future__ import annotations

import numpy as np
import openai
import pytest

from pipeinfer.models.locate import open_tokenizer
from tests.kit.plain_loop import PlainLoop
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full
from tests.kit.served import serve

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
MEAN, CLS, LAST = 1, 2, 3  #: llama.cpp's numbers
LONG = "def f(x): return x\n" * 30  #: more than a chunk
TEXTS = ["Hello.", LONG, "Hello.", LONG + "1"]  # one twice, and one whose beginning is cached


def expected(path, texts):
    tokenizer, loop = open_tokenizer(path), PlainLoop(path, embeds=True, n_batch=1024)
    try:
        found = [loop.embedding([*tokenizer.encode(text), tokenizer.eos_id]) for text in texts]
        return found
    finally:
        loop.close()
        tokenizer.close()


@pytest.mark.parametrize(("ranks", "pooling"), [
    full(3, LAST), (1, LAST), full(4, LAST), (3, MEAN), full(1, MEAN), full(1, CLS), full(4, CLS)])
def test_embeddings_are_those_of_llama_cpp(ranks, pooling, tmp_path):
    spec = RandomSpec(architecture="qwen3", pooling=pooling)
    path = write_random_model(tmp_path / "m.gguf", spec)
    with serve(ranks, "-m", str(path), "-c", "2048", "--parallel", "2") as served:
        served.wait_until_ready()
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60,
                               max_retries=0)
        with client:
            name = client.models.list().data[0]
            assert name.model_extra["capabilities"]["embeddings"] is True
            answer = client.embeddings.create(model=name.id, input=TEXTS)  # base64 by itself
            plain = client.embeddings.create(model=name.id, input=TEXTS[1],
                                             encoding_format="float")
            # the model still writes text
            assert client.completions.create(model=name.id, prompt="x", max_tokens=3).usage
        rows = expected(path, [*TEXTS, TEXTS[1]])
        assert pooling == CLS or np.abs(rows[0] - rows[1]).max() > 0.01
        for found, row in zip([*answer.data, *plain.data], rows, strict=True):
            assert np.abs(np.array(found.embedding) - row).max() < 1e-4
        served.leave()


def test_stages_of_several_members_say_that_they_compute_none(tmp_path):
    path = write_random_model(tmp_path / "m.gguf", RandomSpec(architecture="qwen3", pooling=3))
    with serve(3, "-m", str(path), "-c", "256", "--grid", "1x2") as served:
        served.wait_until_ready()
        status, answer = served.post("/v1/embeddings", {"input": "x"})
        assert (status, "--grid" in answer["error"]["message"]) == (400, True)
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        served.leave()
