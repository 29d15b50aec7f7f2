"""Stages on torch over real ranks: mixed backends, folders, errors."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json

import pytest

for _package in ("torch", "transformers", "safetensors"):
    pytest.importorskip(_package, reason=f"the torch backend needs {_package}")


from pipeinfer.backends.pytorch.backend import TorchBackend
from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.cli.generate import generate
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from tests.kit import launch
from tests.kit.embedded_folder import write_folder
from tests.kit.llama import load
from tests.kit.references import StagedLoop, encoded
from tests.kit.refusals import assert_refused, output
from tests.kit.sample import fewer
from tests.mpi.test_jobs import EMBEDDED, PIPEINFER

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
#: the sample's has 2 layers, not 12: to measure how many rows are exact takes seconds a rank
TARGET = EMBEDDED / fewer("target.gguf", "draft.gguf")
PROMPT = "class Stack:\n    def __init__(self):\n" * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(TARGET, tmp_path_factory.mktemp("hf") / "target")


def test_ranks_on_different_backends(tmp_path, folder):
    """A nodes file cannot tell ranks of one host apart, so each rank is asked for its own."""
    ranks = ('case "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" in 1) export PIPEINFER_BACKEND=torch;; '
             '*) export PIPEINFER_BACKEND=llamacpp;; esac; exec "$@"')
    job = ["sh", "-c", ranks, "sh", *PIPEINFER, "generate", "-p", PROMPT, "-n", "12", "--temp",
           "0", "-c", "512", "-t", "1", "--json", "--device", "cpu", "--head-stage"]
    done = launch.run(2, job)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    stages = answer["stats"]["stages"]
    assert [stages[k]["backend"] for k in ("1", "2")] == ["llamacpp", "torch"]
    assert "different backends" in done.stderr + json.dumps(answer)
    path = EMBEDDED / "target.gguf"
    cut = stages["1"]["layers"][1]
    first = load(extract_shard(ModelFile(path), 0, cut), (0, cut), 12, layer_callbacks=True)
    last = TorchBackend.load(path, layers=(cut, 12), n_ctx=512, n_seq_max=1, n_batch=64,
                             n_threads=1, options=TorchOptions("cpu"))
    loop = StagedLoop(first, last)
    expected = loop.generate(encoded(path, PROMPT), 12)
    loop.close()
    assert answer["tokens"] == expected[: len(answer["tokens"])]
    assert answer["tokens"]


def test_the_command_line_with_a_folder_in_bfloat16(folder):
    """In this process, which has imported torch already."""
    words = ["-m", str(folder), "-p", PROMPT, "-n", "10", "--temp", "0", "-c", "512", "--dtype",
             "bfloat16", "--device", "cpu", "-t", "1", "--json", "--ignore-eos"]
    answer = json.loads(output(generate, words))
    assert answer["stats"]["model"] == "target"
    assert [s["backend"] for s in answer["stats"]["stages"].values()] == ["torch"]
    whole = TorchBackend.load(folder, n_ctx=512, n_seq_max=1, n_batch=64, n_threads=1,
                              options=TorchOptions("cpu", "bfloat16"))
    assert answer["tokens"] == StagedLoop(whole).generate(encoded(folder, PROMPT), 10)


@pytest.mark.parametrize(("args", "code", "says"), [
    (["-m", "{folder}", "--backend", "llamacpp"], 2, "is a folder, which llama.cpp cannot load"),
    (["--backend", "torch", "--distribute"], 2, "--distribute works with llama.cpp only"),
    (["--backend", "torch", "--device", "tpu"], 2, "choose from auto, cpu, cuda"),
    (["--backend", "jax"], 2, "is not one of 'auto', 'llamacpp', 'torch'"),
    (["-m", "{folder}/nowhere"], 3, "no such file"),
])
def test_impossible_options_are_refused_with_the_reason(folder, args, code, says):
    args = [arg.format(folder=folder) for arg in args]
    assert_refused(generate, ["-p", "x", "-n", "1", *args], code, says)


def test_without_torch_its_absence_is_said_and_the_rest_works(tmp_path):
    """What an installation without the extra sees: no torch, no transformers, no safetensors."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'transformers', 'safetensors', 'tokenizers'):\n"
        "    sys.modules[name] = None\n")
    bare = ["sh", "-c", f'export PYTHONPATH="{tmp_path}:$PYTHONPATH"; exec "$@"', "sh", *PIPEINFER,
            "generate", "-p", "def f(", "-n", "3", "--temp", "0", "-c", "256", "--json"]
    done = launch.run(2, [*bare, "--backend", "torch"])
    assert done.returncode == 2, done.stderr
    assert "the torch backend needs torch, transformers, safetensors" in done.stderr
    assert "pip install 'pipeinfer[torch]'" in done.stderr
    assert "Traceback" not in done.stderr
    done = launch.run(2, bare)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) == 3
