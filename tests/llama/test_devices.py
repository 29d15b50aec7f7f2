"""Which devices a process gets for a model: none where all of it stays on the processor."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from pipeinfer.backends.llamacpp.context import LlamaOptions, load_model
from pipeinfer.llama import binding
from pipeinfer.llama.library import ensure_llama
from pipeinfer.models.text.tokenizer import Tokenizer

DRAFT = Path(__file__).parents[2] / "pipeinfer" / "models" / "embedded" / "draft.gguf"


@pytest.fixture
def lists(monkeypatch):
    """The first entry of the list of devices of each model that is loaded; "all" for no list."""
    ensure_llama()
    found, load = [], binding.llama_model_load_from_file

    def watched(path, params):
        found.append(ctypes.c_void_p.from_address(params.devices).value if params.devices
                     else "all")
        return load(path, params)

    monkeypatch.setattr(binding, "llama_model_load_from_file", watched)
    return found


@pytest.mark.parametrize(("n_gpu_layers", "devices"), [(0, None), (1, "all"), (-1, "all")])
def test_a_model_on_the_processor_opens_no_gpu(lists, n_gpu_layers, devices):
    binding.llama_model_free(load_model(DRAFT, LlamaOptions(n_gpu_layers=n_gpu_layers)))
    assert lists == [devices]


def test_a_vocabulary_opens_no_gpu(lists):
    Tokenizer(DRAFT).close()
    assert lists == [None]
