"""Estimates the arithmetic of a row from a model's shapes.

It is twice the elements of every matrix that a row is multiplied with (of a mixture's experts, the
ones used), and for each cell that it attends to, its products with a key and a value in every
layer. Norms, rotations, activations and sampling are left out. Reads no weights.
"""

from __future__ import annotations

import math
from typing import Any

from pipeinfer.models.gguf import drawn_shares

_EMBEDDINGS = ("token_embd.weight", "model.embed_tokens.weight")
_HEADS = ("output.weight", "lm_head.weight")


def row_flops(model: Any) -> tuple[float, float]:
    """Return the operations of a row in all layers and the head, and those per cell it attends to.

    model: a `ModelFile` or a `ModelDir`
    """
    drawn = drawn_shares(model)
    tied = not any(name in model.tensors for name in _HEADS)
    elements = 0.0
    for name, tensor in model.tensors.items():
        beyond = tensor.layer is not None and tensor.layer >= model.n_layers
        if len(tensor.shape) < 2 or beyond or (name in _EMBEDDINGS and not tied):
            continue
        elements += math.prod(tensor.shape) * (
            drawn[tensor.layer] if "_exps." in name and tensor.layer is not None else 1.0)
    heads, size = (model.arch_get(f"attention.{key}") for key in ("head_count", "key_length"))
    width = heads * size if isinstance(heads, int) and isinstance(size, int) else model.n_embd
    return 2.0 * elements, 4.0 * width * model.n_layers
