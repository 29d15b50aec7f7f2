"""Completes an EAGLE-3 head or a DFlash draft with what its file takes from the target.

llama.cpp loads a file of the architectures `eagle3` and `dflash` by itself only if the file has an
embedding, an output matrix and a vocabulary. Heads are published without them, as they are the
target's. Nothing is converted: the matrices keep the types that they have in the target.
Independent of how a head is run or trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeinfer.errors import ModelError, PlanError
from pipeinfer.files import write_atomically
from pipeinfer.models.gguf import DEFAULT_ALIGNMENT, ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import (
    TensorPart,
    all_of,
    block_size,
    blocks_of,
    entry,
    header_of,
    rows_of,
    total_bytes,
)
from pipeinfer.models.head_file import layer_parts, rows_of_slice
from pipeinfer.models.layers import positive
from pipeinfer.models.slice_parts import Sizes, Slice, numbers_of
from pipeinfer.models.slices import cut

ARCHITECTURE, BLOCKS = "eagle3", "dflash"
TAPS = 3  #: layers of the target whose inputs an EAGLE-3 head reads
_NAMES = {ARCHITECTURE: "EAGLE-3 head", BLOCKS: "DFlash draft"}
_INT64 = 27  #: ggml's number for the type of `d2t`
_EMBEDDING, _OUTPUT, _CHOSEN = "token_embd.weight", "output.weight", "d2t"


class CompletedHead:
    """The bytes of a head's file with everything that it needs; fields as in `shard_cache.Source`.

    head: the head's file
    target: the model whose tokens it proposes
    architecture: that the head has to have
    pieces, index: the slices of the target's layers, and for whose member this is; none: all of it.
        PlanError is raised where the head cannot be cut so
    The output matrix has the rows of the tokens that the head can propose (tensor `d2t`), or all.
    Raises ModelError where the head is of another architecture or does not fit the target.
    """

    def __init__(self, head: ModelFile, target: ModelFile,
                 architecture: str = ARCHITECTURE, pieces: Sequence[Slice] = (), index: int = 0
                 ) -> None:
        _check(head, target, architecture)
        _check_tensors(head, target)
        self._own = [all_of(tensor, tensor.name) for tensor in head.tensors.values()]
        self._head, self._target = head, target
        self._taken, self._chosen = list(_taken(head, target)), b""
        numbers = self._cut(pieces, index) if pieces else {}
        parts = [*self._own, *self._taken]
        if self._chosen:
            parts.append(TensorPart(_CHOSEN, _INT64, (len(self._chosen) // 8,),
                                    len(self._chosen), None))
        self.header = header_of([*_entries(head, target, numbers), *numbers.values()], parts)
        self.total = total_bytes(self.header, parts)
        named = "".join(f"-{one.vocab[1]}" for one in pieces) + f"-{index}" if pieces else ""
        self.name = f"{head.fingerprint[:32]}-{target.fingerprint[:32]}-{architecture}{named}.gguf"

    @property
    def output_bytes(self) -> int:
        """The size of its output matrix."""
        return sum(part.nbytes for part in (*self._own, *self._taken) if part.name == _OUTPUT)

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes in order. Raises ModelError when a file cannot be read."""
        yield from blocks_of(self._head, self.header, self._own)
        yield from blocks_of(self._target, b"", self._taken)
        yield self._chosen + bytes(-len(self._chosen) % DEFAULT_ALIGNMENT)

    def _cut(self, pieces: Sequence[Slice], index: int) -> dict[str, bytes]:
        """Keep a slice of the layer and of the output matrix, and the tokens of its rows; return
        the metadata that it has instead."""
        head = self._head
        if head.architecture != ARCHITECTURE:
            raise PlanError(f"{head.path.name}: a {_NAMES[head.architecture]} is not sliced")
        output = head.tensors.get(_OUTPUT) or _of_target(self._target, _OUTPUT)
        chosen = _tokens(head) if _CHOSEN in head.tensors else np.arange(output.shape[1])
        low, high = rows_of_slice(len(chosen), pieces[index], self._target.n_vocab)
        self._chosen = chosen[low:high].astype("<i8").tobytes()
        rows = _ranges(chosen[low:high]) if _OUTPUT in _takes(head) else [(low, high)]
        sizes = _sizes(head)
        shares = [one.vocab[1] - one.vocab[0] for one in pieces]
        piece = cut(sizes, shares, head.path.name)[index]
        cut_out = layer_parts(head, 0, piece, sizes) | {_OUTPUT: rows_of(output, _OUTPUT, *rows)}
        self._own, self._taken = ([cut_out.get(one.name, one) for one in parts
                                   if one.name != _CHOSEN] for parts in (self._own, self._taken))
        return numbers_of(head, piece, sizes)


def complete(head: Path, target: Path, out: Path) -> None:
    """Write the file of `CompletedHead` to `out`, whole or not at all.

    Raises ModelError where the head does not fit the target, or a file cannot be read; UsageError
    where `out` cannot be written.
    """
    write_atomically(out, CompletedHead(ModelFile(head), ModelFile(target)).blocks())


def taps_of(head: ModelFile, target: ModelFile) -> tuple[int, ...]:
    """Return the layers of the target whose inputs a head reads: its `target_layers`.

    Raises ModelError where these are no layers of the target in order, or not 3 of EAGLE-3.
    """
    blocks, named = head.architecture == BLOCKS, head.arch_get("target_layers")
    listed = named if isinstance(named, list) else []
    found = tuple(one for one in listed if isinstance(one, int) and 0 <= one < target.n_layers)
    in_order = found and list(found) == sorted(set(found))
    if len(found) < len(listed) or not (in_order if blocks else len(found) == TAPS):
        raise ModelError(f"{head.path}: does not name {'' if blocks else f'{TAPS} '}layers of "
                         f"{target.path.name} whose rows it reads (target_layers): give the "
                         f"{_NAMES[BLOCKS if blocks else ARCHITECTURE]} of this model")
    return found


