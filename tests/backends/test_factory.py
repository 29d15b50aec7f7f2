"""Which types of a cache become whose."""

from __future__ import annotations

import json

import pytest

from pipeinfer.backends.factory import llama_options
from pipeinfer.cli.generate import generate
from pipeinfer.config import ModelConfig
from tests.kit.refusals import output


@pytest.mark.parametrize("values", ["q8_0", "q4_0", "bf16"])
def test_types_that_are_named_are_the_targets_alone(values):
    config = ModelConfig(cache_type_k="q8_0", cache_type_v=values)
    stage, draft = llama_options(config), llama_options(config, draft=True)
    assert (stage.flash_attn, stage.type_k, stage.type_v) == ("auto", "q8_0", values)
    assert draft == llama_options(ModelConfig(), draft=True)


@pytest.mark.parametrize(("values", "flash"), [("auto", "off"), ("bf16", "off"), ("q8_0", "auto")])
def test_quantised_values_keep_flash_attention(values, flash):
    options = llama_options(ModelConfig(exact="off", cache_type_v=values))
    assert (options.flash_attn, options.type_k) == (flash, "f16")


def test_flash_attention_stays_where_layers_are_on_a_gpu():
    """Without it a GPU decodes slower, whatever the draft or the stage has to be."""
    config = ModelConfig(exact="off", gpu_layers=99, gpu_layers_draft=99)
    for draft in (False, True):
        options = llama_options(config, draft=draft)
        assert (options.flash_attn, options.type_k, options.type_v) == ("auto", "f16", "f16")
    assert llama_options(ModelConfig(gpu_layers=99), draft=True).flash_attn == "off"


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--exact", "off", "--speculation", "off"]])
def test_quantised_values_work_beside_a_draft(more):
    ask = ["-p", "def f(", "-n", "8", "--temp", "0", "--json", "-t", "1", "-c", "256"]
    found = json.loads(output(generate, [*ask, "-ctk", "q8_0", "-ctv", "q8_0", *more]))
    assert len(found["tokens"]) == 8
