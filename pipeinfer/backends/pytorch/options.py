"""How a torch shard is to be run, and whether it can be: nothing here imports torch.

Everybody who only chooses a backend (options, plans, the head) stays free of the heavy packages.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from msgspec import Struct, structs

from pipeinfer.errors import UnsupportedArchitecture, UsageError

#: model types that tests compare with transformers' own forward pass
FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
#: of these, what is taken back from GGUF; Mistral calls itself "llama" there
GGUF_FAMILIES = ("gemma", "gemma2", "llama", "phi3", "qwen2", "qwen3")
_PACKAGES = ("torch", "transformers", "safetensors")
#: rows of one matrix product. Fixed, or a row's bits would depend on how many come with it; these
#: cost no more than a single row (docs/torch.md). 0: as many as there are, exact where measured.
_TILES = {("cpu", "float32"): 3, ("cpu", "bfloat16"): 0, ("cuda", "float32"): 16,
          ("cuda", "bfloat16"): 16}


class TorchOptions(Struct, frozen=True):
    """device: auto, cpu, cuda or cuda:N. dtype: of weights, cache and arithmetic. tile: rows of
    one matrix product; None takes what keeps decodes exact, 0 lets them vary. validate: check that
    rows continue their sequences, as llama.cpp would.
    """

    device: str = "auto"
    dtype: str = "auto"
    tile: int | None = None
    validate: bool = False

    def resolved(self, has_cuda: bool) -> TorchOptions:
        """With every auto replaced. Raises UsageError for a GPU that is not there."""
        check_device(self.device)
        device = self.device
        if device == "auto":
            device = "cuda" if has_cuda else "cpu"
        if device.startswith("cuda") and not has_cuda:
            raise UsageError(f"--device {device}: torch finds no CUDA device here; use --device "
                             "cpu, or install a torch build that supports this GPU")
        kind = device.partition(":")[0]
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if kind == "cpu" else "bfloat16"
        tile = _TILES.get((kind, dtype), 0) if self.tile is None else self.tile
        return structs.replace(self, device=device, dtype=dtype, tile=tile)


def itemsize(dtype: str, device: str) -> int:
    """Bytes of one weight; what auto will be is taken at its worst."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith(("cuda", "gpu"))) \
        else 4


def missing_packages() -> list[str]:
    """Which of the packages that the torch backend needs are not installed here."""
    return [name for name in _PACKAGES if find_spec(name) is None]


def require_torch(missing: list[str] | None = None, who: str = "") -> None:
    """Raise UsageError when packages are missing (None: look here). who: begins the message."""
    missing = missing_packages() if missing is None else missing
    if missing:
        raise UsageError(f"{who}the torch backend needs {', '.join(missing)}: "
                         "pip install 'pipeinfer[torch]'")


def check_family(architecture: str, path: str, *, gguf: bool) -> None:
    """Raise UnsupportedArchitecture for a model type that the torch backend does not know."""
    known = GGUF_FAMILIES if gguf else FAMILIES
    if architecture not in known:
        what = "GGUF files of architecture" if gguf else "models of type"
        raise UnsupportedArchitecture(f"{path}: {what} {architecture!r} are not supported by the "
                                      f"torch backend (supported: {', '.join(known)})")


def check_device(device: str) -> None:
    """Raise UsageError for a text that names no device."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device) is None:
        raise UsageError(f"--device {device}: choose from auto, cpu, cuda, cuda:0, cuda:1, ...")


def torch_version() -> str:
    """Versions of torch and transformers, which a shard's bits may depend on."""
    found = []
    for name in _PACKAGES[:2]:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


def torch_options(device: str, dtype: str, *, exact: bool) -> TorchOptions:
    """Options of a job's config. exact: single rows' bits are worth a fixed tile."""
    return TorchOptions(device=device, dtype=dtype, tile=None if exact else 0)
