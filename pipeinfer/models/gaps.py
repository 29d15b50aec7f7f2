"""A model rewritten for llama.cpp so that positions may have gaps: the same weights under M-RoPE.

llama.cpp refuses gaps between a sequence's positions for ordinary architectures and allows them for
those with M-RoPE. With one section, or the same positions in all, M-RoPE is plain NeoX RoPE. So
layers of `llama` and `qwen2` models are written as `qwen2vl` layers, those of `qwen3` as `qwen3vl`.
Rows of the query and key matrices that llama stores interleaved return to half-split order (whole
rows, so quantised ones stay as they are), and biases of zero are added. The result is the same up
to the error of the kernels. Independent of ranks and threads.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
from msgspec import structs
from typing_extensions import override

from pipeinfer.errors import ModelError, UnsupportedArchitecture
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile, TensorInfo, Value
from pipeinfer.models.gguf_parts import entry, renamed_entry

_WITH_NORMS = "qwen3vl"  #: has norms of heads
_F32 = 0
_ZEROS = -1  #: `TensorInfo.part` of a bias that the file does not have


class GapModel(ModelFile):
    """The `ModelFile` of the rewritten model, which reads from the original.

    Raises UnsupportedArchitecture for a model that would be computed differently.
    """

    def __init__(self, model: ModelFile) -> None:
        self._source, self._from = model, model.architecture
        self._to = declared(model.architecture).with_gaps
        self._paired = declared(model.architecture).paired
        self._sections = f"{self._to}.rope.dimension_sections"
        if not self._to:
            self._refuse(f"layers of architecture {self._from!r} are not known to work with gaps")
        super().__init__(model.path)
        self.check()
        self._heads = {"attn_q": self._count("attention.head_count"),
                       "attn_k": self._kv_heads(), "attn_v": self._kv_heads()}
        self.tensors = {t.name: t for t in self._rewritten(model)}

    def check(self) -> None:
        """Raise UnsupportedArchitecture for a model that would be computed differently."""
        model = self._source
        head, problem = self._head(), ""
        if "rope_freqs.weight" in model.tensors:
            problem = "it scales rotations by frequency"
        elif model.arch_get("rope.dimension_count", head) != head:
            problem = "it rotates only a part of each head"
        elif self._paired and "blk.0.attn_q.bias" in model.tensors:
            problem = "it has biases in its attention"
        if problem:
            self._refuse(problem)

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedArchitecture(
            f"{self._source.path.name}: llama.cpp cannot leave gaps between positions here: "
            f"{problem}; use --backend torch")

    def _head(self) -> int:
        """The elements of a head's key."""
        whole = self._count("embedding_length") // self._count("attention.head_count")
        size = self.arch_get("attention.key_length", whole)
        return size if self._to == _WITH_NORMS and isinstance(size, int) else whole

    @functools.cached_property
    def fingerprint(self) -> str:
        """A fingerprint that differs from the original's."""
        return hashlib.sha256(b"gaps1" + self._source.fingerprint.encode()).hexdigest()

    @override
    def meta_keys(self) -> tuple[str, ...]:
        keys = (self._renamed(key) for key in super().meta_keys())
        return (*keys, self._sections)

    @override
    def get(self, key: str, default: Value | None = None) -> Value | None:
        if key == "general.architecture":
            return self._to
        return super().get(self._original(key), default)

    @override
    def is_array(self, key: str) -> bool:
        return key == self._sections or super().is_array(self._original(key))

    @override
    def raw_entry(self, key: str) -> bytes:
        if key == self._sections:
            half = self._head() // 2
            sections = (half, 0, 0, 0)
            if self._to == _WITH_NORMS:  # interleaved; all three sections get the same positions
                sections = (-(-half // 3),) * 3 + (0,)
            return entry(key, sections)
        if key == "general.architecture":
            return entry(key, self._to)
        return renamed_entry(self._source, self._original(key), key)

    @override
    def read_tensor(self, tensor: TensorInfo, chunk: int = 1 << 22) -> Iterator[bytes]:
        if tensor.part == _ZEROS:
            yield bytes(tensor.nbytes)
            return
        kind = tensor.name.rsplit(".", 2)[-2]
        blocks = super().read_tensor(tensor, chunk)
        if not self._paired or kind not in ("attn_q", "attn_k"):
            yield from blocks
            return
        rows = tensor.shape[1]
        raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(rows, -1)
        yield raw[half_split(rows, self._heads[kind])].tobytes()

    def _rewritten(self, model: ModelFile) -> Iterator[TensorInfo]:
        for tensor in model.tensors.values():
            yield tensor
            part = tensor.name.rsplit(".", 2)
            if len(part) < 3 or part[-1] != "weight" or part[-2] not in self._heads:
                continue
            if len(tensor.shape) != 2 or tensor.shape[1] % (2 * self._heads[part[-2]]):
                raise ModelError(f"{model.path}: tensor {tensor.name!r} of shape "
                                 f"{list(tensor.shape)} does not divide into "
                                 f"{self._heads[part[-2]]} heads; the file is damaged, fetch it "
                                 "again")
            if self._paired:
                rows = tensor.shape[1]
                yield structs.replace(
                    tensor, name=".".join((*part[:-1], "bias")), type=_F32, shape=(rows,),
                    nbytes=4 * rows, part=_ZEROS, offset=0)

    def _kv_heads(self) -> int:
        heads = self.arch_get("attention.head_count_kv")
        return int(heads) if isinstance(heads, int) else self._count("attention.head_count")

    def _renamed(self, key: str) -> str:
        prefix = self._from + "."
        return f"{self._to}.{key[len(prefix):]}" if key.startswith(prefix) else key

    def _original(self, key: str) -> str:
        prefix = self._to + "."
        return f"{self._from}.{key[len(prefix):]}" if key.startswith(prefix) else key


def half_split(rows: int, heads: int) -> np.ndarray:
    """Return the row of the interleaved matrix for each row in half-split order, int64[rows]."""
    size = rows // heads
    within = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    order: np.ndarray = (np.arange(heads)[:, None] * size + within).ravel()
    return order
