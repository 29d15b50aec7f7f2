"""The embedding's rows, for stages that are cut into slices: their files have no embedding.

Rows are converted to floats by ggml's own function for the type, the one that llama.cpp calls when
it looks a token up, so they have its bits. Only the requested rows are read. A host without the
model gets a companion file with the embedding alone. Independent of layers and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeinfer.core.types import FloatArray, IntArray
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.llama import binding
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import all_of, blocks_of, entry, header_of, total_bytes
from pipeinfer.models.layers import embedding_factor
from pipeinfer.models.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType
from pipeinfer.models.shard import shard_name

PIECE = "embedding"  #: the companion's name in place of a slice's
_NAME = "token_embd.weight"
_FACTOR = "pipeinfer.embedding_factor"
_F32 = 0


class EmbeddingTable:
    """The embedding of one file. n_vocab: number of rows; n_embd: elements of each."""

    def __init__(self, raw: Any, tensor: TensorInfo, factor: float = 1.0) -> None:
        self._raw, self._type, self._factor = raw, tensor.type, np.float32(factor)
        self.n_embd, self.n_vocab = tensor.shape
        self._to_float = _converter(tensor)

    @classmethod
    def open(cls, model: ModelFile) -> EmbeddingTable:
        """Open the embedding of a model or of a companion file.

        Raises ModelError without an embedding, BackendError for a type that the library cannot
        convert.
        """
        tensor = _tensor(model)
        try:
            raw = np.memmap(model.paths[tensor.part], np.uint8, "r", tensor.offset,
                            (tensor.shape[1], tensor.nbytes // tensor.shape[1]))
        except (OSError, ValueError) as error:  # ValueError: the file became too short
            raise ModelError(f"{model.paths[tensor.part]}: cannot be read: {error}") from None
        noted = model.get(_FACTOR)
        return cls(raw, tensor, noted if isinstance(noted, float) else embedding_factor(model))

    def rows(self, tokens: IntArray) -> FloatArray:
        """Return the rows of tokens, float32[n, n_embd].

        tokens: int[n]
        Raises BackendError for a token that is not in the vocabulary.
        """
        if len(tokens) and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < self.n_vocab:
            raise BackendError(f"a token outside the vocabulary of {self.n_vocab}")
        raw = np.ascontiguousarray(self._raw[np.asarray(tokens, np.int64)])
        if self._to_float is None:
            out = raw.view(np.float32)
        else:
            out = np.empty((len(raw), self.n_embd), np.float32)
            self._to_float(raw.ctypes.data, out.ctypes.data, out.size)
        return out if self._factor == 1 else out * self._factor


class EmbeddingSource:
    """The companion's bytes: a GGUF file with a model's embedding and nothing else.

    Fields as in `shard_cache.Source`.
    """

    def __init__(self, model: ModelFile) -> None:
        self._model, self._parts = model, [all_of(_tensor(model), _NAME)]
        arch, factor = model.architecture, embedding_factor(model)
        self.header = header_of([
            entry("general.architecture", arch),
            entry("general.alignment", DEFAULT_ALIGNMENT),
            entry(f"{arch}.block_count", model.n_layers),
            entry(f"{arch}.embedding_length", model.n_embd),
            entry(f"{arch}.vocab_size", model.n_vocab),
            entry("pipeinfer.fingerprint", model.fingerprint),
            entry("pipeinfer.piece", PIECE),
            *([] if factor == 1 else [entry(_FACTOR, factor)]),
        ], self._parts)
        self.total = total_bytes(self.header, self._parts)
        self.name = shard_name(model.fingerprint, 0, 0, PIECE)

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes in order. Raises ModelError when the model file cannot be read."""
        return blocks_of(self._model, self.header, self._parts)


def _tensor(model: ModelFile) -> TensorInfo:
    tensor = model.tensors.get(_NAME)
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[0] != model.n_embd:
        raise ModelError(f"{model.path}: has no embedding of {model.n_embd} elements; the file is "
                         "incomplete, fetch it again")
    return tensor


def _converter(tensor: TensorInfo) -> Any:
    """ggml's function from rows of the tensor's type to floats; None where they are floats."""
    if tensor.type == _F32:
        return None
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    traits = binding.ggml_get_type_traits(tensor.type).contents
    # the struct is laid out by hand, so compare its values with known ones
    if (traits.blck_size, traits.type_size) != (block, size) or not traits.to_float:
        raise BackendError(f"the llama.cpp library cannot turn {tensor.type_name} into floats as "
                           "expected: install the version that constraints.txt names")
    return traits.to_float
