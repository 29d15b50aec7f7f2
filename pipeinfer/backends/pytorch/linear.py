"""Products of a shard's layers: in tiles of a fixed number of rows, and in parts of a sum.

Both are torch's own linear layers under another class, so that transformers' code calls them
unchanged. Knows no layers beyond their number, no cells and no ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from torch.nn.functional import linear

from pipeinfer.backends.llamacpp.layer_probe import PartSum, place_of


class Left(Exception):
    """A sum said to leave the decode. Not an error: whoever decodes catches it."""


class Tiling(Struct):
    """Rows of one product (0: all together), and whether it holds for the decode at hand."""

    rows: int
    active: bool = False

    def padded(self, n: int) -> int:
        """Rows that a decode of `n` really computes."""
        return -(-n // self.rows) * self.rows if self.active else n


class Summing(Struct):
    """Who adds up parts (None: parts are taken for sums), and the real rows of the decode at hand.
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
    """A linear layer with some columns of the whole one: gives a part of a sum over slices, and the
    bias is added after it."""

    summing: Summing
    place: int

    def forward(self, x: Any) -> Any:
        """[1, n, in] -> [1, n, out]. Raises Left. Rows of padding are not summed up: the slices of
        a stage may have different tiles."""
        out, summing = self._product(x, None), self.summing
        if summing.sums is not None:
            mine = out[0, :summing.rows]
            part = mine.to("cpu", torch.float32).contiguous()
            if not summing.sums.add(part.numpy().reshape(-1), self.place):
                raise Left
            if part.data_ptr() != mine.data_ptr():
                mine.copy_(part)
        return out if self.bias is None else out + self.bias


def tile(module: Any, tiling: Tiling) -> None:
    """Have all products within a module made in tiles."""
    for part in module.modules():
        if type(part) is torch.nn.Linear:
            part.__class__ = TiledLinear
            part.tiling = tiling


def sum_up(layer: Any, index: int, summing: Summing) -> None:
    """A tiled decoder layer, number `index` of the model, is a slice: its two sums are made by
    `summing`."""
    for part, feed_forward in ((layer.self_attn.o_proj, False), (layer.mlp.down_proj, True)):
        part.__class__ = SummedLinear
        part.summing, part.place = summing, place_of(index, feed_forward=feed_forward)
