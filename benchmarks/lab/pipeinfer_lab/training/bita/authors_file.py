"""Convert the masks and prompts of BiTA's authors (github.com/linfeng93/BiTA), as safetensors.

They hold `mask_tokens.weight` [M, d] (or [1, d], one vector for all masks) and
`prefix_encoder.embedding.weight` [P, 2 L d]: for each prompt the key of layer 0, its value, the key
of layer 1 and so on, each [heads, d / heads], not rotated, in the layout of Hugging Face.

Does not know: training, decoding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from pipeinfer.errors import ModelError
from pipeinfer.models import layers
from pipeinfer.models.bita_adapter import BitaAdapter
from pipeinfer.models.gguf import per_layer
from pipeinfer.models.locate import open_model

_MASKS, _PROMPTS = "mask_tokens.weight", "prefix_encoder.embedding.weight"
_MLP = "prefix_encoder.trans.0.weight"


def read(path: Path) -> dict[str, np.ndarray]:
    """Return masks and prompts, float32, by the names above.

    Raises ModelError for other files than safetensors, and for such without masks.
    """
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_tensor(full).float().numpy() for full in file.keys()
                     for name in (_MASKS, _PROMPTS, _MLP) if full.endswith(name)}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: is no safetensors file ({error}); docs/bita.md has the line "
                         "that makes one of the authors' file") from error
    if _MASKS not in found:
        raise ModelError(f"{path}: has no {_MASKS}; keep the names of BiTA's program")
    if _MLP in found:
        raise ModelError(f"{path}: its prompts pass an MLP (prefix_projection), which is not "
                         "supported; train an adapter with pipeinfer train bita")
    return found


def convert(path: Path, model_path: Path, masks: int) -> BitaAdapter:
    """Return the adapter of the authors' file for a model, which is not loaded.

    masks: M where the file has one vector for all masks.
    Raises ModelError for a model of other sizes, or whose heads share keys and values: the authors'
    prompts have keys of their own for each query head.
    """
    state, model = read(path), open_model(model_path)
    vectors = state[_MASKS] if len(state[_MASKS]) > 1 else state[_MASKS].repeat(masks, 0)
    heads, kv = per_layer(model, "attention.head_count", 1)[0], layers.kv_heads(model)
    pairs = state.get(_PROMPTS, np.zeros((0, 2 * model.n_layers * model.n_embd), np.float32))
    if vectors.shape[1] != model.n_embd or pairs.shape[1] != 2 * model.n_layers * model.n_embd:
        raise ModelError(
            f"{path}: masks of {vectors.shape[1]} elements and prompts of {pairs.shape[1]} do "
            f"not belong to {model_path}, which needs {model.n_embd} and 2 x {model.n_layers} x "
            f"{model.n_embd}: give the model that they were trained for")
    if len(pairs) and set(kv) != {heads}:
        raise ModelError(f"{model_path}: {heads} heads share {kv[0]} keys and values, and the "
                         "authors' prompts have one per head: train an adapter for this model")
    pairs = pairs.reshape(len(pairs), model.n_layers, 2, kv[0] if not len(pairs) else heads, -1)
    keys, values = (np.ascontiguousarray(pairs[:, :, one].swapaxes(0, 1)) for one in (0, 1))
    return BitaAdapter(vectors, keys, values,
                       {"model": model_path.name, "from": path.name})
