"""Shards of llama.cpp whose positions may leave gaps: the same model under M-RoPE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.errors import BackendError, UnsupportedArchitecture
from pipeinfer.models.gaps import GapModel, half_split
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import extract_shard
from tests.kit.gguf_files import altered
from tests.kit.llama import load as load_stage
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.rows import chain

EMBEDDED = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "embedded"])
def model(request, tmp_path_factory):
    if request.param == "embedded":
        return ModelFile(EMBEDDED)
    path = tmp_path_factory.mktemp("gaps") / "m.gguf"
    write_random_model(path, RandomSpec(architecture=request.param))
    return ModelFile(path)


def load(model, start, stop, folder, *, gaps, **options):
    source = extract_shard(GapModel(model) if gaps else model, start, stop, cache_dir=folder)
    return load_stage(source, (start, stop), model.n_layers, kind=LlamaCppBackend, gaps=gaps,
                      keep_order=not gaps, **options)


def run(stages, rows):
    hidden = None
    for stage in stages:
        hidden = stage.decode(rows, hidden)
    return hidden


@pytest.mark.parametrize("cut", [0, 1])
def test_the_rewritten_layers_compute_the_same(model, cut, tmp_path):
    n = model.n_layers
    bounds = [(0, n)] if not cut else [(0, cut), (cut, n)]
    tokens = np.random.default_rng(1).integers(4, model.n_vocab, 24).tolist()
    plain = load(model, 0, n, tmp_path, gaps=False)
    stages = [load(model, a, b, tmp_path, gaps=True) for a, b in bounds]
    expected, found = plain.decode(chain(tokens)), run(stages, chain(tokens))
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.02 * scale
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.9
    for backend in (plain, *stages):
        backend.close()


def test_gaps_are_taken_and_only_distances_matter(model, tmp_path):
    n = model.n_layers
    # keys that are rounded differ by how far they were turned, so that distances alone would not do
    whole = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    stages = [load(model, 0, 1, tmp_path, gaps=True, **whole),
              load(model, 1, n, tmp_path, gaps=True, **whole)]
    tokens = np.random.default_rng(2).integers(4, model.n_vocab, 12).tolist()
    answers = []
    for shift in (0, 100):
        run(stages, chain(tokens[:6], shift))
        answers.append(run(stages, chain(tokens[6:], shift + 40)))
        for stage in stages:
            stage.seq_rm(0, 0, 2**31 - 1)
    near = run(stages, chain(tokens))[6:]
    assert np.abs(answers[0] - answers[1]).max() < 0.01 * np.abs(near).max()
    assert np.abs(answers[0] - near).max() > 0.05 * np.abs(near).max()  # the gap is seen
    plain = load(model, 0, n, tmp_path, gaps=False)
    plain.decode(chain(tokens[:6]))
    with pytest.raises(BackendError):
        plain.decode(chain(tokens[6:], 40))
    plain.close()
    for stage in stages:
        stage.close()


def test_a_join_shows_another_thread_and_what_stands_before_it_is_refused(model, tmp_path):
    n = model.n_layers
    stages = [load(model, 0, 1, tmp_path, gaps=True), load(model, 1, n, tmp_path, gaps=True)]
    tokens = np.random.default_rng(3).integers(4, model.n_vocab, 12).tolist()

    def each(call):
        for stage in stages:
            call(stage)

    run(stages, chain(tokens[:4]))
    each(lambda s: s.seq_cp(0, 1, 0, 4))
    run(stages, chain(tokens[4:8], 4, (1,)))
    alone = run(stages, chain(tokens[8:9], 24))
    each(lambda s: s.seq_rm(0, 24, 2**31 - 1))
    each(lambda s: s.seq_join(1, 0))
    each(lambda s: s.seq_rm(1, 0, 2**31 - 1))
    both = run(stages, chain(tokens[8:9], 24))
    each(lambda s: s.seq_rm(0, 0, 2**31 - 1))
    run(stages, chain(tokens[:8]))
    flat = run(stages, chain(tokens[8:9], 24))
    scale = np.abs(flat).max()
    assert np.abs(both - flat).max() < 0.02 * scale
    assert np.abs(both - alone).max() > 0.02 * scale
    each(lambda s: s.seq_rm(0, 8, 2**31 - 1))
    with pytest.raises(BackendError):
        run(stages, chain(tokens[:1], 5))
    for stage in stages:
        stage.close()


def test_rows_go_back_to_half_split_order():
    assert half_split(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("spec", [
    RandomSpec(rope_freqs=True), tiny("glm4"), tiny("gemma3"), tiny("qwen3moe")],
    ids=lambda spec: spec.architecture)
def test_models_whose_graph_would_change_are_refused(spec, tmp_path):
    write_random_model(tmp_path / "m.gguf", spec)
    with pytest.raises(UnsupportedArchitecture, match="backend torch"):
        GapModel(ModelFile(tmp_path / "m.gguf"))


def test_heads_of_a_qwen3_may_be_wider_than_its_share_of_the_width(tmp_path):
    """As those of Qwen3-0.6B are: 16 of 128 elements in a width of 1,024."""
    rng, spec = np.random.default_rng(4), RandomSpec(architecture="qwen3", n_layer=2)
    shapes = {"attn_q.weight": (128, 64), "attn_k.weight": (64, 64), "attn_v.weight": (64, 64),
              "attn_output.weight": (64, 128)}
    new = {f"blk.{i}.{name}": (rng.standard_normal(shape) / 6).astype(np.float32)
           for i in range(2) for name, shape in shapes.items()}
    new |= {f"blk.{i}.attn_{part}_norm.weight": np.ones(32, np.float32)
            for i in range(2) for part in "qk"}
    path = altered(write_random_model(tmp_path / "m.gguf", spec), tmp_path / "wide.gguf", new, {
        f"qwen3.{key}": 32 for key in ("attention.key_length", "attention.value_length",
                                       "rope.dimension_count")})
    model = ModelFile(path)
    test_the_rewritten_layers_compute_the_same(model, 1, tmp_path)
