"""Slices and layers of wide stages move between ranks while a request runs: no token changes."""

from __future__ import annotations

import json
import sys

import pytest

from tests.kit import launch
from tests.kit.sample import full
from tests.mpi.test_jobs import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
#: after so many tokens, who holds what, stage by stage: rank, layers, slices
OVER_THREE = [
    # two members' slices, and ranks of two stages
    (5, [[(3, 0, 5, [0]), (1, 0, 5, [1])], [(2, 5, 12, [0, 1])]]),
    # layers between the stages, and rank 3 holds nothing
    (20, [[(1, 0, 9, [0, 1])], [(2, 9, 12, [0, 1])]]),
    (40, [[(1, 0, 5, [0]), (2, 0, 5, [1])], [(3, 5, 12, [0, 1])]]),  # as it was
]
WITH_RANK_0 = [(5, [[(0, 0, 12, [0, 2]), (1, 0, 12, [1])]]),
               (15, [[(0, 0, 12, [0]), (1, 0, 12, [1, 2])]])]


@pytest.mark.parametrize(("np", "config", "moves"), [
    (4, {"grid": "2,1", "slices": "2", "layers": "5,7"}, OVER_THREE),
    full(4, {"grid": "2,1", "slices": "2", "layers": "5,7", "sum_path": "messages"}, OVER_THREE),
    full(2, {"grid": "1x2", "slices": "3", "head_stage": True}, WITH_RANK_0),
])
def test_no_move_of_slices_or_layers_changes_a_token(tmp_path, np, config, moves):
    task, out = tmp_path / "task.json", tmp_path / "out.json"
    task.write_text(json.dumps({"config": config, "prompt": "def read(path):\n", "count": 60,
                                "moves": moves}))
    done = launch.run(np, [sys.executable, str(PROGRAMS / "moves.py"), str(task), str(out)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["moved"] == found["plain"]
    assert len(found["plain"]) == 60
    assert (found["left"], found["changes"]) == (0, ["a test"] * len(moves))
