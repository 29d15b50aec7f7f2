"""Files of prediction heads: a model's own head (MTP), EAGLE-3 heads, DFlash and DSpark drafts.

MTP: a head is the layers behind those that choose tokens, with the embedding, the last norm and the
output matrix. llama.cpp loads a file of these alone. Some publishers provide it as a file next to
the model, `mtp-*.gguf`. With a vocabulary of 150,000 tokens or more, most of the time of a head is
that of the output matrix, so it may have a smaller one. Slices of it are cut as those of the
model's layers are.

EAGLE-3, DFlash: llama.cpp loads a file of the architectures `eagle3` and `dflash` by itself only if
the file has an embedding, an output matrix and a vocabulary. Heads are published without them, as
they are the target's, so they are completed with these. Nothing is converted: the matrices keep the
types that they have in the target.

DFlash, DFlash2 and DSpark drafts are all of the architecture `dflash`, and propose a block at once:
one token of the text and masks, whose places attend to each other. In DFlash each place predicts by
itself. DSpark biases it by the likeliest token of the place before, and estimates how often it is
right. DFlash2 names a few candidates of each place, with scores by the candidate before them.

Reads headers; runs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.errors import ModelError, PlanError
from pipeinfer.files import write_atomically
from pipeinfer.models import gguf_parts
from pipeinfer.models.architectures import TABLE, declared
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
from pipeinfer.models.hub_files import BLOCK_FILES, EAGLE_FILE, MTP_FILE
from pipeinfer.models.layers import positive
from pipeinfer.models.shard import ShardSource
from pipeinfer.models.slice_parts import Sizes, Slice, numbers_of, sizes_of, slice_of
from pipeinfer.models.slices import cut

#: architectures whose head was shown to give llama.cpp's own proposals
WITH_HEAD = tuple(sorted(name for name, one in TABLE.items() if one.mtp))
#: names of matrices that have a row for each token
_BY_TOKEN = ("token_embd.weight", "output.weight", "nextn.embed_tokens.weight",
             "nextn.shared_head_head.weight")
SCRATCH = 64  #: further rows of a slice, for tokens of a text whose rows other slices have
_TILE = 32  #: rows that kernels take at once
_MARKS = (3, 4)  #: tokens that control something, and those that a user has defined
HEADS = {"eagle3": "--eagle", "dflash": "-md"}  #: in files of their own, and their options
_PROJECTION = "nextn.eh_proj.weight"


def has_head(model: ModelFile) -> bool:
    """Return whether a file has a head for further tokens, alone or behind its layers."""
    return any(f"blk.{layer}.{_PROJECTION}" in model.tensors
               for layer in range(model.n_layers, model.n_layers_all))


def check_whole(model: ModelFile, option: str = "-m") -> None:
    """Raise ModelError for a file that has a head and no layers that choose tokens.

    option: that names the file
    """
    if (wanted := HEADS.get(model.architecture, option)) != option:
        raise ModelError(f"{model.path}: is a prediction head ({model.architecture}): give the "
                         f"model that it belongs to with -m, and this file with {wanted}")
    if declared(model.architecture).assistant:
        raise ModelError(f"{model.path}: this assistant reads the KV cache of Gemma 4's last "
                         "layers, which a rank that drafts does not have: leave it out; prompt "
                         "lookup or a draft model drafts instead")
    if has_head(model) and not any(one.layer == 0 for one in model.tensors.values()):
        raise ModelError(f"{model.path}: has only a prediction head (MTP): give the model that it "
                         "belongs to, and leave this file next to it")


def head_of(model: ModelFile) -> ModelFile | None:
    """Return the file that has a model's head: its own, or one next to it; None without one.

    Only heads of known architectures with one layer are returned.
    """
    if not isinstance(model, ModelFile) or model.architecture not in WITH_HEAD:
        return None
    beside = () if has_head(model) else sorted(
        model.path.parent.glob(f"{MTP_FILE}*.gguf"))
    for one in (model, *map(_opened, beside)):
        if one is not None and has_head(one) and _belongs(one, model) \
                and one.n_layers_all - one.n_layers == 1:
            return one
    return None


def wanted_beside(path: Path) -> tuple[str, ...]:
    """Return how the names of heads start that a model's file lacks and can be used with."""
    model = _opened(path)
    if model is None or has_head(model):
        return ()
    own = (MTP_FILE,) if model.architecture in WITH_HEAD else ()
    return (*own, EAGLE_FILE, *BLOCK_FILES)


