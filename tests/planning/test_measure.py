"""What a rank measures about itself."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest

from pipeinfer import host
from pipeinfer.config import JobConfig, ModelConfig
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard_cache import recall, remember
from pipeinfer.planning import measure
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.toy import ToyBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return ModelFile(write_random_model(path, RandomSpec(n_layer=3)))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPEINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_WINDOW", 0.01)
    return tmp_path / "cache"


def test_a_layer_is_timed_and_remembered(model, cache, monkeypatch):
    found = measure.figures_here(ModelConfig(), model, 1)
    assert set(found.seconds) == set(measure.ROWS)
    assert found.layer_bytes == model.layer_bytes[1]
    assert found.bandwidth > 1e6
    assert found.per_byte == pytest.approx(found.seconds[1] / model.layer_bytes[1])
    assert [path.name for path in cache.iterdir()] == [measure._name(ModelConfig(), model, 1)]

    def never(*args):
        raise AssertionError("a remembered figure was measured again")

    monkeypatch.setattr(measure, "_measure", never)
    assert measure.figures_here(ModelConfig(), model, 1) == found
    with pytest.raises(AssertionError):
        measure.figures_here(ModelConfig(), model, 1, again=True)
    with pytest.raises(AssertionError):
        measure.figures_here(ModelConfig(), model, 2)


def test_what_other_programs_disturbed_is_measured_again_later(cache, model, monkeypatch):
    now, waited = [1e9], [0.0]
    figures = [measure.Figures(speed, 1000, {1: 1.0, 2: 1.5, 4: 2.0}) for speed in (1e9, 9e9, 8e9)]
    measured = iter(figures)

    class clock:
        time = staticmethod(lambda: now[0])

    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "_measure", lambda *_: next(measured))
    monkeypatch.setattr(measure.exact_width, "watch", lambda: lambda: waited[0])
    waited[0] = 0.3
    assert measure.figures_here(ModelConfig(), model, 3) == figures[0]
    now[0], waited[0] = 1e9 + 500, 0.0
    assert measure.figures_here(ModelConfig(), model, 3) == figures[0]
    now[0] = 1e9 + 700
    assert measure.figures_here(ModelConfig(), model, 3) == figures[1]
    now[0] = 2e9
    assert measure.figures_here(ModelConfig(), model, 3) == figures[1], "quiet figures stay"


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"bandwidth": 1, "layer_bytes": 1, "seconds": {"1": 1}}',
    '{"bandwidth": 1, "layer_bytes": 1, "seconds": {"1": 0, "2": 1, "4": 1}}',
    '{"bandwidth": 1e999, "layer_bytes": 1, "seconds": {"1": 1, "2": 1, "4": 1}}',
    '{"bandwidth": 1, "layer_bytes": 1, "seconds": {"1": 1, "2": 1, "4": 1}, "head": -1}',
])
def test_a_damaged_memory_is_measured_anew(model, cache, text):
    cache.mkdir(exist_ok=True, mode=0o700)
    path = cache / measure._name(ModelConfig(), model, 1)
    path.write_text(text)
    found = measure.figures_here(ModelConfig(), model, 1)
    assert measure.from_json(recall(path)) == found
    with contextlib.suppress(ValueError):  # the same in a note that is intact
        remember(path, json.loads(text))
        found = measure.figures_here(ModelConfig(), model, 1)
        assert measure.from_json(recall(path)) == found


def test_a_large_output_matrix_is_timed_and_a_small_one_is_not(tmp_path, monkeypatch):
    for vocabulary, large in ((2000, True), (300, False)):
        path = tmp_path / f"{vocabulary}.gguf"
        spec = RandomSpec(n_layer=3, n_embd=32, n_ff=1024, n_vocab=vocabulary)
        found = measure.figures_here(ModelConfig(), ModelFile(write_random_model(path, spec)), 1)
        assert found.head >= 0
        assert (found.head > 0) <= large
    monkeypatch.setattr(measure, "_HEAD_SHARE", 0.0)
    model = ModelFile(tmp_path / "2000.gguf")
    assert measure.figures_here(ModelConfig(), model, 1, again=True).head == 0.0


def test_a_quota_and_a_gpu_have_figures_of_their_own(model, monkeypatch):
    name = measure._name(ModelConfig(), model, 1)
    assert measure._name(ModelConfig(gpu_layers=1), model, 1) != name
    assert measure._name(ModelConfig(ctx=1), model, 1) == name
    monkeypatch.setattr(host, "quota", lambda: 0.25)
    assert measure._name(ModelConfig(), model, 1) != name


def test_what_goes_wrong_is_an_answer(model, tmp_path):
    path = model.paths[0]
    answer = measure.try_figures(JobConfig(), path, "other", 1)
    assert "not the same file" in answer.error
    answer = measure.try_figures(JobConfig(), tmp_path / "absent.gguf", "x", 1)
    assert "absent.gguf" in answer.error
    answer = measure.try_figures(JobConfig(), path, model.fingerprint, 1)
    assert measure.from_json(answer.figures).layer_bytes == model.layer_bytes[1]


@pytest.mark.parametrize("n_layer", [1, 3])
def test_a_host_without_the_model_measures_a_hollow_layer(tmp_path, cache, n_layer):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=n_layer)))
    hollow = json.loads(json.dumps(msgspec.to_builtins(measure.Hollow.of(model))))
    absent = tmp_path / "absent.gguf"
    answer = measure.try_figures(JobConfig(), absent, model.fingerprint, 1, hollow)
    found = measure.from_json(answer.figures)
    assert found.layer_bytes == model.layer_bytes[n_layer // 2]
    # remembered under the same name as the real model's, and no file of zeros stays
    assert [path.name for path in cache.iterdir()] == [measure._name(ModelConfig(), model, 1)]
    answer = measure.try_figures(JobConfig(), model.paths[0], "other", 1, hollow)
    assert "not the same file" in answer.error


@pytest.mark.parametrize("start", [0, 1])
def test_timing_leaves_the_cache_empty(start):
    backend = ToyBackend.load(None, start, start + 1, n_ctx=4, n_seq_max=1, n_batch=4, log=True)
    seen = measure.layer_seconds(backend, window=0.005)
    assert set(seen) == set(measure.ROWS)
    assert {len(entry[1]) for entry in backend.log if entry[0] == "decode"} == set(measure.ROWS)
    assert measure.layer_seconds(backend, window=0.005).keys() == seen.keys()


def test_row_cost_is_relative_to_one_row():
    figures = measure.Figures(1e9, 1000, {1: 1.0, 2: 1.5, 4: 2.5})
    assert figures.row_cost == pytest.approx(0.5)
    assert measure.from_json(json.loads(json.dumps(figures.to_json()))) == figures
    with pytest.raises(ValueError, match="no figures"):
        measure.from_json(None)


def test_what_a_gpu_needs_for_any_decode_is_no_layers_time():
    """As on an H200: launching and waiting take nearly as long as a layer."""
    one, four = {1: 180e-6, 2: 190e-6, 4: 200e-6}, {1: 480e-6, 2: 520e-6, 4: 560e-6}
    alone, overhead = measure.without_launch(one, four, 4)
    assert alone == pytest.approx({1: 100e-6, 2: 110e-6, 4: 120e-6})
    assert overhead == pytest.approx(80e-6)
    alone, overhead = measure.without_launch(one, one, 4)
    assert alone[1] == pytest.approx(one[1] / 16), "noise alone: a quarter of a fourth"
    alone, overhead = measure.without_launch(one, {rows: 9 * one[rows] for rows in one}, 4)
    assert alone[1] == pytest.approx(9 * one[1] / 4), "never more than a layer's share"
    assert overhead == 0


def test_layers_on_a_gpu_are_measured_by_several(tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", RandomSpec(n_layer=8)))
    assert measure.repeats(model, (4, 5)) == 3
    assert measure.repeats(model, (0, 2)) == 3
    found = measure.figures_here(ModelConfig(gpu_layers=99), model, 1)
    assert found.layer_bytes == model.layer_bytes[4]
    assert set(found.seconds) == set(measure.ROWS)
    assert measure.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert measure.figures_here(ModelConfig(), model, 1).overhead == 0
