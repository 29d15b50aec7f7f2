"""Every architecture on the list, split at every layer, gives the unsplit model's bits.

This is what `models.shard.SPLITTABLE` rests on: an entry without a case here must not be there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.llamacpp import eval_callback
from pipeinfer.errors import PlanError
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import SPLITTABLE, extract_shard, stage_layers
from tests.kit.cut_check import cuts_of, differing
from tests.kit.gguf_files import altered
from tests.kit.random_architectures import ALONE, RECIPES, STATEFUL
from tests.kit.random_model import RandomSpec, tiny, write_random_model
from tests.kit.rows import chain
from tests.kit.sample import fewer, full

CASES = {
    "llama-F32": RandomSpec(qtype="F32"),
    "llama-F16": RandomSpec(qtype="F16"),
    "llama-Q8_0": RandomSpec(qtype="Q8_0"),
    "llama-Q4_K_M": RandomSpec(qtype="Q4_K_M", n_embd=256, n_ff=256),
    "llama-tied": RandomSpec(qtype="Q8_0", tied=True),
    "llama-rope-factors": RandomSpec(qtype="F32", rope_freqs=True),
    "llama-experts": RandomSpec(qtype="F32", n_expert=4, n_layer=3),
    "llama-head-64": RandomSpec(qtype="Q8_0", n_embd=128, n_head=2, n_head_kv=1, n_layer=3),
    "qwen2": RandomSpec(architecture="qwen2", qtype="F32"),
    "qwen2-Q8_0-tied": RandomSpec(architecture="qwen2", qtype="Q8_0", tied=True),
    "qwen3": RandomSpec(architecture="qwen3", qtype="F32"),
    "qwen3-Q8_0-tied": RandomSpec(architecture="qwen3", qtype="Q8_0", tied=True),
    **{name: tiny(name) for name in RECIPES},
    **{name: tiny(name) for name in STATEFUL | ALONE},
    **{f"{name}-Q8_0": tiny(name, qtype="Q8_0") for name in RECIPES | STATEFUL | ALONE},
}
_QUANTISED = ("deepseek2", "gemma3", "glm4", "gpt-oss", "qwen3moe", "qwen35moe")  #: in the sample


def _alike():
    """Architectures that are declared as another, which the sample splits."""
    recipes = RECIPES | STATEFUL | ALONE
    first = {declared(recipe.architecture).names: recipe.architecture
             for recipe in reversed(recipes.values())}
    return {name for name, recipe in recipes.items()
            if name == recipe.architecture != first[declared(name).names]}


_LONG = (*(f"{name}-Q8_0" for name in RECIPES | STATEFUL | ALONE if name not in _QUANTISED),
         *(name for name, recipe in RECIPES.items() if recipe.layers > 12), *_alike(),
         "llama-F16", "llama-Q8_0", "qwen2-Q8_0-tied", "qwen3")
EMBEDDED = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded" / "target.gguf"


def test_every_listed_architecture_has_a_case():
    names = {spec.architecture for spec in CASES.values()}
    recipes = RECIPES | STATEFUL | ALONE
    assert {recipes[name].architecture if name in recipes else name
            for name in names} == set(SPLITTABLE)


def check_splits(model, cache_dir, cuts, **options):
    assert differing(model, cuts, cache_dir, **options) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [full(name) if name in _LONG else name for name in CASES])
def test_splits_are_bit_equal(case, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "model.gguf", CASES[case]))
    cuts = cuts_of(model)
    assert cuts
    # the last ones are into three and into single layers: every layer where it can be cut
    check_splits(model, tmp_path / "cache", fewer(cuts, cuts[-2:]))


@pytest.mark.parametrize(("name", "bad", "why"), [
    ("smollm3", (2, 5), "multiples of 4"), ("llama4", (1, 8), "multiples of 4"),
    ("cohere2", (3, 4), "one with a window first"), ("laguna", (1, 9), "one without a window"),
    ("smallthinker", (8, 9), "and one with;"), ("afmoe", (2, 8), "multiples of 4"),
    ("glm5-next", (3, 12), "reads the positions"), ("llama4", (0, 3), "one without"),
    ("deepseek4", (4, 11), "ratios 4, and begins behind"),
    ("gemma4-small", (5, 9), "last 3 layers read the caches of layers 4 and 5"),
    ("deepseek4", (3, 4), "ratios 4, and begins"),
    ("qwen35", (2, 8), "begin at layers 0, 4, 8"), ("qwen35", (0, 3), "with attention"),
    ("granitehybrid", (1, 6), "layers 0, 2, 4"), ("lfm2", (6, 7), "begin at layers 0, 3")])
def test_a_range_that_cannot_be_a_stage_is_refused_with_the_reason(name, bad, why, tmp_path):
    """llama.cpp would compute something else, or end the process."""
    model = ModelFile(write_random_model(tmp_path / "model.gguf", tiny(name)))
    with pytest.raises(PlanError, match=why):
        extract_shard(model, *bad, cache_dir=tmp_path)


def test_embeddings_of_tokens_cross_a_cut_without_the_c_part(monkeypatch, tmp_path):
    monkeypatch.setattr(eval_callback, "compiled_filter", lambda: None)
    model = ModelFile(write_random_model(tmp_path / "model.gguf", tiny("gemma4-small")))
    check_splits(model, tmp_path / "cache", [[(0, 2), (2, 4), (4, 9)]])


def test_layers_that_read_tokens_stay_in_the_first_stage(tmp_path):
    path = write_random_model(tmp_path / "model.gguf", tiny("deepseek4"))
    model = ModelFile(altered(path, tmp_path / "more.gguf",
                              numbers={"deepseek4.hash_layer_count": 4}))
    with pytest.raises(PlanError, match="because the first 4 read tokens"):
        extract_shard(model, 3, 11, cache_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"flash_attn": "off"}, {"type_k": "f16", "type_v": "f16"}, {"type_v": "q8_0"},
     {"type_v": "f16"}, {"use_mmap": False}],
    ids=lambda options: "-".join(options.values()) if "use_mmap" not in options else "no-mmap",
)
def test_splits_are_bit_equal_with_other_options(options, tmp_path):
    model = ModelFile(write_random_model(tmp_path / "m.gguf", CASES["llama-head-64"]))
    check_splits(model, tmp_path / "cache", [stage_layers(model.n_layers, 3)], **options)


@pytest.mark.slow
@pytest.mark.skipif(not EMBEDDED.exists(), reason="the embedded models are not built")
def test_the_embedded_target_splits_and_has_a_wide_exact_width(llama, tmp_path):
    model = ModelFile(EMBEDDED)
    check_splits(model, tmp_path, [stage_layers(model.n_layers, k) for k in (2, 5, 12)])
    for start, stop in stage_layers(model.n_layers, 3):
        path = extract_shard(model, start, stop, cache_dir=tmp_path)
        assert exact_width(llama(path, (start, stop), model.n_layers)) >= 4


@pytest.mark.parametrize("type_v", ["q8_0", "f16"])
def test_a_width_that_agrees_in_one_context_by_chance_is_found_out(type_v, llama, tmp_path):
    """A kernel's rounding error often dies when activations are quantised again."""
    spec = RandomSpec(qtype="Q4_K_M", n_embd=256, n_ff=256, n_layer=2, n_head=4)
    model = ModelFile(write_random_model(tmp_path / "m.gguf", spec))
    backend = llama(model.path, type_v=type_v)
    assert len({exact_width(backend, seed=seed) for seed in range(8)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("qtype", [full("F32"), "F16", "Q8_0", "Q4_K_M"])
def test_logits_up_to_the_exact_width_ignore_neighbours_beyond_512_cells(
    qtype, llama, tmp_path, record_property
):
    """Where attention kernels switch (512 cells, several threads), R must still hold."""
    spec = RandomSpec(qtype=qtype, n_embd=256, n_ff=256, n_layer=2, n_head=4)
    model = ModelFile(write_random_model(tmp_path / "m.gguf", spec))
    backend = llama(model.path, n_ctx=1024, n_threads=2)
    width = exact_width(backend)
    record_property("exact_width", width)
    print(f"{qtype}: R = {width}")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.n_vocab, 624).tolist()

    for first in range(0, 600, 50):
        backend.decode(chain(tokens[first : first + 50], first))
    singles = np.concatenate([backend.decode(chain([tokens[p]], p)) for p in range(600, 624)])
    backend.seq_rm(0, 600, 2**31 - 1)
    for first in range(600, 624, width):
        backend.decode(chain(tokens[:3], 0, (2,)))  # another sequence in between: cells with holes
        rows = chain(tokens[first : first + width], first)
        assert np.array_equal(backend.decode(rows), singles[first - 600 :][: len(rows)])
        backend.seq_rm(2, 0, 2**31 - 1)
    assert backend.in_order
