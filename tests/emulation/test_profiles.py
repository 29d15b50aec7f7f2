"""The machines, links and models of the emulation."""

from __future__ import annotations

import pytest

from pipeinfer.emulation.profiles import load_profiles
from pipeinfer.emulation.sizes import Shape, quantised
from pipeinfer.errors import UsageError

PROFILES = load_profiles()
#: sizes of published GGUF files in 1e9 bytes, as their hosts list them
PUBLISHED = {
    "dolphin-70b": 33.19, "tinyllama": 0.668, "orca-2-7b": 4.08, "goliath-120b": 49.63,
    "xwin-7b": 4.08, "xwin-13b": 7.87, "falcon-180b": 85.18, "falcon-40b": 20.06,
    "senku-70b": 33.27, "longorca-7b": 4.08, "dolphin29-70b": 34.27, "dolphin29-8b": 4.92,
    "qwen-33b": 23.1, "qwen-7b": 5.53, "mixtral-8x22b": 67.8, "mistral-7b": 4.37, "yi-34b": 16.64,
    "yi-9b": 5.33,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_size_of_published_files(name):
    assert PROFILES.models[name].total_bytes / 1e9 == pytest.approx(PUBLISHED[name], rel=0.015)


def test_only_falcon_7b_has_no_published_size_to_compare():
    assert set(PROFILES.models) - set(PUBLISHED) == {"falcon-7b"}


def test_70b_with_the_q2_k_mixes_of_two_years():
    shape = Shape("llama", 80, 8192, 28672, 64, 8, 32000)
    for mix, published in (("Q2_K", 25.46), ("Q2_K_2023", 29.28)):
        sizes = quantised(shape, mix)
        total = 80 * sizes.layer_bytes + sizes.embedding_bytes + sizes.output_bytes
        assert total / 1e9 == pytest.approx(published, rel=0.005)


def test_cache_bytes_per_token():
    assert PROFILES.models["dolphin-70b"].kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert PROFILES.models["falcon-7b"].kv_bytes_per_token == 32 * 2 * 64 * 2


def test_a_decode_is_bound_by_memory_or_by_arithmetic():
    for node in PROFILES.nodes.values():
        for mix, rate in node.rates.items():
            size = 1e9
            for rows in (1, 2, 4, 64):
                took = node.seconds(size, mix, rows) - node.overhead
                moving = size / node.bandwidth
                shape = node.shapes.get(mix, (1.0,))
                arithmetic = size / node.first.get(mix, rate) * shape[min(rows, len(shape)) - 1]
                arithmetic += max(rows - len(shape), 0) * size / rate
                assert took == pytest.approx(moving if moving > arithmetic else arithmetic)


def test_runs_of_a_few_rows_take_what_was_measured():
    node = PROFILES.nodes["xeon-gold-6140x2"]

    def relative(mix: str) -> list[float]:
        return [(node.seconds(1e12, mix, rows) - node.overhead)
                / (node.seconds(1e12, mix, 1) - node.overhead) for rows in range(1, 9)]

    times = relative("Q3_K_M")
    assert times[:6] == pytest.approx([ms / 65 for ms in (65, 87, 127, 151, 198, 230)])
    line = 1.60 / 3.23  # a further row by the line through all six
    assert times[7] - times[6] == pytest.approx(times[6] - times[5])
    assert times[7] - times[6] == pytest.approx(line, rel=1e-3)
    # four rows of Q8_0 took less than three: a run is never cheaper than one of fewer rows
    assert node.shapes["Q8_0"] == pytest.approx([ms / 93 for ms in (93, 93, 166, 166, 211, 211)])


def test_gpus_take_further_rows_for_less_than_processors():
    def second_row(node):
        return node.seconds(1e12, "Q3_K_M", 2) / node.seconds(1e12, "Q3_K_M", 1) - 1

    gpu, cpu = PROFILES.nodes["rtx-3090"], PROFILES.nodes["i5-2400"]
    assert second_row(gpu) < 0.05 < second_row(cpu)


def test_a_mixture_moves_more_experts_the_more_rows_there_are():
    mixtral = PROFILES.models["mixtral-8x22b"]
    assert mixtral.moved_layer_bytes(1) == pytest.approx(mixtral.active_layer_bytes)
    attention = mixtral.layer_bytes - mixtral.expert_bytes
    assert mixtral.active_layer_bytes == pytest.approx(attention + mixtral.expert_bytes / 4)
    moved = [mixtral.moved_layer_bytes(rows) for rows in range(1, 40)]
    assert moved == sorted(moved)
    assert moved[-1] == pytest.approx(mixtral.layer_bytes, rel=1e-3)
    dense = PROFILES.models["yi-9b"]
    assert dense.moved_layer_bytes(1) == dense.moved_layer_bytes(9) == dense.layer_bytes


def test_a_stage_takes_its_layers_and_the_last_one_the_output_head():
    model, node = PROFILES.models["dolphin-70b"], PROFILES.nodes["i7-4790"]
    ten = model.stage_seconds(node, 10, 1) - node.overhead
    assert model.stage_seconds(node, 20, 1) - node.overhead == pytest.approx(2 * ten)
    head = model.stage_seconds(node, 10, 1, last=True) - node.overhead - ten
    assert head == pytest.approx(node.seconds(model.output_bytes, "Q3_K_M", 1) - node.overhead)


def test_clusters_have_the_papers_nodes():
    sizes = {name: len(cluster.nodes) for name, cluster in PROFILES.clusters.items()}
    assert sizes == {"a": 8, "b": 13, "c": 32, "gpu": 4}
    assert PROFILES.clusters["b"].nodes[:8] == PROFILES.clusters["a"].nodes


def test_every_pair_with_a_reported_acceptance():
    reported = {p.acceptance for p in PROFILES.pairs.values() if not p.assumed}
    assert reported == {0.79, 0.66, 0.52, 0.61, 0.68675, 0.6947}


def test_every_entry_names_its_source():
    for table in (PROFILES.nodes, PROFILES.models, PROFILES.links, PROFILES.clusters):
        assert all(entry.source for entry in table.values())


def test_every_node_has_a_rate_for_every_model():
    for node in PROFILES.nodes.values():
        for model in PROFILES.models.values():
            assert model.stage_seconds(node, 1, 1, last=True) > 0


def test_a_file_adds_and_overrides(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("""
        [nodes.i5-2400]
        memory_gib = 16
        [nodes.mine]
        memory_gib = 4
        bandwidth_gbs = 10
        rates_gbs = { Q4_K_M = 5 }
        [clusters.home]
        nodes = ["2 x mine", "i5-2400"]
        link = "gigabit"
    """)
    mine = load_profiles(file)
    assert mine.nodes["i5-2400"].memory == 16 * 2**30
    assert mine.nodes["i5-2400"].bandwidth == PROFILES.nodes["i5-2400"].bandwidth
    assert mine.clusters["home"].nodes == ("mine", "mine", "i5-2400")
    assert mine.nodes["mine"].seconds(10e9, "Q4_K_M", 1) == pytest.approx(2.0)
    with pytest.raises(UsageError, match="no rate for Q3_K_M"):
        mine.nodes["mine"].seconds(1.0, "Q3_K_M", 1)
    assert PROFILES.nodes["i5-2400"].memory == 8 * 2**30


@pytest.mark.parametrize(("text", "says"), [
    ("[nodes.x]\nmemory_gb = 4", "no key 'memory_gb'; did you mean memory_gib?"),
    ("[node.x]\ncores = 4", "no section 'node'; did you mean nodes?"),
    ("[nodes.x]\ncores = 4", "lacks memory_gib, bandwidth_gbs"),
    ("[nodes.x]\nmemory_gib = 4\nbandwidth_gbs = 10", "needs a bandwidth and rates"),
    ("[nodes.x]\nmemory_gib = 4\nbandwidth_gbs = 10\nkernels = 'avx3'", "no kernels 'avx3'"),
    ("[nodes.x]\nmemory_gib = 4\nbandwidth_gbs = 10\nrates_gbs = {Q4_KM = 1}", "mean Q4_K_M?"),
    ("[kernels.avx.milliseconds]\nQ4_K_M = 3", "give the milliseconds of runs of 1, 2, 3"),
    ("[nodes.i5-2400]\ncores = 'four'", "cores cannot be 'four'"),
    ("[nodes.i5-2400]\ncores = true", "cores cannot be True"),
    ("[nodes.i5-2400]\nbandwidth_gbs = -1", "must be a finite number of at least 0"),
    ("[nodes]\nx = 1", "is not a table"),
    ("nodes = 1", "needs tables"),
    ("[clusters.x]\nnodes = ['i5-2500']\nlink = 'gigabit'", "no node profile 'i5-2500'; did you"),
    ("[clusters.x]\nnodes = ['many x i5-2400']\nlink = 'gigabit'", "neither a name"),
    ("[clusters.x]\nnodes = ['i5-2400']\nlink = 'gigabyte'", "did you mean gigabit?"),
    ("[pairs.dolphin-orca2]\ndraft = 'orca-7b'", "no model profile 'orca-7b'; did you mean"),
    ("[models.yi-9b]\nquantisation = 'Q4_KM'", "did you mean Q4_K_M?"),
    ("[models.yi-9b]\nn_head = 0", "has impossible sizes"),
    ("[models.yi-9b]\narchitecture = 'lama'", "did you mean llama?"),
    ("nonsense", "not valid TOML"),
    ('[pairs.mine]\ntitle = "t"\ndraft = "tinyllama-1.1b"\n', "[pairs.mine] lacks target"),
    ("[pairs.dolphin-tinyllama]\nacceptance = 2\n", "from 0 to 1"),
    ('[clusters.mine]\nnodes = ["\u00b2 x xeon-e5-2650"]\nlink = "gigabit"\n', "8 x name"),
    ('[clusters.mine]\nnodes = ["99999999999 x xeon-e5-2650"]\nlink = "gigabit"\n', "8 x name"),
])
def test_mistakes_are_named(tmp_path, text, says):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r".*") as caught:
        load_profiles(file)
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read profiles"):
        load_profiles(tmp_path / "absent.toml")
