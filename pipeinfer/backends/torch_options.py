"""How a torch shard is to be run, and whether it can be: nothing here imports torch.

Everybody who only chooses a backend (options, plans, the head) stays free of the heavy packages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from pipeinfer.errors import UsageError

DTYPES = ("auto", "float32", "bfloat16")
_PACKAGES = ("torch", "transformers", "safetensors")
#: rows of one matrix product. Fixed, or a row's bits would depend on how many come with it; these
#: cost no more than a single row (docs/torch.md). 0: as many as there are, exact where measured.
_TILES = {("cpu", "float32"): 3, ("cpu", "bfloat16"): 0, ("cuda", "float32"): 16,
          ("cuda", "bfloat16"): 16}


@dataclass(frozen=True, slots=True)
class TorchOptions:
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
        device = self.device
        if device == "auto":
            device = "cuda" if has_cuda else "cpu"
        if device.startswith("cuda") and not has_cuda:
            raise UsageError(f"--device {device}: torch sees no CUDA device here; give --device "
                             "cpu, or install a torch that is built for this GPU")
        kind = device.partition(":")[0]
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if kind == "cpu" else "bfloat16"
        tile = _TILES.get((kind, dtype), 0) if self.tile is None else self.tile
        return replace(self, device=device, dtype=dtype, tile=tile)


def itemsize(dtype: str, device: str) -> int:
    """Bytes of one weight. auto is what `TorchOptions.resolved` makes of it."""
    wide = dtype == "float32" or (dtype == "auto" and not device.startswith("cuda"))
    return 4 if wide else 2


def require_torch() -> None:
    """Raise UsageError when a package that the torch backend needs is not installed."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UsageError(f"the torch backend needs {', '.join(missing)}: "
                         "pip install 'pipeinfer[torch]'")


def torch_version() -> str:
    """Versions of torch and transformers, which a shard's bits may depend on."""
    found = []
    for name in _PACKAGES[:2]:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)
