"""The file of a BiTA adapter: vectors of mask tokens, and keys and values of prompt tokens.

One safetensors file: `masks` [M, n_embd]; `keys` and `values` [n_layers, P, kv heads, head size],
of which P may be 0; the metadata describe the model and the training. Stored in float16.
Independent of torch and training.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
from msgspec import Struct, field

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import ModelError


class BitaAdapter(Struct, frozen=True):
    """An adapter.

    masks: float32[M, n_embd]
    keys, values: float32[n_layers, P, kv heads, head size]
    about: metadata of the model and the training
    Raises ModelError for shapes that do not match.
    """

    masks: FloatArray
    keys: FloatArray
    values: FloatArray
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.masks.ndim != 2 or not len(self.masks) or self.keys.ndim != 4 \
                or self.keys.shape != self.values.shape:
            raise ModelError(f"the BiTA adapter's shapes do not match: masks {self.masks.shape}, "
                             f"keys {self.keys.shape}, values {self.values.shape}")

    @property
    def n_masks(self) -> int:
        """The number of tokens ahead that it proposes, the next one not counted."""
        return len(self.masks)

    @property
    def n_prompts(self) -> int:
        """The number of prompt tokens, which take a cell each."""
        return int(self.keys.shape[1])

    def prefix(self, start: int, stop: int) -> dict[int, tuple[FloatArray, FloatArray]]:
        """Return the keys and values of layers `[start, stop)`, for `preload` of a backend."""
        return {layer: (self.keys[layer], self.values[layer]) for layer in range(start, stop)}

    def check(self, n_layers: int, n_embd: int) -> None:
        """Raise ModelError if the adapter belongs to a model of other sizes."""
        if self.keys.shape[0] != n_layers or self.masks.shape[1] != n_embd:
            raise ModelError(
                f"the BiTA adapter is for {self.keys.shape[0]} layers of {self.masks.shape[1]} "
                f"elements, the model has {n_layers} layers of {n_embd}: train an adapter for this "
                "model")


def load_bita(path: str | os.PathLike[str]) -> BitaAdapter:
    """Read an adapter. Raises ModelError for a file that is not one."""
    from safetensors import SafetensorError, safe_open

    where = os.fspath(path)
    if not os.path.isfile(path):
        raise ModelError(f"{where}: no such file")
    try:
        with safe_open(where, "numpy") as file:
            missing = {"masks", "keys", "values"} - set(file.keys())
            if missing:
                raise ModelError(f"{where} is not a BiTA adapter: it lacks {', '.join(missing)}")
            masks, keys, values = (np.asarray(file.get_tensor(name), np.float32)
                                   for name in ("masks", "keys", "values"))
            about = json.loads((file.metadata() or {}).get("bita", "{}"))
    except (SafetensorError, OSError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{where}: cannot be read as a BiTA adapter: {reason}") from error
    if not isinstance(about, dict):
        raise ModelError(f"{where}: does not say which model it is for; train the adapter again")
    if not all(np.isfinite(part).all() for part in (masks, keys, values)):
        raise ModelError(f"{where}: contains values that are not finite numbers; train the adapter "
                         "again")
    return BitaAdapter(masks, keys, values, about)


def save_bita(path: str | os.PathLike[str], adapter: BitaAdapter) -> None:
    """Write an adapter atomically."""
    from safetensors.numpy import save_file

    partial = f"{os.fspath(path)}.partial"
    save_file({name: np.ascontiguousarray(part.astype(np.float16)) for name, part in
               (("masks", adapter.masks), ("keys", adapter.keys), ("values", adapter.values))},
              partial, {"bita": json.dumps(adapter.about)})
    os.replace(partial, path)
