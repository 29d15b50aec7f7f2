"""Which options exclude one another, pair by pair."""

from __future__ import annotations

import itertools

import pytest

from pipeinfer.cluster import features
from pipeinfer.config import Config
from pipeinfer.errors import UsageError
from pipeinfer.strategies import registry
from tests.kit.configs import job_config

#: options that make a config use each feature and, where that cannot be helped, another one
GIVEN = {
    "-md": {"draft_model": "a.gguf"}, "-md none": {"draft_model": "none"},
    "-fa": {"flash_attn": "on"},
    "-fa off": {"flash_attn": "off"}, "-ctk": {"cache_type_k": "f16"},
    "-ctv": {"cache_type_v": "f16"},
    "a quantised -ctv": {"cache_type_v": "q8_0"}, "--exact off": {"exact": "off"},
    "--set like_llama_cpp": {"like_llama_cpp": True}, "-t": {"threads": 2},
    "-ngl": {"gpu_layers": 1}, "--numa": {"numa": "distribute"},
    "--set keep_binding": {"keep_binding": True}, "--hook pace": {"hook": ("pace=2",)},
    "--grid": {"grid": "1x2"}, "--grid auto": {"grid": "auto"},
    "--slices": {"slices": "2"}, "--layers": {"layers": "4,4"}, "--draft-ranks": {"draft_ranks": 1},
    "--decomposer": {"decomposer": "pdos"}, "--ablate": {"ablate": ("cancel",)},
    "--set credit": {"credit": 2}, "--set draft_max": {"draft_max": 2},
    "--set tree_max": {"tree_max": 3},
    "--set alternatives": {"alternatives": 0}, "--set path_min": {"path_min": 0.0},
    "--set tip": {"tip": "alone"}, "--set adapt=false": {"adapt": False},
    "--speculation off": {"speculation": "off"},
    "--speculation on": {"speculation": "on"}, "an adapter (--bita)": {"bita": "a.gguf"},
    "a grammar": {"json_schema": "{}"}, "repetition penalties": {"repeat_penalty": 1.5},
    "-mm": {"mmproj": "mm.gguf"},
    **{f"--policy {name}": {"policy": name}
       for name in ("iterative", "speculative", "pipeinfer", "published")},
    **{f"--decomposer {name}": {"decomposer": name}
       for name in registry.decomposers()},
    **{f"--proposer {name}": {"proposer": (name,)} for name in registry.proposers()},
}


def config_of(*names):
    values = {}
    for name in names:
        for key, value in GIVEN[name].items():
            if values.setdefault(key, value) != value:
                return None
    others = {key: values.pop(key) for key in ("json_schema", "repeat_penalty") if key in values}
    return Config(job=job_config(**values)).replace(**others)


def test_every_feature_is_used_by_the_options_that_name_it():
    assert set(GIVEN) == set(features.features())
    for name in GIVEN:
        assert name in features.used(GIVEN, config_of(name)), name
    assert features.used(GIVEN, config_of()) == []


def test_one_feature_alone_is_never_refused():
    for name in GIVEN:
        features.check(config_of(name))


def test_the_verdict_on_each_pair_is_that_of_its_options():
    """Two options may make a config use further features: the verdict is that of all of them."""
    for first, second in itertools.combinations(GIVEN, 2):
        if (config := config_of(first, second)) is None:
            continue
        every = features.used(GIVEN, config)
        wanted = any(features.verdict(*pair) == "refused"
                     for pair in itertools.combinations(every, 2))
        try:
            features.check(config)
            refused = ""
        except UsageError as error:
            refused = str(error)
        assert bool(refused) == wanted, (first, second, refused)
        assert "{" not in refused


@pytest.mark.parametrize(("feature", "given", "says"), [
    (features.TIME_SHARING, "--set credit", ["--set credit"]), (features.TIME_SHARING, "-md", []),
    (features.LOOKUP, "--policy published", ["--policy published"]),
    (features.LOOKUP_ALONE, "--set adapt=false", ["--set adapt=false"]),
    (features.STATE, "--decomposer", ["--decomposer"]), (features.STATE, "-md none", []),
])
def test_what_pipeinfer_chooses_by_itself_is_left_out(feature, given, says):
    assert features.excluding(feature, config_of(given).job) == says
    wanted = "refused" if feature == features.STATE else "left out"
    assert features.verdict(given, feature) == (wanted if says else "")
