"""Stages on torch over real ranks: mixed backends, also in grids, folders, errors."""

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


def on_torch(np, torch_ranks, *arguments):
    """A job in which these ranks are asked for torch, the others for llama.cpp: a nodes file
    cannot tell ranks of one host apart."""
    ranks = (f'case "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" in {torch_ranks}) export '
             'PIPEINFER_BACKEND=torch;; *) export PIPEINFER_BACKEND=llamacpp;; esac; exec "$@"')
    return launch.run(np, ["sh", "-c", ranks, "sh", *PIPEINFER, "generate", "-p", PROMPT, "-n",
                           "12", "--temp", "0", "-c", "512", "-t", "1", "--json", "--device",
                           "cpu", *arguments])


def test_ranks_on_different_backends():
    done = on_torch(2, "1", "--head-stage")
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


def test_the_members_of_a_stage_are_on_one_backend():
    done = on_torch(3, "2", "--policy", "iterative", "--grid", "1x2")
    assert done.returncode == 2, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "stage 1 would have rank 1 on llamacpp and rank 2 on torch" in lines[0]


@pytest.mark.full("ranks on different backends, and grids on torch in tests/mpi/test_matrix.py")
@pytest.mark.parametrize(("few", "many"), [("1", "1|2"), ("2", "3")])
def test_stages_of_a_grid_may_be_on_different_backends(few, many):
    """Slices on torch before a whole stage on llama.cpp, and the other way round."""
    answers = []
    for np, ranks, grid in ((3, few, ("--slices", "2,1", "--layers", "5,7")),
                            (4, many, ("--grid", "2,1", "--layers", "5,7"))):
        done = on_torch(np, ranks, "--policy", "iterative", *grid)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout))
    assert answers[0]["tokens"] == answers[1]["tokens"]
    kinds = [stage["backend"] for stage in answers[1]["stats"]["stages"].values()]
    assert sorted(set(kinds)) == ["llamacpp", "torch"]


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
