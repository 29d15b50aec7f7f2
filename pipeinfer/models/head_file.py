"""The file of a model's own head for further tokens (MTP), cut out of the model's file.

A head is the layers behind those that choose tokens, with the embedding, the last norm and the
output matrix. llama.cpp loads a file of these alone. Some publishers provide it as a file next to
the model, `mtp-*.gguf`. With a vocabulary of 150,000 tokens or more, most of the time of a head is
that of the output matrix, so it may have a smaller one. Slices of it are cut as those of the
model's layers are. Reads headers; runs nothing.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from msgspec import Struct

from pipeinfer.errors import ModelError, PlanError
from pipeinfer.models import gguf_parts
from pipeinfer.models.architectures import TABLE, declared
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import all_of, entry, header_of, rows_of, total_bytes
from pipeinfer.models.hub_files import BLOCK_FILES, EAGLE_FILE, MTP_FILE
from pipeinfer.models.shard import ShardSource
from pipeinfer.models.slice_parts import Sizes, Slice, numbers_of, sizes_of, slice_of

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
