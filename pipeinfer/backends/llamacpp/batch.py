"""The columns of llama.cpp's `llama_batch`, allocated once and filled for each decode."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pipeinfer.backends.base import ShardInfo
from pipeinfer.backends.llamacpp.places import Places
from pipeinfer.core.types import FloatArray, Rows
from pipeinfer.errors import BackendError
from pipeinfer.llama import binding


class RowBatch:
    """Up to `info.n_batch` rows; numpy fills the columns and llama.cpp reads them.

    sections: whether an embedding row has four positions (M-RoPE).
    enters: whether hidden rows enter the graph elsewhere than as llama.cpp's embedding rows.
    reads: whether layers read the tokens of hidden rows as well.
    both: whether each row has a token and a hidden row, as those of a head have.
    """

    def __init__(self, info: ShardInfo, *, sections: bool, enters: bool, reads: bool = False,
                 both: bool = False) -> None:
        self._info, self._sections, self._enters = info, sections, enters
        self._both, self._reads = both, reads or both
        self.width = info.n_embd  #: of a picture's rows, in elements
        self.places: Places | None = None  #: positions, where they differ from places
        n = info.n_batch
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(4 * n if sections else n, np.int32)
        self._n_ids = np.zeros(n, np.int32)
        self._ids = np.zeros((n, info.n_seq_max), np.int32)
        self._id_rows = (self._ids.ctypes.data + self._ids.strides[0] * np.arange(n)).astype(
            np.uintp
        )
        self._flags = np.zeros(n, np.int8)
        # memoryviews, because numpy is slow for single numbers
        self._token_memory, self._position_memory = self._tokens.data, self._positions.data
        self._id_memory, self._n_id_memory = self._ids.data, self._n_ids.data
        self._flag_memory = self._flags.data
        self.columns = batch = binding.llama_batch()  #: the argument of `llama_decode`
        ctypes.memset(ctypes.byref(batch), 0, ctypes.sizeof(batch))
        for field, array in (
            ("pos", self._positions),
            ("n_seq_id", self._n_ids),
            ("seq_id", self._id_rows),
            ("logits", self._flags),
        ):
            setattr(batch, field, self._pointer(field, array.ctypes.data))
        self._token_pointer = self._pointer("token", self._tokens.ctypes.data)

    def fill(self, rows: Rows, hidden: FloatArray | None) -> FloatArray | None:
        """Write the rows; return the array that must outlive the decode.

        hidden: float32[len(rows), n_embd], or None for rows of tokens. Rows of a picture on the
            first shard may be wider.
        Raises BackendError for bad sequence ids, a wrong shape, or tokens on a later shard.
        """
        n, info, batch = len(rows), self._info, self.columns
        tokens, positions, outputs = rows.lists
        if self.places is not None:
            positions = self.places.positions(rows)
        media = rows.media
        for i, ids in enumerate(rows.seq_ids):
            # llama.cpp would take one id more, the grave
            if not 0 < len(ids) <= info.n_seq_max or max(ids) >= info.n_seq_max or min(ids) < 0:
                raise BackendError(f"row {i} has bad sequence ids {ids}")
            for k, seq_id in enumerate(ids):
                self._id_memory[i, k] = seq_id
            self._n_id_memory[i] = len(ids)
            self._position_memory[i] = positions[i]
            # Not the last: every row is an output, or the last layer would keep flagged rows only.
            self._flag_memory[i] = outputs[i] or not info.last
            read = media is None and (hidden is None or self._reads)
            self._token_memory[i] = tokens[i] if read else 0
        batch.n_tokens = n
        if hidden is None:
            if not info.first or media is not None:
                raise BackendError("this shard needs the previous shard's hidden rows")
            batch.token, batch.embd = self._token_pointer, None
            return None
        shown = media is not None and info.first
        width = self.width if shown else info.n_embd
        if hidden.shape != (n, width):
            raise BackendError(f"hidden rows of shape {hidden.shape}, not ({n}, {width})")
        if self._sections:  # as llama.cpp fills them for rows of tokens
            self._positions[: 3 * n] = np.tile(np.array(positions, np.int32), 3) \
                if media is None or media.places is None else (media.places + positions[0]).ravel()
            self._positions[3 * n : 4 * n] = 0
        keep = np.ascontiguousarray(hidden, np.float32)
        if info.first and width < self.width:  # what later layers add to pictures only
            keep = np.pad(keep, ((0, 0), (0, self.width - width)))
        # a picture's rows enter as embeddings, or the graph would look tokens up as well
        enters = self._enters and not shown
        batch.token = self._token_pointer if enters or self._both else None
        batch.embd = None if enters else self._pointer("embd", keep.ctypes.data)
        return keep

    def fill_vectors(self, vectors: FloatArray, seq_id: int = -1, first: int = 0) -> None:
        """Write rows of any width, float32[n, m], which must outlive the call.

        seq_id: whose cells they become, without results; -1: they are for an encoder
        first: position of the first row
        """
        n, batch = len(vectors), self.columns
        self._positions[:n] = np.arange(first, first + n)
        if self._sections:
            self._positions[: 4 * n] = np.tile(self._positions[:n], 4) * (np.arange(4 * n) < 3 * n)
        self._n_ids[:n], self._flags[:n] = 1, seq_id < 0
        # without one: an id without cells, whose positions may be any
        self._ids[:n, 0] = self._info.n_seq_max if seq_id < 0 else seq_id
        batch.n_tokens, batch.token = n, None
        batch.embd = self._pointer("embd", vectors.ctypes.data)

    def _pointer(self, field: str, address: int) -> Any:
        kind: Any = dict(self.columns._fields_)[field]
        return ctypes.cast(address, kind)
