"""A head of the target on llama.cpp: MTP or EAGLE-3 (`strategies.proposers.target_head`), or DFlash
(`strategies.proposers.dflash`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.core.types import END, Columns, FloatArray, Rows, make_rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding
from pipeinfer.llama.library import clear_log, last_log
from pipeinfer.models.heads import SCRATCH, BlockShape, HeadSource, SmallVocabulary
from pipeinfer.models.shard import ShardSource


class LlamaHead(LlamaCppBackend):
    """A head as a backend: see `target_head.Head`."""

    shift = 0
    _slots: _Slots | None = None

    @classmethod
    def open(cls, source: ShardSource | Path, layers: int, sizes: Mapping[str, Any], threads: int,
             options: LlamaOptions) -> LlamaHead:
        """Load a head.

        source: its file
        layers: how many llama.cpp counts in it: those of an MTP head's model, 1 for EAGLE-3
        sizes: n_ctx, n_seq_max and n_batch
        options: with `head` set
        Raises ModelError and BackendError.
        """
        head = cls.load(source, layers=(0, layers), n_layers_total=layers, first=True, last=True,
                        n_threads=threads, options=options, **sizes)
        binding.want_final_rows(head._ctx, True, False)
        head.shift = -1 if options.head == "eagle3" else 0
        if isinstance(source, HeadSource) and source.small is not None:
            head._slots = _Slots(source, source.small, head._model)
            spare = source.small.spare or head.info.n_batch  # none: it has all tokens
            head.info = structs.replace(
                head.info, n_vocab=source.model.n_vocab,
                n_batch=min(head.info.n_batch, spare, SCRATCH if source.part else spare))
        return head

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        """Evaluate `rows`. Tokens outside of a small vocabulary have logits of -inf. A slice of a
        head with one gives its own tokens' logits alone: see `of_slice`."""
        if (slots := self._slots) is None:
            return super().decode(rows, hidden, should_stop)
        tokens, positions, outputs = rows.lists
        found = super().decode(Rows.of(Columns(slots.of(tokens), positions, outputs), rows.seq_ids),
                               hidden, should_stop)
        return None if found is None else slots.spread(found)

    def of_slice(self, found: FloatArray) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Return the tokens of which a slice has rows, and their logits, for what it decoded."""
        if self._slots is not None:
            return self._slots.own, found
        own = np.flatnonzero(found[:1].max(0, initial=-np.inf) > -np.inf)
        return own, found[:, own]

    @property
    def tapped(self) -> FloatArray:
        """Its own hidden rows after the last decode, float32[n, n_embd]."""
        return self._own_rows(self._last[0])

    def encode(self, rows: FloatArray) -> FloatArray:
        """Return the hidden rows, float32[n, n_embd], for rows of the target. Raises
        BackendError."""
        if self.options.head != "eagle3":
            return rows
        found = []
        for start in range(0, len(rows), self.info.n_batch):
            part = np.ascontiguousarray(rows[start : start + self.info.n_batch], np.float32)
            self._batch.fill_vectors(part)
            if status := binding.llama_encode(self._ctx, self._batch.columns):
                raise BackendError(f"llama_encode failed with status {status}: {last_log()}")
            found.append(self._own_rows(len(part)))
        return np.concatenate(found)

    def _own_rows(self, count: int) -> FloatArray:
        found = binding.get_final_rows(self._ctx)
        if not found:
            raise BackendError("llama.cpp gave no rows of the head")
        flat = np.ctypeslib.as_array(found, (count * self.info.n_embd,))
        rows: FloatArray = flat.reshape(count, -1).copy()
        return rows


class LlamaBlocks(LlamaCppBackend):
    """A DFlash draft as a backend: see `dflash.BlockBackend`."""

    shape: BlockShape

    @classmethod
    def open(cls, path: Path, shape: BlockShape, layers: int, sizes: Mapping[str, Any],
             threads: int, options: LlamaOptions) -> LlamaBlocks:
        """Load a completed file; arguments and errors as of `LlamaHead.open`."""
        draft = cls.load(path, layers=(0, layers), n_layers_total=layers, first=True, last=True,
                         n_threads=threads, options=options, **sizes)
        draft.shape = shape
        binding.llama_set_causal_attn(draft._ctx, shape.causal)
        if shape.confident or shape.candidates:
            binding.want_final_rows(draft._ctx, True, not shape.candidates)
        return draft

    def insert(self, seq_id: int, first: int, rows: FloatArray) -> None:
        """Make cells of rows of the target, float32[n, t], at positions from `first` on.

        Raises BackendError, and leaves no cell of them, where there is no place.
        """
        part = np.ascontiguousarray(rows, np.float32)
        self._batch.fill_vectors(part, seq_id, first)
        clear_log()
        if status := int(binding.llama_decode(self._ctx, self._batch.columns)):
            self.seq_rm(seq_id, first, END)
            raise BackendError(f"llama_decode failed with status {status}: {last_log()}")

    def block(self, seq_id: int, first: int, token: int) -> tuple[FloatArray, FloatArray | None]:
        """Evaluate a block behind the rows of a sequence, and remove its cells.

        first: position of `token`, which follows those rows
        Returns the logits of the places that predict, float32[n, n_vocab], and how often each is
        right, float32[n]; None where the draft does not estimate that. Raises BackendError.
        """
        shape = self.shape
        tokens = [token] + [shape.mask] * (shape.size - 1)
        try:
            logits = self.decode(make_rows([
                (one, first + k, (seq_id,), True) for k, one in enumerate(tokens)]))
            assert logits is not None
            if not (shape.confident or shape.candidates):
                return logits[shape.first:].copy(), None
            flat = np.ctypeslib.as_array(binding.get_final_rows(self._ctx),
                                         (shape.size * self.info.n_embd,))
            rows = flat.reshape(shape.size, -1)[shape.first:]
            if shape.candidates:
                return _along(rows, shape.candidates, self.info.n_vocab), None
            return logits[shape.first:].copy(), rows[:, 0].copy()
        finally:
            self.seq_rm(seq_id, first, END)


def _along(lattice: FloatArray, count: int, n_vocab: int) -> FloatArray:
    """Return logits float32[n, n_vocab] along the likeliest path of DFlash2's lattice: in each row
    the ids of `count` candidates, and their scores behind each candidate of the place before."""
    logits = np.full((len(lattice), n_vocab), -np.inf, np.float32)
    best = 0
    for row, place in zip(lattice, logits, strict=True):
        scores = row[count * (1 + best) : count * (2 + best)]
        place[row[:count].astype(int)] = scores
        best = int(scores.argmax())
    return logits


class _Slots:
    """Which rows of a head's matrices belong to which tokens.

    A token without a row gets a spare one when it appears in a text: that of the token that has not
    appeared for the longest time. All slices find the same rows for all tokens, so that no two
    propose the same token; tokens of other slices get rows that a slice only reads.
    """

    def __init__(self, source: HeadSource, small: SmallVocabulary, model: Any) -> None:
        self._slot = dict(zip(small.tokens, range(len(small.tokens)), strict=True))
        self._token = np.array(small.tokens, np.int64)  # of each row that has one
        self._n_vocab, self._most = source.model.n_vocab, small.size
        self._start, self._stop = source.part or (0, small.size)
        self._sliced = source.part is not None
        self._borrowed: OrderedDict[int, int] = OrderedDict()
        self._elsewhere: OrderedDict[int, int] = OrderedDict()
        self._matrices = []
        for name in source.by_token(source.model):
            tensor = source.model.tensors[name]
            self._matrices.append((
                binding.get_tensor(model, name.encode()),
                np.memmap(source.model.paths[tensor.part], np.uint8, "r", tensor.offset,
                          (self._n_vocab, tensor.nbytes // self._n_vocab))))

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return the rows of tokens; there must not be more than there are spare rows."""
        return [self._row(token, slot if (slot := self._slot.get(token)) is not None
                          else self._borrow(token)) for token in tokens]

    @property
    def own(self) -> npt.NDArray[np.int64]:
        """The tokens of the rows of the output matrix."""
        return self._token[self._start : self._stop]

    def spread(self, found: FloatArray) -> FloatArray:
        """Return logits float32[n, n_vocab] for those of the rows; of a slice's these alone."""
        found = found[:, :len(self.own)]
        if self._sliced:
            return found
        logits = np.full((len(found), self._n_vocab), -np.inf, np.float32)
        logits[:, self.own] = found
        return logits

    def _row(self, token: int, slot: int) -> int:
        """The row of a token in this slice's matrices."""
        if self._start <= slot < self._stop:
            return slot - self._start
        if (row := self._elsewhere.get(token)) is not None:
            self._elsewhere.move_to_end(token)
            return row
        row = self._stop - self._start + len(self._elsewhere)
        if len(self._elsewhere) == SCRATCH:
            _, row = self._elsewhere.popitem(last=False)
        self._elsewhere[token] = row
        self._write(token, row)
        return row

    def _borrow(self, token: int) -> int:
        if (slot := self._borrowed.get(token)) is not None:
            self._borrowed.move_to_end(token)
            return slot
        if len(self._token) < self._most:
            slot, self._token = len(self._token), np.append(self._token, token)
        else:
            _, slot = self._borrowed.popitem(last=False)
            self._token[slot] = token
        self._borrowed[token] = slot
        if self._start <= slot < self._stop:
            self._write(token, slot - self._start)
        return slot

    def _write(self, token: int, own: int) -> None:
        """Give row `own` of the matrices to a token."""
        for matrix, rows in self._matrices:
            row = np.ascontiguousarray(rows[token])
            binding.ggml_backend_tensor_set(matrix, row.ctypes.data, own * row.nbytes, row.nbytes)
