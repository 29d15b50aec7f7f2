"""What --grid auto has chosen holds for the next start, as long as it fits."""

from __future__ import annotations

import pytest
from msgspec import structs

from pipeinfer.cluster import grid_choice
from pipeinfer.cluster.grid_choice import GridPlanner, keep_grid, recall_grid
from pipeinfer.config import JobConfig
from pipeinfer.core.policy import Policy
from pipeinfer.errors import PlanError
from pipeinfer.host import Place
from pipeinfer.models.locate import EMBEDDED, open_model
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.partition import Member
from pipeinfer.planning.planner import load_of
from pipeinfer.planning.wide import cut_layers


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A start over three hosts with links that cost nothing; `start(speeds)` gives its plan and its
    notes."""
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(grid_choice, "_links", lambda config, place: [
        {"source": k, "dest": k + 1, "latency": 1e-7, "bandwidth": 1e11} for k in range(3)])
    model = open_model(EMBEDDED / "target.gguf")
    load = load_of(model, 256, 64)

    def start(speeds, hosts="abc", memory=1e12, group="", **options):
        infos = [RankInfo(rank, name, settings=NodeSettings(group=group and f"{group}{rank}"))
                 for rank, name in enumerate("h" + hosts)]
        members = {rank: Member(f"rank {rank}", 1e-8 / speed, memory=memory)
                   for rank, speed in enumerate(speeds, 1)}
        notes = []
        grids = GridPlanner(JobConfig.of(grid="auto", **options), model, load, members, {}, infos,
                            Policy.ITERATIVE)
        return grids.auto(Place(0, 4, object(), 1, 0, 1), notes), notes

    start.model = model
    return start


def test_slices_stay_the_same_while_speeds_change(cluster):
    first, notes = cluster([1.0, 1.0, 1.0])
    assert "remembered for the next start" in notes[0]
    again, notes = cluster([1.0, 1.0, 3.0])
    assert cut_layers(again.held) == cut_layers(first.held)
    assert notes == [note for note in notes if "so that answers stay the same; --remeasure chooses "
                     "again" in note]
    anew, notes = cluster([1.0, 1.0, 3.0], remeasure=True)
    assert cut_layers(anew.held) != cut_layers(first.held)
    assert cluster([1.0, 1.0, 1.0])[0].held == anew.held
    other, notes = cluster([1.0, 1.0, 1.0], hosts="abd")
    assert "as chosen" not in notes[0]
    assert cut_layers(other.held) == cut_layers(first.held)


def test_a_choice_that_does_not_fit_any_more_is_made_anew(cluster):
    first, _ = cluster([1.0, 1.0, 1.0])
    assert max(map(len, first.teams.ranks)) > 1
    plain, notes = cluster([1.0, 1.0, 1.0], group="rack")
    assert plain is None
    assert "different groups of the nodes file), so one is chosen anew" in notes[0]
    assert cluster([1.0, 1.0, 1.0])[0] is None  # one rank to a stage is a choice, too
    keep_grid(cluster.model, [RankInfo(0, "h"), *(RankInfo(k, n) for k, n in enumerate("abc", 1))],
              [1, 2, 3], first)
    _, notes = cluster([1.0, 1.0, 1.0], memory=1e3)
    assert "does not fit any more (" in notes[0]


def test_what_is_written_is_looked_at_before_it_is_believed(cluster, tmp_path):
    first, _ = cluster([1.0, 1.0, 1.0])
    hosts = [RankInfo(rank, name) for rank, name in enumerate("habc")]
    with_one_slice_less = [structs.replace(one, cut=one.cut[:-1], slices=(0,))
                           for one in first.held]
    keep_grid(cluster.model, hosts, [1, 2, 3], type("Plan", (), {"held": with_one_slice_less}))
    with pytest.raises(PlanError, match=r"no slice|not all of the model"):
        recall_grid(cluster.model, hosts, [1, 2, 3])
    file, = tmp_path.glob("grid-*.json")
    file.write_text(file.read_text().replace("h0", "h1"))  # its checksum does not fit
    assert recall_grid(cluster.model, hosts, [1, 2, 3]) is None


def test_what_tokens_depend_on_is_which_layers_are_cut_how(cluster):
    first, _ = cluster([1.0, 1.0, 1.0])
    cut = first.held[0].cut
    split = [structs.replace(one, start=a, stop=b) for a, b in ((0, 5), (5, 12))
             for one in first.held]
    assert cut_layers(split) == [(0, 12, cut)]  # how many stages there are changes no bit
    other = [structs.replace(one, cut=cut[::-1]) if one.start else one for one in split]
    assert cut_layers(other) == [(0, 5, cut), (5, 12, cut[::-1])]
