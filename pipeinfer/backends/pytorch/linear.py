"""Linear layers of a shard: products in tiles of a fixed number of rows, and partial results.

Both are torch's own linear layers under another class, so that transformers' code calls them
unchanged. Independent of cells and ranks; a layer is only a number here.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch.nn.functional import linear

from pipeinfer.backends.llamacpp.eval_callback import PartSum, place_of


class DecodeAborted(Exception):
    """A sum returned False, so the decode is left. Not an error: `TorchBackend` handles it."""


class Tiling(Struct):
    """The tiling of products.

    rows: of one product; 0: all together
    active: whether it applies to the present decode
    """

    rows: int
    active: bool = False

    def padded(self, n: int) -> int:
        """Return the number of rows that a decode of `n` rows computes."""
        return -(-n // self.rows) * self.rows if self.active else n


class Summing(Struct):
    """The all-reduce of partial results.

    sums: computes the sums; None: each partial result is used as the sum
    rows: of the present decode, without padding
    """

    sums: PartSum | None = None
    rows: int = 0


class TiledLinear(torch.nn.Linear):  # type: ignore[misc]
    """A linear layer whose products have a fixed number of rows while its tiling is active."""

    tiling: Tiling

    def forward(self, x: Any) -> Any:
        """[1, n, in] -> [1, n, out]; n is a multiple of the tile when the tiling is active."""
        return self._product(x, self.bias)

    def _product(self, x: Any, bias: Any) -> Any:
        tile = self.tiling.rows
        if not self.tiling.active or x.shape[-2] == tile:
            return linear(x, self.weight, bias)
        parts = [linear(part, self.weight, bias) for part in x.split(tile, -2)]
        return torch.cat(parts, -2)


class SummedLinear(TiledLinear):
    """A linear layer with some columns of the whole one.

    Its product is a partial result of a sum over slices; the bias is added after the sum.
    """

    summing: Summing
    place: int

    def forward(self, x: Any) -> Any:
        """[1, n, in] -> [1, n, out]. Raises DecodeAborted where the decode has to be left.

        Padding is not summed: the slices of a stage may have different tiles.
        """
        out, summing = self._product(x, None), self.summing
        if summing.sums is not None:
            mine = out[0, :summing.rows]
            part = mine.to("cpu", torch.float32).contiguous()
            if not summing.sums.add(part.numpy().reshape(-1), self.place):
                raise DecodeAborted
            if part.data_ptr() != mine.data_ptr():
                mine.copy_(part)
        return out if self.bias is None else out + self.bias


def tile(module: Any, tiling: Tiling) -> None:
    """Let all linear layers in a module compute in tiles."""
    for part in module.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = TiledLinear
            part.tiling = tiling


def sum_up(layer: Any, index: int, summing: Summing) -> None:
    """Make a tiled decoder layer a slice, whose two sums `summing` computes.

    index: of the layer in the model
    """
    for part, feed_forward in ((layer.self_attn.o_proj, False), (layer.mlp.down_proj, True)):
        part.__class__ = SummedLinear
        part.summing, part.place = summing, place_of(index, feed_forward=feed_forward)
