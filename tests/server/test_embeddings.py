"""/v1/embeddings with a scripted engine."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest

from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import no_embeddings, pooling_of
from pipeinfer.server.frames import Ended, Refused, Submit, Token
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.server_peer import MODEL, front
from tests.server.test_http import error

pytestmark = pytest.mark.slow
FACTS = {"n_ctx": 64, "no_embeddings": "", "n_embd": 2, "pooling": "mean"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    path = write_random_model(tmp_path_factory.mktemp("model") / "m.gguf",
                              RandomSpec(architecture="qwen3", n_layer=1, pooling=3))
    with front(path, facts=FACTS, parallel=2, queue=1) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.peer.reset()
    shared.peer.answer = lambda f: [
        Token(f.id, 0, False, None, ((0, 3.0 * f.prompt[0]), (1, 4.0 * f.prompt[0]))),
        Ended(f.id, "length", {})]
    return shared


def embed(server, given, **more):
    return server.post("/v1/embeddings", {"input": given, **more})


def test_a_text_is_a_prompt_with_the_models_end(server):
    answer = embed(server, "Hi").json()
    submitted = server.peer.wait_for(Submit)
    text = server.tokenizer.encode("Hi")
    assert list(submitted.prompt) == [*text, server.tokenizer.eos_id]
    assert (submitted.params.embed, submitted.max_tokens, submitted.ignore_eos) == (True, 1, True)
    assert answer["data"] == [{"object": "embedding", "index": 0,
                               "embedding": pytest.approx([0.6, 0.8])}]
    assert answer["usage"] == {"prompt_tokens": len(text) + 1, "total_tokens": len(text) + 1}


@pytest.mark.parametrize(("given", "prompts"), [
    ([7, 8], [[7, 8]]), ([[7], [8, 9]], [[7], [8, 9]]), (["a"] * 7, None)])
def test_lists_of_texts_and_tokens(server, given, prompts):
    """More than may run at a time, too."""
    answer = embed(server, given).json()
    sent = [list(frame.prompt) for frame in server.peer.seen if isinstance(frame, Submit)]
    assert len(sent) == len(answer["data"])
    assert prompts is None or sent == prompts
    assert [one["index"] for one in answer["data"]] == list(range(len(sent)))


def test_both_encodings(server):
    plain = embed(server, "Hi", encoding_format="float").json()["data"][0]["embedding"]
    packed = embed(server, "Hi", encoding_format="base64").json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(plain)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        found = client.embeddings.create(model="m", input="Hi", dimensions=2)
    assert found.data[0].embedding == pytest.approx(plain)


@pytest.mark.parametrize(("body", "param"), [
    ({"input": "x", "dimensions": 1}, "dimensions"), ({"input": []}, "input"), ({}, "input"),
    ({"input": [[]]}, "input"), ({"input": [10**6]}, "prompt"), ({"input": "ab " * 99}, "input"),
    ({"input": "x", "encoding_format": "hex"}, "encoding_format"), ({"input": [1, "x"]}, "input")])
def test_a_bad_request_is_a_400_that_names_the_field(server, body, param):
    assert error(server.post("/v1/embeddings", body), 400)["param"].startswith(param)


def test_a_refusal_of_the_engine_is_the_requests_error(server):
    server.peer.answer = lambda f: [Refused(f.id, "request", "not here")]
    assert error(embed(server, "x"), 400)["message"] == "not here"


def test_a_model_that_is_not_made_for_it_says_why():
    why = no_embeddings(ModelFile(MODEL))
    with front(MODEL, facts={"n_ctx": 64, "no_embeddings": why, "n_embd": 2}) as server:
        found = error(embed(server, "x"), 400)
        assert "names no pooling" in found["message"]
        assert found["code"] == "not_supported"
        assert not server.get("/v1/models").json()["data"][0]["capabilities"]["embeddings"]


@pytest.mark.parametrize(("number", "pooling", "says"), [
    (1, "mean", ""), (2, "cls", ""), (3, "last", ""), (4, "last", "number 4")])
def test_the_pooling_decides(tmp_path, number, pooling, says):
    model = ModelFile(write_random_model(tmp_path / "m.gguf",
                                         RandomSpec(n_layer=1, pooling=number)))
    why = no_embeddings(model)
    assert (says in why) if says else why == ""
    assert pooling_of(model) == pooling


def test_the_engine_gets_the_models_pooling(server):
    embed(server, "Hi")
    assert server.peer.wait_for(Submit).params.pooling == "mean"
