"""The toy model cut into slices: each has some columns of what attention and the feed forward put
out, and gives parts that are to be summed up."""

from __future__ import annotations

import itertools

import numpy as np

from pipeinfer.backends.llamacpp.eval_callback import place_of
from pipeinfer.backends.team import TeamShape
from tests.kit.toy import ToyBackend, _normed, _weights


def bounds(size, count):
    """`count` ranges of `[0, size)`."""
    cuts = np.linspace(0, size, count + 1).astype(int).tolist()
    return list(itertools.pairwise(cuts))


class ToySlice(ToyBackend):
    """Slice `index` of `count`; see `backends.composed.SliceBackend`."""

    @classmethod
    def of(cls, spec, start, stop, index, count, **sizes):
        found = cls.load(spec, start, stop, **sizes)
        found.index, found.count, found.sums = index, count, None
        found.info = type(found.info)(**{
            name: getattr(found.info, name) for name in found.info.__slots__} | {"first": False})
        return found

    def sum_with(self, sums):
        self.sums = sums

    def _compute(self, rows, hidden, should_stop, cells):
        assert should_stop is None
        stream = np.array(hidden, np.float32)
        own = slice(*bounds(self.spec.n_embd, self.count)[self.index])
        wide = slice(*bounds(2 * self.spec.n_embd, self.count)[self.index])
        for i, layer in enumerate(self._layers):
            part = np.empty_like(stream)
            for j, mixed in enumerate(self._attended(i, rows, stream, cells)):
                part[j] = layer.output[:, own].dot(mixed[own])
            if not self._summed(part, i, feed_forward=False):
                return None
            stream += part
            for j, row in enumerate(stream):
                inner = np.tanh(layer.up.dot(_normed(row.astype(np.float64))))
                part[j] = layer.down[:, wide].dot(inner[wide])
            if not self._summed(part, i, feed_forward=True):
                return None
            stream += part
        if not self.info.last:
            return stream
        whole = self._logits(rows, stream)
        return np.ascontiguousarray(
            whole[:, slice(*bounds(self.spec.n_vocab, self.count)[self.index])])

    def _summed(self, part, layer, *, feed_forward):
        if self.sums is None:
            return True
        flat = part.reshape(-1)
        return self.sums.add(flat, place_of(self.info.layers[0] + layer,
                                            feed_forward=feed_forward))


class ToyEmbedding:
    """What a first stage looks up; places are added by the slices' model, so here, too."""

    def __init__(self, spec):
        self._table, _, _ = _weights(spec.n_vocab, spec.n_layers, spec.n_embd, spec.seed)

    def rows(self, tokens):
        return self._table[tokens].astype(np.float32)


def shape_of(spec, holders, member, *, kind="f32", last=True, n_batch=64):
    """The team's shape for a toy."""
    count = sum(map(len, holders))
    vocabulary = tuple(bounds(spec.n_vocab, count)) if last else ()
    return TeamShape(holders, member, kind, max(n_batch * spec.n_embd, spec.n_vocab), vocabulary)
