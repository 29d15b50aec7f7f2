"""The shard cache stays below its bounds, and nothing that is used goes."""

from __future__ import annotations

import mmap
import os
import time

import pytest
from click.testing import CliRunner

from pipeinfer.cli.main import main
from pipeinfer.errors import ModelError
from pipeinfer.models import shard_cache
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from pipeinfer.models.shard_cache import FRESH_SECONDS, kept, make_room, shrink, sum_of, used_now
from tests.kit.random_model import RandomSpec, write_random_model


@pytest.fixture
def model(tmp_path):
    return ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=8)))


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path / "cache"


def age(path, seconds):
    """As if the shard had been used so long ago."""
    for one in (path, sum_of(path)):
        os.utime(one, (time.time() - seconds,) * 2)


def test_plans_of_a_model_pile_up_to_three_times_its_size_and_no_further(model, cache):
    made = []
    for start in range(8):
        for stop in range(start + 1, 9):
            if (start, stop) not in ((0, 8), (0, 7)):
                made.append(extract_shard(model, start, stop, cache_dir=cache))
                age(made[-1], 10 * FRESH_SECONDS - len(made))
    newest = extract_shard(model, 0, 7, cache_dir=cache)
    left = kept(cache)
    assert sum(one.size for one in left) <= 3 * model.nbytes
    assert len(left) < len(made)
    assert newest in [one.path for one in left]
    gone = [path for path in made if not path.exists()]
    assert gone == made[:len(gone)], "those used longest ago go first"
    assert not [path for path in gone if sum_of(path).exists()]


def test_shards_used_lately_stay_whatever_they_take(model, cache):
    made = [extract_shard(model, start, stop, cache_dir=cache)
            for start in range(7) for stop in range(start + 1, 8)]
    assert sum(one.size for one in kept(cache)) > 3 * model.nbytes
    assert all(path.exists() for path in made)


def test_a_bound_for_everything_counts_other_models_too(model, cache, monkeypatch, tmp_path):
    other = ModelFile(write_random_model(tmp_path / "o.gguf", RandomSpec(n_layer=4, seed=5)))
    old = extract_shard(other, 0, 2, cache_dir=cache)
    age(old, 2 * FRESH_SECONDS)
    monkeypatch.setenv("PIPEINFER_CACHE_SIZE", "1 KiB")
    new = extract_shard(model, 0, 2, cache_dir=cache)
    assert [one.path for one in kept(cache)] == [new]


def test_what_a_process_has_mapped_stays(model, cache):
    one, two = (extract_shard(model, start, start + 2, cache_dir=cache) for start in (0, 2))
    with one.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert [gone.path for gone in shrink(kept(cache), 0)] == [two]
    assert [gone.path for gone in shrink(kept(cache), 0)] == [one]


def test_a_shard_that_somebody_begins_to_use_while_room_is_made_stays(model, cache, monkeypatch):
    one, two = (extract_shard(model, start, start + 2, cache_dir=cache) for start in (0, 2))
    age(one, 2 * FRESH_SECONDS)
    age(two, 2 * FRESH_SECONDS)
    files = kept(cache)
    monkeypatch.setattr(shard_cache, "mapped", lambda: used_now(one) or set())
    assert [gone.path for gone in shrink(files, 0, fresh=FRESH_SECONDS)] == [two]
    assert one.exists()


def test_a_shard_that_is_used_again_outlives_newer_ones(model, cache):
    first, second = (extract_shard(model, start, start + 2, cache_dir=cache) for start in (0, 2))
    age(first, 300)
    age(second, 200)
    extract_shard(model, 0, 2, cache_dir=cache)
    assert [one.path for one in kept(cache)] == [second, first]


def test_a_bound_that_is_none_is_one_line(model, cache, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE_SIZE", "plenty")
    with pytest.raises(ModelError, match="PIPEINFER_CACHE_SIZE is 'plenty'"):
        extract_shard(model, 0, 2, cache_dir=cache)


def test_nothing_is_looked_at_where_no_bound_is_passed(model, cache, monkeypatch):
    path = extract_shard(model, 0, 2, cache_dir=cache)
    monkeypatch.setattr(shard_cache, "mapped", lambda: pytest.fail("costs a look at every process"))
    assert make_room(path, model.nbytes) == []


def test_the_command_shows_and_deletes(model, cache, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(cache))
    for start in (0, 2):
        age(extract_shard(model, start, start + 2), 86400 * (start + 1) + 60)

    def said(*options):
        result = CliRunner().invoke(main, ["cache", *options])
        assert not result.exit_code, result.output
        return result.output

    assert "in 2 shards, no bound" in said()
    assert "1 day ago" in said()
    assert "1 of 2 shards deleted" in said("--unused-for", "2")
    assert "0 of 1 shards deleted" in said("--to", "1 GB")
    assert "1 of 1 shards deleted" in said("--remove")
    assert CliRunner().invoke(main, ["cache", "--remove", "--to", "1"]).exit_code == 2
