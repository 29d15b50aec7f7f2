"""The same tests on a device: PIPEINFER_TEST_GPU_LAYERS=99 puts the layers of every llama.cpp
backend there, PIPEINFER_TEST_DEVICE=cuda every torch backend's (benchmarks/gpu)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend, LlamaOptions

GPU_LAYERS = int(os.environ.get("PIPEINFER_TEST_GPU_LAYERS", "0"))
DEVICE = os.environ.get("PIPEINFER_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session", autouse=True)
def device() -> Iterator[None]:
    """Load every backend onto the device that the environment names."""
    with pytest.MonkeyPatch.context() as patch:
        if GPU_LAYERS:
            patch.setattr(LlamaCppBackend, "load", _placed(
                LlamaCppBackend.load, lambda given: structs.replace(
                    given or LlamaOptions(), n_gpu_layers=GPU_LAYERS)))
        if DEVICE != "cpu":
            from pipeinfer.backends.pytorch.backend import TorchBackend
            from pipeinfer.backends.pytorch.options import TorchOptions

            patch.setattr(TorchBackend, "load", _placed(
                TorchBackend.load, lambda given: _on_device(given or TorchOptions())))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Family of a small torch model -> (model, folder), made when asked for."""
    from tests.kit.tiny_torch import reference, save

    return cache(lambda family: (model := reference(family), save(
        model, tmp_path_factory.mktemp("hf") / family)))


def _on_device(options: Any) -> Any:
    """The same arithmetic there: "auto" would be bfloat16."""
    return structs.replace(options, device=DEVICE, dtype=options.dtype.replace("auto", "float32"))


def _placed(load: Callable[..., Any], change: Callable[[Any], Any]) -> Any:
    """A class's `load`, with its options changed."""
    return classmethod(lambda cls, *args, options=None, **more: load.__func__(
        cls, *args, options=change(options), **more))
