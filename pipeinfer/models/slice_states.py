"""The part of a layer with a state that a slice takes: some heads of its delta net.

Several value heads read a key head. In most files there are as many groups of value heads, of which
each has one for every key head, so what a slice has of the values lies in bands. In qwen3next those
of a key head follow each other.

    rows      attn_qkv and ssm_conv1d: queries, keys and values of its heads; attn_gate, ssm_alpha,
              ssm_beta, ssm_ba, ssm_dt, ssm_a: its value heads
    columns   ssm_out: its value heads; its product is the partial result of the sum
    whole     ssm_norm

Handles tensors of one layer; `slice_parts` has the layers with attention and the feed forward.
"""

from __future__ import annotations

import math

from msgspec import Struct

from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import TensorPart, bands_of, columns_in_bands
from pipeinfer.models.slice_experts import Range, common_block, tensors_of

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_TOGETHER = ("qwen3next",)  #: whose value heads of a key head follow each other


class DeltaNet(Struct, frozen=True):
    """The delta net of a model's layers.

    keys: key heads
    groups: value heads per key head
    size: elements of a head
    block: columns of ssm_out can be cut at multiples of this in all layers
    together: whether the value heads of a key head follow each other
    """

    keys: int
    groups: int
    size: int
    block: int
    together: bool = False

    @property
    def step(self) -> int:
        """The number of key heads at whose multiples it can be cut."""
        each = self.size * (self.groups if self.together else 1)
        return math.lcm(self.block, each) // each

    @property
    def most(self) -> int:
        """The most slices with some heads each."""
        return max(1, self.keys // self.step)

    def bands(self, heads: Range, size: int, start: int = 0) -> tuple[Range, ...]:
        """Return where the value heads of key heads `[a, b)` lie, from `start` on; size: elements
        of a head.
        """
        low, high = heads
        if self.together:
            return ((start + low * self.groups * size, start + high * self.groups * size),)
        firsts = [start + group * self.keys * size for group in range(self.groups)]
        return tuple((first + low * size, first + high * size) for first in firsts)

    def shapes(self, width: int, kernel: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors by their names.

        width: of the model
        kernel: elements of the convolution's kernel
        """
        values = self.keys * self.groups
        channels = (2 * self.keys + values) * self.size
        return {
            "attn_qkv.weight": (width, channels), "ssm_conv1d.weight": (kernel, channels),
            "attn_gate.weight": (width, values * self.size),
            "ssm_alpha.weight": (width, values), "ssm_beta.weight": (width, values),
            "ssm_ba.weight": (width, 2 * values),
            "ssm_dt.bias": (values,), "ssm_a": (values,), "ssm_norm.weight": (self.size,),
            "ssm_out.weight": (values * self.size, width)}

    def entries(self, heads: Range) -> dict[str, int]:
        """Return the metadata of a slice with key heads `[a, b)`."""
        count = heads[1] - heads[0]
        values = count * self.groups
        return {"ssm.group_count": count, "ssm.time_step_rank": values,
                "ssm.inner_size": values * self.size}


def delta_net_of(model: ModelFile) -> DeltaNet | None:
    """Return the delta net of a model's layers, None if they have none."""
    if model.architecture not in DELTA_NETS:
        return None
    keys, values, size = (int(str(model.arch_get(f"ssm.{name}", 1))) for name in (
        "group_count", "time_step_rank", "state_size"))
    return DeltaNet(keys, values // max(1, keys), size, common_block(tensors_of(model, "ssm_out")),
                    model.architecture in _TOGETHER)


def part_of(tensor: TensorInfo, name: str, kind: str, net: DeltaNet, heads: Range
            ) -> TensorPart | None:
    """Return the slice's part of a tensor; None for one that is no part of a delta net.

    name: in the new file
    kind: the tensor's name in its layer
    heads: key heads `[a, b)` of the slice
    """
    size, half = net.size, net.keys * net.size
    low, high = heads[0] * size, heads[1] * size
    if kind == "ssm_out.weight":
        return columns_in_bands(tensor, name, *net.bands(heads, size))
    if kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return bands_of(tensor, name, (low, high), (half + low, half + high),
                        *net.bands(heads, size, 2 * half))
    if kind == "attn_gate.weight":
        return bands_of(tensor, name, *net.bands(heads, size))
    if kind == "ssm_ba.weight":  # of each key head both rates of its value heads
        return bands_of(tensor, name, *net.bands(heads, 2))
    if kind in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"):
        return bands_of(tensor, name, *net.bands(heads, 1))
    return None
