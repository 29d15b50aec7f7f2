"""The embedding for slices of a first stage, which have none: rows are read from the model's file.

They have the bits with which a whole shard of the same type begins. Independent of layers and
ranks.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeinfer.backends.pytorch.weights import config_at, give_scale
from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.models.hf_folder import FLOATS, ModelDir

_TYPES = dict(zip(FLOATS, (torch.float64, torch.float32, torch.float16, torch.bfloat16),
                  strict=True))


class TorchEmbedding:
    """A `backends.composed.Embedding` from a file.

    raw: uint8[n_vocab, bytes of a row]
    kind: of its numbers, a torch type or one of GGUF
    embed: the family's module, without its weights
    dtype: in which the model computes
    """

    def __init__(self, raw: Any, kind: Any, embed: Any, dtype: Any) -> None:
        self._raw, self._kind, self._embed, self._dtype = raw, kind, embed, dtype

    def rows(self, tokens: IntArray) -> FloatArray:
        """Return the rows as they enter the first layer, float32[n, n_embd].

        Raises BackendError for a token that is not in the vocabulary.
        """
        top = len(self._raw)
        if not len(tokens):
            return np.zeros((0, self._embed.embedding_dim), np.float32)
        if not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < top:
            raise BackendError(f"a token outside the vocabulary of {top}")
        raw = np.ascontiguousarray(self._raw[np.asarray(tokens, np.int64)])
        if isinstance(self._kind, torch.dtype):
            found = torch.from_numpy(raw).view(self._kind)
        else:
            found = torch.from_numpy(np.asarray(dequantize(raw, self._kind), np.float32))
        embed = self._embed
        with torch.inference_mode():
            # the module scales rows as its family does: those looked up are all of its weights
            embed.weight = torch.nn.Parameter(found.to(self._dtype), requires_grad=False)
            return np.ascontiguousarray(embed(torch.arange(len(found))).float().numpy())


def open_embedding(path: str | os.PathLike[str], dtype: str) -> TorchEmbedding:
    """Open the embedding of a GGUF file or folder. Raises ModelError, UnsupportedArchitecture."""
    model, config = config_at(path)
    kind: Any
    if isinstance(model, ModelDir):
        stored = model.tensors.get("model.embed_tokens.weight")
        ends = None if stored is None or stored.dtype not in FLOATS else (
            stored.file, stored.start, stored.nbytes, stored.shape)
        kind = None if stored is None else _TYPES.get(stored.dtype)
    else:
        tensor = model.tensors.get("token_embd.weight")
        ends = None if tensor is None else (
            model.paths[tensor.part], tensor.offset, tensor.nbytes, tensor.shape[::-1])
        kind = None if tensor is None else GGMLQuantizationType(tensor.type)
    if ends is None or ends[3] != (model.n_vocab, model.n_embd):
        raise ModelError(f"{os.fspath(path)}: has no embedding of {model.n_vocab} rows of "
                         f"{model.n_embd} floats; fetch the model again")
    file, start, size, (n_rows, _) = ends
    try:
        raw = np.memmap(file, np.uint8, "r", start, (n_rows, size // n_rows))
    except (OSError, ValueError) as error:  # ValueError: the file became too short
        raise ModelError(f"{file}: cannot be read: {error}") from None
    with torch.device("meta"):
        embed = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).model.embed_tokens
    give_scale(embed, "cpu")
    embed.padding_idx = None  # may lie beyond the rows of one decode, and has no effect here
    return TorchEmbedding(raw, kind, embed.eval(), getattr(torch, dtype))
