"""The torch backend against transformers' own forward pass: families, stages, files, errors."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.pytorch.options import TorchOptions
from pipeinfer.core.types import ALL_SEQS, END, make_rows
from pipeinfer.errors import (
    BackendError,
    ModelError,
    PlanError,
    UnsupportedArchitecture,
    UsageError,
)
from tests.kit.rows import chain
from tests.kit.sample import full
from tests.kit.tiny_torch import (
    FAMILIES,
    LAYERS,
    VOCAB,
    forward,
    load,
    reference,
    save,
    tokens_of,
    torch,
)

#: Both sides compute in float32 and differ in the order of their sums: some 1e-7 per operation,
#: over four layers, at logits of size 1. An error in a mask, an angle or a norm is 1e-2 and more.
TOLERANCE = 1e-5
CUTS = [(0, 4), (0, 2, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)]


def through(stages, rows):
    hidden = None
    for stage in stages:
        hidden = stage.decode(rows, hidden)
    return hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_every_position_has_the_logits_of_transformers(models, family):
    model, path = models(family)
    tokens = tokens_of(72)
    expected = forward(model, tokens)
    assert expected.std() > 0.3
    outputs = []
    for cuts in CUTS:
        stages = [load(path, layers) for layers in pairwise(cuts)]
        at_once = [through(stages, chain(tokens[a:b], a)) for a, b in ((0, 64), (64, 72))]
        outputs.append(np.concatenate(at_once))
        stages[0].seq_rm(0, 0, END)
        assert len(stages[0].cells()) == 0
    singles = load(path)
    outputs.append(np.concatenate([singles.decode(chain([t], i)) for i, t in enumerate(tokens)]))
    for logits in outputs:
        assert np.abs(logits - expected).max() < TOLERANCE
    for logits in outputs[1:-1]:
        assert np.array_equal(logits, outputs[0])  # however the layers are dealt out


@pytest.mark.parametrize(("family", "most"), [
    ("llama", 48), ("mistral-window", 16), ("gemma2", 48), full("mistral-window", 48),
    full("qwen3", 16)])
def test_rows_up_to_the_exact_width_are_single_rows(models, family, most):
    _, path = models(family)
    backend = load(path, options=TorchOptions(device="cpu", rows=most))
    width = exact_width(backend, most)
    assert width >= 4, "padding to a fixed number of rows should make widths exact"
    tokens = tokens_of(150)
    singles = np.concatenate([backend.decode(chain([t], i)) for i, t in enumerate(tokens)])
    backend.seq_rm(0, 0, END)
    rng, at = np.random.default_rng(2), 0
    while at < len(tokens):  # over the places where lists of cells grow by a block
        count = min(int(rng.integers(1, width + 1)), len(tokens) - at)
        noise = count < width
        rows = [(t, at + i, (0,), True) for i, t in enumerate(tokens[at : at + count])]
        if noise:  # a row of another sequence in between, whose cell then dies
            rows.insert(int(rng.integers(0, count + 1)), (7, 0, (5,), True))
        logits = backend.decode(make_rows(rows))
        own = [i for i, row in enumerate(rows) if row[2] == (0,)]
        assert np.array_equal(logits[own], singles[at : at + count]), at
        backend.seq_rm(5, 0, END)
        at += count


def test_bits_do_not_depend_on_where_cells_lie(models):
    """Cells scattered over the cache, in any order: the same bits as side by side."""
    _, path = models("llama")
    tokens, rng = tokens_of(130, 4), np.random.default_rng(4)
    tidy, mixed = load(path), load(path)
    for i, token in enumerate(tokens):
        if rng.random() < 0.4:
            mixed.decode(chain([3] * int(rng.integers(1, 5)), 0, (1 + i % 6,)))
        if rng.random() < 0.3:
            mixed.seq_rm(int(rng.integers(1, 7)), 0, END)
        assert np.array_equal(tidy.decode(chain([token], i)), mixed.decode(chain([token], i)))
    for backend in (tidy, mixed):
        backend.seq_rm(ALL_SEQS, 130, END)
    more = chain(tokens_of(40, 5), 130)
    assert np.array_equal(tidy.decode(more), mixed.decode(more))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_is_transformers_in_bfloat16(models, family, tmp_path):
    """Eight bits of mantissa: 1/256 per rounding, some dozen roundings on the way."""
    model = reference(family).to(torch.bfloat16)
    path = save(model, tmp_path / "bf16")
    tokens = tokens_of(40)
    expected = forward(model, tokens)
    exact = forward(reference(family), tokens)
    stages = [load(path, layers, options=TorchOptions("cpu", "bfloat16"))
              for layers in ((0, 2), (2, 4))]
    logits = through(stages, chain(tokens))
    assert np.abs(logits - expected).max() < 0.15
    assert np.abs(logits - exact).mean() < 2 * np.abs(expected - exact).mean()
    assert stages[0].info.weight_bytes < load(path, (0, 2)).info.weight_bytes * 0.6
    whole = load(path, options=TorchOptions("cpu", "bfloat16"))
    assert np.array_equal(whole.decode(chain(tokens)), logits)


def test_only_the_own_layers_are_read(models, monkeypatch):
    from pipeinfer.backends.pytorch import weights as torch_weights

    _, path = models("llama")
    read = []
    plain = torch_weights.FolderTensors.read
    monkeypatch.setattr(torch_weights.FolderTensors, "read",
                        lambda self, name: read.append(name) or plain(self, name))
    middle = load(path, (1, 3))
    assert read
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in read)
    first, last = load(path, (0, 1)), load(path, (3, 4))
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= set(read)
    whole = load(path)
    assert sum(b.info.weight_bytes for b in (first, middle, last)) == whole.info.weight_bytes
    assert sum(b.info.cache_bytes for b in (first, middle, last)) == whole.info.cache_bytes
    assert whole.info.cache_bytes == 2 * LAYERS * 512 * 2 * 16 * 4


def test_weights_in_several_files(models, tmp_path):
    model, path = models("llama")
    parts = save(model, tmp_path / "parts", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    tokens = tokens_of(20)
    assert np.array_equal(load(parts).decode(chain(tokens)), load(path).decode(chain(tokens)))


def test_embedding_rows_on_the_first_shard(models):
    model, path = models("llama")
    tokens = tokens_of(12)
    vectors = model.model.embed_tokens.weight.detach().numpy()
    expected = load(path).decode(chain(tokens))
    backend = load(path)
    assert np.array_equal(backend.decode(chain([0] * 12), vectors[tokens]), expected)
    backend.seq_rm(0, 0, END)
    first = backend.add_embeddings(vectors[[9, 8]])
    assert first == VOCAB
    assert backend.add_embeddings(vectors[[7]]) == VOCAB + 2
    mixed = [t if i % 3 else VOCAB + i // 3 % 3 for i, t in enumerate(tokens)]
    plain = [t if i % 3 else (9, 8, 7)[i // 3 % 3] for i, t in enumerate(tokens)]
    again = load(path).decode(chain(plain))
    assert np.array_equal(backend.decode(chain(mixed)), again)
    with pytest.raises(BackendError, match="vocabulary"):
        backend.decode(chain([VOCAB + 3], 12))
    with pytest.raises(BackendError, match="has no embedding"):
        load(path, (1, 2)).add_embeddings(vectors[:1])


@pytest.mark.parametrize("layers", [(0, 4), (0, 2), (1, 4)])
def test_a_decode_stopped_at_any_layer_leaves_no_cell(models, layers):
    _, path = models("llama")
    backend = load(path, layers)
    rng = np.random.default_rng(0)

    def hidden(n):
        return None if layers[0] == 0 else rng.standard_normal((n, 64)).astype(np.float32)

    backend.decode(chain([1, 2, 3]), hidden(3))
    looks = layers[1] - layers[0] - (layers[1] < LAYERS)
    for allowed in range(looks + 1):
        asked = []
        result = backend.decode(chain(range(20), 3), hidden(20),
                                lambda a=allowed, seen=asked: seen.append(1) or len(seen) > a)
        assert (result is None) == (allowed < looks)
        assert len(asked) == min(allowed + 1, looks)
        if result is None:
            assert backend.cells() == [(i, frozenset([0])) for i in range(3)]


def test_what_torch_raises_becomes_a_backend_error_and_leaves_no_cell(models, monkeypatch):
    _, path = models("llama")
    backend = load(path)
    backend.decode(chain([1, 2, 3]))

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(backend._shard.norm, "forward", no_memory)
    with pytest.raises(BackendError, match=r"out of memory\. Tried") as caught:
        backend.decode(chain([4, 5], 3))
    assert "\n" not in str(caught.value)
    assert len(backend.cells()) == 3


# --- files that cannot be used --------------------------------------------------------------


def changed(path, folder, **values):
    """The model's folder with other values in its config.json; None removes a key."""
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text()) | values
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize(("values", "error", "says"), [
    ({"model_type": "mamba"}, UnsupportedArchitecture, "'mamba' are not supported"),
    ({"model_type": None}, ModelError, "has no model_type"),
    ({"hidden_size": -1}, ModelError, "hidden_size in config.json is -1"),
    ({"intermediate_size": 100}, ModelError, r"gate_proj\.weight has shape \[96, 64\]"),
    ({"num_hidden_layers": 5}, ModelError, "says 5 layers and the files have 4"),
    ({"hidden_act": 7}, ModelError, "config.json cannot be used"),
    ({"quantization_config": {"bits": 4}}, UnsupportedArchitecture, "is quantised"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     UnsupportedArchitecture, "'dynamic' depend on the length of the text so far"),
])
def test_folders_that_cannot_be_used_are_refused_by_name(models, tmp_path, values, error, says):
    folder = changed(models("llama")[1], tmp_path / "changed", **values)
    with pytest.raises(error, match=says) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_refused(models, tmp_path):
    path = models("llama")[1]
    with pytest.raises(ModelError, match="is not a Hugging Face model folder"):
        load(tmp_path)
    folder = changed(path, tmp_path / "damaged")
    whole = (path / "model.safetensors").read_bytes()
    weights = folder / "model.safetensors"
    weights.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load(folder)
    for content, says in ((b"", "truncated"), (whole[:100], "truncated"),
                          (whole[:-1], "truncated"), (b"\xff" * 64, "not a safetensors file"),
                          (whole[:8] + b"x" * (len(whole) - 8), "header is damaged")):
        weights.write_bytes(content)
        with pytest.raises(ModelError, match=says):
            load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    with pytest.raises(ModelError, match="outside its folder"):
        load(folder)


def test_impossible_layers_and_sizes(models):
    path = models("llama")[1]
    for layers in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(PlanError, match="are not a range within the 4 layers"):
            load(path, layers)
    with pytest.raises(BackendError, match="at least 1"):
        load(path, n_ctx=0)
    with pytest.raises(BackendError, match="cannot load"):
        load(path, n_ctx=2**50)


def test_positions_and_views_are_free(models):
    path = models("llama")[1]
    free = load(path).capabilities
    assert free.free_positions
    assert free.separate_views
    assert free.embedding_rows
    assert free.stops_inside


def test_options_become_what_the_machine_has():
    assert TorchOptions().resolved(False) == TorchOptions("cpu", "float32", 3)
    assert TorchOptions().resolved(True) == TorchOptions("cuda", "bfloat16", 16)
    assert TorchOptions("cuda:1", "float32", tile=0).resolved(True).tile == 0
    assert TorchOptions("cpu").resolved(True) == TorchOptions("cpu", "float32", 3)
    with pytest.raises(UsageError, match="torch finds no CUDA device here"):
        TorchOptions("cuda:9").resolved(False)
    with pytest.raises(UsageError, match="choose from auto, cpu, cuda"):
        TorchOptions("gpu").resolved(True)
