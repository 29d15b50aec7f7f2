"""Recurrent models and hybrids: whole in one process, without guesses, and refused otherwise."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError, UnsupportedArchitecture
from pipeinfer.lab.random_architectures import STATEFUL
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.shard import extract_shard
from tests.rig import launch
from tests.rig.plain_loop import PlainLoop
from tests.rig.served import serve

GENERATE = [sys.executable, "-m", "pipeinfer", "generate", "-p", "the rain in", "-n", "40", "-c",
            "256", "-t", "1", "--temp", "0", "--ignore-eos", "--json"]


@pytest.fixture(params=STATEFUL)
def model(request, tmp_path):
    return ModelFile(write_random_model(tmp_path / "m.gguf", tiny(request.param)))


def test_nothing_of_a_state_is_taken_back_or_copied_in_silence(model):
    n = model.n_layers
    backend = LlamaCppBackend.load(
        model.path, layers=(0, n), n_layers_total=n, first=True, last=True, n_ctx=256,
        n_seq_max=2, n_batch=16, n_threads=1, options=LlamaOptions())
    assert backend.exact_limit == 1
    assert not backend.capabilities.stops_inside
    backend.decode(make_rows([(i, i, (0,), True) for i in range(5)]))
    with pytest.raises(BackendError, match="taken back"):
        backend.seq_rm(0, 3, END)
    with pytest.raises(BackendError, match="copied"):
        backend.seq_cp(0, 1, 0, 3)
    backend.seq_rm(0, 0, END)
    assert backend.seq_bounds(0) is None
    backend.close()


def test_its_layers_are_not_split(model, tmp_path):
    with pytest.raises(UnsupportedArchitecture, match=r"keep a state.*-np 1"):
        extract_shard(model, 0, 2, cache_dir=tmp_path)


@pytest.mark.slow
def test_one_process_writes_what_a_plain_loop_writes(model):
    done = launch.run(1, [*GENERATE, "-m", str(model.path)])
    assert done.returncode == 0, done.stderr
    tokenizer, loop = open_tokenizer(model.path), PlainLoop(model.path)
    expected = loop.generate(tokenizer.encode("the rain in"), 40)
    loop.close()
    tokenizer.close()
    assert json.loads(done.stdout)["tokens"] == expected


@pytest.mark.slow
def test_guesses_are_refused_with_the_reason(model):
    done = launch.run(1, [*GENERATE, "-m", str(model.path), "--proposer", "prompt-lookup"])
    assert done.returncode == 2
    assert "keep a state" in done.stderr
    assert "--proposer" in done.stderr


@pytest.mark.slow
def test_several_users_of_a_server_get_the_same_answer_one_after_another(model):
    body = {"prompt": "the rain in", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with serve(1, "-m", str(model.path), "-c", "256", "-t", "1") as server, \
            ThreadPoolExecutor(3) as pool:
        server.wait_until_ready()
        answers = list(pool.map(lambda _: server.post("/v1/completions", body), range(4)))
    assert {status for status, _ in answers} == {200}
    assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1
