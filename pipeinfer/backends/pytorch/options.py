"""Options of a torch shard, and checks whether it can run; nothing here imports torch.

Code that only chooses a backend (options, plans, the head) does not load the heavy packages.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from msgspec import Struct, structs

from pipeinfer.errors import UnsupportedArchitecture, UsageError
from pipeinfer.models.architectures import TABLE

#: model types that tests compare with transformers' own forward pass
FAMILIES = tuple(sorted(kind for one in TABLE.values() for kind in one.torch.types))
#: of these, what can be read from GGUF; Mistral is named "llama" there
GGUF_FAMILIES = tuple(sorted(name for name, one in TABLE.items() if one.torch.gguf))
_PACKAGES = ("torch", "transformers", "safetensors")
#: rows of one matrix product. Fixed, or a row's bits would depend on how many come with it; these
#: cost no more than a single row (docs/torch.md). 0: as many as there are, exact where measured.
_TILES = {("cpu", "float32"): 3, ("cpu", "bfloat16"): 0, ("cuda", "float32"): 16,
          ("cuda", "bfloat16"): 16}


class TorchOptions(Struct, frozen=True):
    """How torch runs a shard.

    device: auto, cpu, cuda or cuda:N
    dtype: of weights, cache and arithmetic
    tile: rows of one matrix product; None: what makes decodes exact; 0: any number
    rows: most rows of a decode that are computed as single ones are
    """

    device: str = "auto"
    dtype: str = "auto"
    tile: int | None = None
    rows: int = 16

    def resolved(self, has_cuda: bool) -> TorchOptions:
        """Return the options with every auto replaced. Raises UsageError for a GPU that is not
        there.
        """
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
    """Return the bytes of one weight; for auto, those of the largest type that it may become."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and device.startswith(("cuda", "gpu"))) \
        else 4


def missing_packages() -> list[str]:
    """Return which of the packages that the torch backend needs are not installed here."""
    return [name for name in _PACKAGES if find_spec(name) is None]


def require_torch(missing: list[str] | None = None, who: str = "") -> None:
    """Raise UsageError when packages are missing.

    missing: the packages; None: those missing here
    who: begins the message
    """
    missing = missing_packages() if missing is None else missing
    if missing:
        raise UsageError(f"{who}the torch backend needs {', '.join(missing)}: "
                         "pip install 'pipeinfer[torch]'")


def check_family(architecture: str, path: str, *, gguf: bool) -> None:
    """Raise UnsupportedArchitecture for a model type that the torch backend does not support."""
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
    """Return the versions of torch and transformers, on which a shard's bits may depend."""
    found = []
    for name in _PACKAGES[:2]:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


def torch_options(device: str, dtype: str, *, exact: bool, rows: int = 16) -> TorchOptions:
    """Return the options for a job's config; exact: whether to use a fixed tile; rows: as there."""
    return TorchOptions(device=device, dtype=dtype, tile=None if exact else 0, rows=rows)
