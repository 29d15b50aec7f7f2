"""Wide stages on torch in real MPI jobs: the same tokens whatever ranks hold the slices."""

# ruff: noqa: E402  (skipped where a package is missing)
from __future__ import annotations

import json

import pytest

for _package in ("torch", "transformers", "safetensors"):
    pytest.importorskip(_package, reason=f"the torch backend needs {_package}")

from tests.kit import launch
from tests.mpi.test_jobs import PIPEINFER
from tests.mpi.test_torch import PROMPT

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def on_torch(np, torch_ranks, *arguments):
    """A job in which these ranks are asked for torch, the others for llama.cpp."""
    ranks = (f'case "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" in {torch_ranks}) export '
             'PIPEINFER_BACKEND=torch;; *) export PIPEINFER_BACKEND=llamacpp;; esac; exec "$@"')
    return launch.run(np, ["sh", "-c", ranks, "sh", *PIPEINFER, "generate", "-p", PROMPT, "-n",
                           "12", "--temp", "0", "-c", "512", "-t", "1", "--json", "--device",
                           "cpu", "--policy", "iterative", *arguments])


def test_the_members_of_a_stage_are_on_one_backend():
    done = on_torch(3, "2", "--grid", "1x2")
    assert done.returncode == 2, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "stage 1 would have rank 1 on llamacpp and rank 2 on torch" in lines[0]


@pytest.mark.full("ranks on different backends in tests/mpi/test_torch.py, grids on torch beside "
                  "it")
@pytest.mark.parametrize(("few", "many"), [("1", "1|2"), ("2", "3")])
def test_stages_of_a_grid_may_be_on_different_backends(few, many):
    """Slices on torch before a whole stage on llama.cpp, and the other way round."""
    answers = []
    for np, ranks, grid in ((3, few, ("--slices", "2,1", "--layers", "5,7")),
                            (4, many, ("--grid", "2,1", "--layers", "5,7"))):
        done = on_torch(np, ranks, *grid)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout))
    assert answers[0]["tokens"] == answers[1]["tokens"]
    kinds = [stage["backend"] for stage in answers[1]["stats"]["stages"].values()]
    assert sorted(set(kinds)) == ["llamacpp", "torch"]
