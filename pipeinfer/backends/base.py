"""The interface between a stage (or the draft) and the library that computes layers.

A backend evaluates rows over a cache of cells and edits the cells' sequence ids. It is independent
of runs, requests, ranks and policies. The contract of each method includes the state of the cache
after a failure or a stop, because cancellation depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from msgspec import Struct

from pipeinfer.core.types import FloatArray, Rows, SeqCopy, SeqJoin, SeqKeep, SeqOp, SeqRemove
from pipeinfer.errors import BackendError

ALL_IDS = 255  #: llama.cpp has 256 sequence ids, one of which `llamacpp.cells` needs
#: why a backend without `separate_views` refuses a decode
NO_VIEWS = "this proposer's rows need the torch backend: add --backend torch"


class ShardInfo(Struct, frozen=True):
    """The properties of a loaded shard.

    architecture: of the model, as its file names it
    layers: `[start, stop)` of the whole model's layers
    n_layers_total: layers of the whole model
    first: whether the shard holds the embedding
    last: whether the shard holds the output head
    n_embd: elements of an activation
    n_vocab: tokens of the vocabulary
    n_ctx: cells of the cache
    n_seq_max: usable sequence ids are `0..n_seq_max-1`
    n_batch: maximum rows of one decode
    weight_bytes: memory of the weights, in bytes
    cache_bytes: memory of the cache, in bytes
    """

    architecture: str
    layers: tuple[int, int]
    n_layers_total: int
    first: bool
    last: bool
    n_embd: int
    n_vocab: int
    n_ctx: int
    n_seq_max: int
    n_batch: int
    weight_bytes: int
    cache_bytes: int


class Capabilities(Struct, frozen=True):
    """What a backend supports beyond rows that continue their sequence without a gap.

    free_positions: gaps and overlaps of positions within a sequence
    separate_views: a row may attend to ids that it is not stored under (`Rows.views`), and
        sequences can be joined (`seq_join`)
    embedding_rows: a row given as a vector, on the first shard
    stops_inside: a decode can be stopped at a layer boundary
    takes_back: a part of a sequence can be removed or copied; otherwise whole ones alone
    """

    free_positions: bool
    separate_views: bool
    embedding_rows: bool
    stops_inside: bool
    takes_back: bool = True


class Backend(Protocol):
    """One shard of the target, or a whole draft model, with its cache."""

    info: ShardInfo
    capabilities: Capabilities

    def decode(
        self,
        rows: Rows,
        hidden: FloatArray | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FloatArray | None:
        """Evaluate `rows`; each makes one cell.

        rows: positions of each id must continue that id without a gap; an empty id may start
            anywhere. The ids of a row are a subset of those of every earlier row of the batch that
            shares one of them
        hidden: float32[n, n_embd], the result of the previous shard; None on the first shard
        should_stop: is called after every layer that more work of this shard follows (not before
            the first: the caller can do that). Once it returns True, the result is None and *no*
            cell of these rows remains

        Returns float32[n, n_embd] (the residual stream after the shard's last layer) or, on the
        last shard, float32[k, n_vocab] logits of the k rows with `rows.outputs`, in row order (an
        empty k gives shape (0, n_vocab)). The array belongs to the caller, except logits of a
        backend with `LlamaOptions.lend`: the next decode overwrites those. A row's logits do not
        depend on the other rows up to the backend's exact width, see `exact_width.exact_width`.

        Raises BackendError when the rows cannot be evaluated (no free cells, a broken sequence); no
        cell of these rows remains then. An exception of `should_stop` is re-raised after the same
        clean-up.
        """

    def seq_rm(self, seq_id: int, p0: int, p1: int) -> None:
        """Remove `seq_id` (ALL_SEQS: every id) from cells in `[p0, p1)`.

        Ids and ranges without cells are no error.
        """

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add `dst` to the cells of `src` in `[p0, p1)`. Edits metadata only; values do not move.

        `dst` must hold no cell there yet, or its rows would attend to positions twice.
        """

    def seq_keep(self, seq_id: int) -> None:
        """Remove every other id from every cell, and free the cells without `seq_id`."""

    def close(self) -> None:
        """Release the model and its cache. May be called twice."""


def apply(backend: Backend, op: SeqOp) -> None:
    """Execute a sequence operation. Raises BackendError for a join on a backend without it."""
    match op:
        case SeqRemove(seq_id, p0, p1):
            backend.seq_rm(seq_id, p0, p1)
        case SeqCopy(src, dst, p0, p1):
            backend.seq_cp(src, dst, p0, p1)
        case SeqKeep(seq_id):
            backend.seq_keep(seq_id)
        case SeqJoin(src, dst, order):
            join = getattr(backend, "seq_join", None)
            if join is None:
                raise BackendError(f"{type(backend).__name__} cannot join sequences; use the "
                                   "torch backend")
            join(src, dst, order)


def tap(backend: Backend, layers: tuple[int, ...]) -> Callable[[], FloatArray]:
    """Let a backend keep the inputs of layers from now on.

    layers: of the whole model, in order; those of other shards are ignored. The number of layers
        stands for what the output matrix reads
    Returns a function that returns those of the last decode, float32[n, layers here * n_embd], of
    all its rows. Raises BackendError on a backend without them.
    """
    ask: Callable[[tuple[int, ...]], None] | None = getattr(backend, "tap", None)
    if ask is None:
        raise BackendError(f"{type(backend).__name__} does not give the rows that a head reads; "
                           "use llama.cpp")
    ask(layers)
    return lambda: cast("Any", backend).tapped


def norms(backend: Backend, rows: Rows, hidden: FloatArray | None = None) -> FloatArray:
    """Evaluate rows up to the norm before the output head, on a backend that has the last shard.

    rows, hidden: as for `Backend.decode`; at least one of the k rows with `rows.outputs`
    Returns float32[k, n_embd]. Raises BackendError on a backend without it.
    """
    found: Callable[..., FloatArray] | None = getattr(backend, "norms", None)
    if found is None:
        raise BackendError(f"{type(backend).__name__} computes no embeddings; use llama.cpp")
    return found(rows, hidden)