def _opened(path: Path) -> ModelFile | None:
    try:
        return ModelFile(path)
    except ModelError:
        return None


def _belongs(head: ModelFile, model: ModelFile) -> bool:
    """Whether a head has the sizes of a model. One of another training only guesses badly."""
    return (head.architecture, head.n_layers, head.n_embd, head.n_vocab) == (
        model.architecture, model.n_layers, model.n_embd, model.n_vocab)


def rows_of_slice(size: int, piece: Slice, n_vocab: int) -> tuple[int, int]:
    """Return the rows `[start, stop)` that a slice of a model has of a head's output matrix.

    size: rows of that. n_vocab: of the model
    """
    low, high = (size * end // n_vocab // _TILE * _TILE for end in piece.vocab)
    return low, size if piece.vocab[1] == n_vocab else high


def layer_parts(head: ModelFile, layer: int, piece: Slice, sizes: Sizes
                ) -> dict[str, gguf_parts.TensorPart]:
    """Return a slice's parts of a head's layer by tensors' names. sizes: of that layer.

    Raises PlanError where it cannot be cut so.
    """
    found = {}
    for tensor in head.tensors.values():
        if tensor.layer != layer:
            continue
        kind = tensor.name.split(".", 2)[2]
        columns = (sizes.dims(kind, piece) or ((0, None),))[0][1] or ()
        block = gguf_parts.block_size(tensor)
        if piece.among or any(end % block for own in columns for end in own):
            raise PlanError(f"{head.path.name}: {tensor.name} cannot be cut into the slices of the "
                            "model's layers")
        found[tensor.name] = slice_of(tensor, f"blk.{layer}", piece, sizes)
    return found


class SmallVocabulary(Struct, frozen=True):
    """The rows that a head's embedding and output matrix have.

    tokens: ids of the tokens that these belong to
    spare: further rows, for other tokens of a text
    """

    tokens: tuple[int, ...]
    spare: int

    @classmethod
    def of(cls, model: ModelFile, size: int) -> SmallVocabulary | None:
        """Return the tokens of a vocabulary of `size` rows; None where that would save little.

        model: has the tokenizer. Tokens that mark something, and those with the lowest ids: a
            tokenizer that joins pairs of bytes (BPE) numbers tokens by how frequent they were.
        """
        if not size or model.n_vocab < 2 * size:
            return None
        spare = size // 8
        kinds = model.get("tokenizer.ggml.token_type")
        marks = [i for i, kind in enumerate(kinds if isinstance(kinds, list) else ())
                 if kind in _MARKS][:size // 2]
        others = size - spare - len(marks)
        known = frozenset(marks)
        low = (i for i in range(model.n_vocab) if i not in known)
        return cls(tuple(sorted((*marks, *itertools.islice(low, others)))), spare)

    @property
    def size(self) -> int:
        """How many rows the matrices have."""
        return len(self.tokens) + self.spare

    def of_slice(self, start: int, stop: int) -> SmallVocabulary:
        """Return the vocabulary of a slice with rows `[start, stop)`, with further ones for the
        tokens that it only reads."""
        return SmallVocabulary(self.tokens[start:stop],
                               stop - max(start, min(stop, len(self.tokens))) + SCRATCH)

    def rows(self) -> tuple[tuple[int, int], ...]:
        """Return ranges of the matrices' rows; spare ones get bytes of the first rows."""
        bands: list[list[int]] = []
        for token in self.tokens:
            if bands and bands[-1][1] == token:
                bands[-1][1] += 1
            else:
                bands.append([token, token + 1])
        return (*((low, high) for low, high in bands), (0, self.spare))


class HeadSource(ShardSource):
    """The bytes of a head's file. Raises ModelError for a file without a head.

    small: the rows of its vocabulary; None: all
    target, piece: the model, and the slice of its layers for whose member this is; None: all of it.
        PlanError is raised where the head cannot be cut so
    """

    def __init__(self, model: ModelFile, small: SmallVocabulary | None = None,
                 target: ModelFile | None = None, piece: Slice | None = None) -> None:
        if not has_head(model):
            raise ModelError(f"{model.path}: has no head for further tokens (no {_PROJECTION})")
        own: dict[str, bytes] = {}
        cut: dict[str, gguf_parts.TensorPart] = {}
        named, here = self.by_token(model), small
        self.part: tuple[int, int] | None = None
        if piece and target:
            small = small or SmallVocabulary(tuple(range(model.n_vocab)), 0)
            self.part = rows_of_slice(small.size, piece, model.n_vocab)
            here, sizes = small.of_slice(*self.part), sizes_of(target)
            cut = layer_parts(model, model.n_layers, piece, sizes)
            own = numbers_of(target, piece, sizes)
        self.small = small
        parts = [rows_of(one, name, *here.rows()) if here and name in named
                 else cut.get(name) or all_of(one, name) for name, one in model.tensors.items()
                 if one.layer is None or one.layer >= model.n_layers]
        vocabulary = f"{model.architecture}.vocab_size"
        kept = [model.raw_entry(key) for key in model.meta_keys()
                if not key.startswith(("tokenizer.", "split.", "general.alignment"))
                and key != vocabulary and key not in own]
        self.header = header_of([
            *kept, *own.values(), entry(vocabulary, here.size if here else model.n_vocab),
            entry("tokenizer.ggml.model", "none")], parts)
        self.model, self.layers = model, (0, model.n_layers)
        self._parts = parts
        self.total = total_bytes(self.header, parts)
        self.name = f"{model.fingerprint[:32]}-head.gguf"

    @staticmethod
    def by_token(model: ModelFile) -> tuple[str, ...]:
        """Return the names of a head's matrices that have a row for each token."""
        return tuple(name for name, tensor in model.tensors.items() if (
            tensor.layer is None or tensor.layer >= model.n_layers)
            and name.removeprefix(f"blk.{tensor.layer}.") in _BY_TOKEN)


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


MOST = 64  #: places of a block
_MASK = "tokenizer.ggml.mask_token_id"


class BlockShape(Struct, frozen=True):
    """How a block is evaluated and read.

    size: its places
    mask: id of the mask's token
    first: the first place that predicts: 0 where the token of the text does, else 1
    candidates: of each place, in a lattice (DFlash2); 0: there is none
    confident: whether places estimate how often they are right (DSpark)
    chained: whether a place's result follows the likeliest token of the place before
    causal: whether places attend to those before them alone
    """

    size: int
    mask: int
    first: int = 1
    candidates: int = 0
    confident: bool = False
    chained: bool = False
    causal: bool = False

    @classmethod
    def of(cls, draft: ModelFile, target: ModelFile) -> BlockShape:
        """Return the shape of a draft's blocks, for a target.

        Raises ModelError for values with which llama.cpp would end the process, and for kinds that
        are not supported.
        """
        if draft.arch_get("hyper_connection.count"):
            raise ModelError(f"{draft.path}: a DSpark draft with DeepSeek V4's layers is not "
                             "supported: leave it out")
        size, mask = draft.arch_get("block_size"), draft.get(_MASK, target.get(_MASK))
        if not isinstance(size, int) or not 2 <= size <= MOST:
            raise _bad(draft, f"{BLOCKS}.block_size")
        if not isinstance(mask, int) or not 0 <= mask < target.n_vocab:
            raise _bad(draft, _MASK)
        markov, lattice = (f"{name}.weight" in draft.tensors
                           for name in ("markov_w1", "selector_hidden"))
        top: Any = draft.arch_get("selector_top_k") if lattice else 0
        if lattice and (not isinstance(top, int) or not 0 < top * (top + 1) <= draft.n_embd):
            raise _bad(draft, f"{BLOCKS}.selector_top_k")
        anchored = markov and draft.arch_get("sample_from_anchor", True) is True
        return cls(size, mask, int(not anchored), top,
                   markov and "conf_proj.weight" in draft.tensors, markov or lattice,
                   draft.arch_get("attention.causal") is True)


def _bad(draft: ModelFile, key: str) -> ModelError:
    return ModelError(f"{draft.path}: has no usable {key}: convert the draft again")