def _check(head: ModelFile, target: ModelFile, architecture: str) -> None:
    if head.architecture != architecture:
        raise ModelError(f"{head.path}: is a {head.architecture} model, not "
                         f"{'an' if architecture == ARCHITECTURE else 'a'} {_NAMES[architecture]} "
                         f"({architecture})")
    wanted = [("target_hidden_size", target.n_embd)]
    if _takes(head):
        wanted += [("embedding_length", target.n_embd), ("vocab_size", target.n_vocab)]
    for key, found in wanted:
        if (its := head.arch_get(key, found)) != found:
            raise ModelError(f"{head.path}: is for a target with {key} {its}, but {target.path} "
                             f"has {found}: give the head of this target")


def _check_tensors(head: ModelFile, target: ModelFile) -> None:
    """Raise ModelError for tensors with which llama.cpp would end the process."""
    def shape(name: str) -> tuple[int, ...]:
        if name not in head.tensors:
            raise ModelError(f"{head.path}: has no {name}: fetch the file again")
        return head.tensors[name].shape

    width = head.arch_get("embedding_length")
    eagle = head.architecture == ARCHITECTURE
    taps = TAPS if eagle else len(taps_of(head, target))
    expected = {"fc.weight": (taps * target.n_embd, width), "output_norm.weight": (width,)}
    expected |= {f"blk.0.{name}.weight": (width,) for name in ("attn_norm", "attn_norm_2",
                                                               "ffn_norm") if eagle}
    if _EMBEDDING in head.tensors:
        expected[_EMBEDDING] = (width, target.n_vocab)
    chosen = head.tensors.get(_CHOSEN)
    if _OUTPUT in head.tensors:
        expected[_OUTPUT] = (width, target.n_vocab if chosen is None else chosen.shape[0])
    for name, wanted in expected.items():
        if shape(name) != wanted:
            raise ModelError(f"{head.path}: {name} has the shape {shape(name)}, not {wanted}: give "
                             "the head of this target")
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        for layer in range(head.n_layers):
            shape(f"blk.{layer}.{name}.weight")
    if chosen is not None:
        if chosen.type != _INT64 or len(chosen.shape) != 1:
            raise ModelError(f"{head.path}: {_CHOSEN} is no list of numbers of 64 bits: fetch the "
                             "file again")
        _bands(head, target.n_vocab)


def _takes(head: ModelFile) -> list[str]:
    """The matrices that the head does not have."""
    return [name for name in (_EMBEDDING, _OUTPUT) if name not in head.tensors]


def _taken(head: ModelFile, target: ModelFile) -> Iterator[TensorPart]:
    for name in _takes(head):
        source = _of_target(target, name)
        if name == _OUTPUT and _CHOSEN in head.tensors:
            yield rows_of(source, name, *_bands(head, source.shape[1]))
        else:
            yield all_of(source, name)


def _sizes(head: ModelFile) -> Sizes:
    """The sizes of an EAGLE-3 head's layer; its vocabulary is cut as the target's."""
    queries, output, down = (head.tensors[f"blk.0.{name}.weight"]
                             for name in ("attn_q", "attn_output", "ffn_down"))
    heads, ff = positive(head, "attention.head_count"), down.shape[0]
    size = queries.shape[1] // heads
    return Sizes(heads, positive(head, "attention.head_count_kv", heads), size, size,
                 positive(head, "rope.dimension_count", size), ff, ff, block_size(output),
                 block_size(down), {})


def _of_target(target: ModelFile, name: str) -> TensorInfo:
    found = target.tensors.get(name) or target.tensors.get(_EMBEDDING)
    if found is None:
        raise ModelError(f"{target.path}: has no {name}; give the file of the whole model")
    return found


def _tokens(head: ModelFile) -> npt.NDArray[Any]:
    """The tokens that a head can propose."""
    return np.frombuffer(b"".join(head.read_tensor(head.tensors[_CHOSEN])), np.int64)


def _bands(head: ModelFile, count: int) -> list[tuple[int, int]]:
    """The rows of the tokens that the head can propose, in its order, as ranges."""
    tokens = _tokens(head)
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= count:
        raise ModelError(f"{head.path}: {_CHOSEN} names tokens outside of the target's {count}; "
                         "fetch the file again")
    return _ranges(tokens)


def _ranges(tokens: npt.NDArray[Any]) -> list[tuple[int, int]]:
    breaks = [0, *(np.flatnonzero(np.diff(tokens) != 1) + 1).tolist(), len(tokens)]
    return [(int(tokens[low]), int(tokens[high - 1]) + 1)
            for low, high in itertools.pairwise(breaks)]


def _entries(head: ModelFile, target: ModelFile, without: Collection[str]) -> list[bytes]:
    own = [key for key in head.meta_keys()
           if key not in ("general.alignment", *without) and not key.startswith("split.")]
    entries = [head.raw_entry(key) for key in own]
    if "tokenizer.ggml.model" not in own:
        entries += [target.raw_entry(key) for key in target.meta_keys()
                    if key.startswith("tokenizer.") and key not in own]
    return [*entries, entry("general.alignment", DEFAULT_ALIGNMENT)]
