"""A draft whose layers keep a state of the text, as a backend that takes rows back.

No part of a state can be removed. So the state behind each of the last rows of a sequence is kept,
as a copy under an id of its own; what lies further back is computed once more, by the next decode,
which may be repeated where it finds no cells. Results are those of other batches, so bits can
differ: for proposals, whose tokens the target checks.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field, structs

from pipeinfer.backends.base import Backend
from pipeinfer.core.types import ALL_SEQS, END, FloatArray, Rows, make_rows
from pipeinfer.errors import BackendError

COPIES = 6  #: states of each sequence that are kept besides the newest


class _Sequence(Struct):
    """One sequence. tokens: its text, of which its state has seen the first `seen`; the next decode
    computes the others, too. copies: ids of states, by their number of tokens, oldest first."""

    tokens: list[int] = field(default_factory=list)
    seen: int = 0
    copies: dict[int, int] = field(default_factory=dict)


class RewindingBackend:
    """A whole draft over a backend with `ids_for(n)` sequences, of which n can be used."""

    def __init__(self, backend: Backend, n_seq_max: int) -> None:
        self._backend = backend
        self.info = structs.replace(backend.info, n_seq_max=n_seq_max)
        self.capabilities = structs.replace(backend.capabilities, takes_back=True)
        self._sequences = [_Sequence() for _ in range(n_seq_max)]

    def decode(self, rows: Rows, hidden: FloatArray | None = None,
               should_stop: Callable[[], bool] | None = None) -> FloatArray | None:
        """Evaluate `rows`; it is not stopped, and rows are tokens with one id each.

        Of several rows of one sequence only the last may have an output.
        """
        del hidden, should_stop
        firsts = rows.first_positions()
        for seq_id, first in firsts.items():
            if first != len(self._sequences[seq_id].tokens):
                raise BackendError(f"a row of sequence {seq_id} at position {first} does not "
                                   "follow its text")
            self._catch_up(seq_id)
            self._keep(seq_id)
        try:
            return self._append(rows)
        except BackendError:  # it may be asked for again once there are cells
            for seq_id, first in firsts.items():
                self.seq_rm(seq_id, first, END)
            raise

    def _catch_up(self, seq_id: int) -> None:
        """Compute what the sequence's state has not seen of its text."""
        sequence = self._sequences[seq_id]
        owed, step = sequence.tokens[sequence.seen:], self.info.n_batch
        if not owed:
            return
        start = sequence.seen
        for first in range(start, start + len(owed), step):
            self._keep(seq_id)
            part = owed[first - start:first - start + step]
            self._append(make_rows([(token, first + i, (seq_id,), False)
                                    for i, token in enumerate(part)]))

    def _append(self, rows: Rows) -> FloatArray | None:
        alone = len(set(rows.seq_ids)) == 1
        if alone and len(rows) > 1:  # the last row is often what is taken back
            (seq_id,) = rows.seq_ids[0]
            self._compute(_part(rows, 0, len(rows) - 1))
            self._keep(seq_id)
            rows = _part(rows, len(rows) - 1, len(rows))
        return self._compute(rows)

    def _compute(self, rows: Rows) -> FloatArray | None:
        result = self._backend.decode(rows)
        for token, ids in zip(rows.lists.tokens, rows.seq_ids, strict=True):
            sequence = self._sequences[ids[0]]
            if sequence.seen == len(sequence.tokens):
                sequence.tokens.append(token)
            sequence.seen += 1
        return result

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` from cells; p1 is the end of the sequence."""
        del p1
        for one in range(len(self._sequences)) if seq_id == ALL_SEQS else (seq_id,):
            tokens = self._sequences[one].tokens
            if p0 < len(tokens):
                self._rewind(one, one, max(p0, 0))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to cells of `src`; `dst` is empty and p0 is 0."""
        del p0
        length = min(p1, len(self._sequences[src].tokens))
        if src != dst and length:
            self._rewind(src, dst, length)

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""
        for other in range(len(self._sequences)):
            if other != seq_id:
                self.seq_rm(other, 0, END)

    def close(self) -> None:
        """Release the model and its cache."""
        self._backend.close()

    def _keep(self, seq_id: int) -> None:
        """Copy the present state of a sequence, in place of its oldest copy."""
        sequence = self._sequences[seq_id]
        length, copies = sequence.seen, sequence.copies
        if not length or length in copies:
            return
        base = len(self._sequences) + seq_id * COPIES
        if len(copies) < COPIES:
            place = min(set(range(base, base + COPIES)) - set(copies.values()))
        else:
            place = copies.pop(min(copies))
            self._backend.seq_rm(place, 0, END)
        self._backend.seq_cp(seq_id, place, 0, length)
        copies[length] = place

    def _rewind(self, src: int, dst: int, length: int) -> None:
        """Make the first `length` tokens of `src` the text of `dst`."""
        source, target = self._sequences[src], self._sequences[dst]
        known = max((n for n in source.copies if n <= length), default=0)
        origin = source.copies.get(known, -1)
        if source.seen <= length:
            known, origin = source.seen, src
        target.tokens = source.tokens[:length]
        if origin == dst:
            return
        if src == dst:
            for n in [n for n in source.copies if n > length or not length]:
                self._backend.seq_rm(source.copies.pop(n), 0, END)
            self._backend.seq_rm(dst, 0, END)
        if known:
            self._backend.seq_cp(origin, dst, 0, known)
        target.seen = known


def _part(rows: Rows, start: int, stop: int) -> Rows:
    tokens, positions, outputs = rows.lists
    return make_rows([(tokens[i], positions[i], rows.seq_ids[i], outputs[i])
                      for i in range(start, stop)])


def ids_for(n_seq_max: int) -> int:
    """Return the number of sequences that the backend below needs."""
    return n_seq_max * (1 + COPIES)
