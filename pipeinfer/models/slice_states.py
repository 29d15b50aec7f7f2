"""The part of a layer with a state that a slice takes: some heads of its delta net or scan.

Several value heads read a key head. In most files there are as many groups of value heads, of which
each has one for every key head, so what a slice has of the values lies in bands. In qwen3next those
of a key head follow each other.

    rows      attn_qkv and ssm_conv1d: queries, keys and values of its heads; attn_gate, ssm_alpha,
              ssm_beta, ssm_ba, ssm_dt, ssm_a: its value heads
    columns   ssm_out: its value heads; its product is the partial result of the sum
    whole     ssm_norm

A scan (Mamba 2) has groups of heads in the place of key heads, each with a norm of its own.
Handles tensors of one layer; `slice_parts` has the layers with attention and the feed forward.
"""

from __future__ import annotations

import math

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import TensorPart, bands_of, columns_in_bands
from pipeinfer.models.slice_experts import Range, common_block, tensors_of

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
_SCANS = ("nemotron_h",)
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

    def columns(self, heads: Range) -> tuple[Range, ...]:
        """Return the columns of ssm_out of a slice."""
        return self.bands(heads, self.size)

    def rows(self, heads: Range) -> dict[str, tuple[Range, ...]]:
        """Return the rows of a slice by tensors' names."""
        half = self.keys * self.size
        low, high = heads[0] * self.size, heads[1] * self.size
        mixed = ((low, high), (half + low, half + high), *self.bands(heads, self.size, 2 * half))
        each = dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"),
                             self.bands(heads, 1))
        return each | {
            "attn_qkv.weight": mixed, "ssm_conv1d.weight": mixed,
            "attn_gate.weight": self.bands(heads, self.size),
            "ssm_ba.weight": self.bands(heads, 2)}  # of a key head both rates of its value heads

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


class Scan(Struct, frozen=True):
    """The scan of a model's layers.

    keys: groups of heads
    groups: heads of each
    size: elements of a head
    block: columns of ssm_out can be cut at multiples of this in all layers
    state: elements of a group's input and output of the state
    """

    keys: int
    groups: int
    size: int
    block: int
    state: int

    @property
    def each(self) -> int:
        """The elements of a group of heads."""
        return self.groups * self.size

    @property
    def step(self) -> int:
        """The number of groups at whose multiples it can be cut."""
        return math.lcm(self.block, self.each) // self.each

    @property
    def most(self) -> int:
        """The most slices with some groups each."""
        return max(1, self.keys // self.step)

    def columns(self, heads: Range) -> tuple[Range, ...]:
        """Return the columns of ssm_out of a slice."""
        return ((heads[0] * self.each, heads[1] * self.each),)

    def rows(self, heads: Range) -> dict[str, tuple[Range, ...]]:
        """Return the rows of a slice by tensors' names."""
        def of(size: int, start: int) -> Range:
            return start + heads[0] * size, start + heads[1] * size

        inner, state = self.keys * self.each, self.keys * self.state
        mixed = (of(self.each, 0), of(self.state, inner), of(self.state, inner + state))
        one = (of(self.groups, 0),)
        return {
            "ssm_in.weight": (of(self.each, 0), *((inner + a, inner + b) for a, b in mixed),
                              of(self.groups, 2 * (inner + state))),
            "ssm_conv1d.weight": mixed, "ssm_conv1d.bias": mixed, "ssm_norm.weight": (heads,),
            "ssm_dt.bias": one, "ssm_a": one, "ssm_d": one}

    def shapes(self, width: int, kernel: int) -> dict[str, tuple[int, ...]]:
        """See `DeltaNet.shapes`."""
        inner, heads = self.keys * self.each, self.keys * self.groups
        channels = inner + 2 * self.keys * self.state
        return {
            "ssm_in.weight": (width, inner + channels + heads),
            "ssm_conv1d.weight": (kernel, channels), "ssm_conv1d.bias": (channels,),
            "ssm_norm.weight": (self.each, self.keys), "ssm_dt.bias": (heads,),
            "ssm_a": (1, heads), "ssm_d": (1, heads), "ssm_out.weight": (inner, width)}

    def entries(self, heads: Range) -> dict[str, int]:
        """See `DeltaNet.entries`."""
        count = heads[1] - heads[0]
        return {"ssm.group_count": count, "ssm.time_step_rank": count * self.groups,
                "ssm.inner_size": count * self.each}


def states_of(model: ModelFile) -> DeltaNet | Scan | None:
    """Return the delta net or scan of a model's layers, None if they have none that can be cut."""
    if model.architecture not in (*DELTA_NETS, *_SCANS):
        return None
    keys, values, size, inner = (_number(model, f"ssm.{name}") for name in (
        "group_count", "time_step_rank", "state_size", "inner_size"))
    if values % keys or inner % values:
        raise ModelError(f"{model.path}: {keys} groups do not share {values} heads, or these "
                         f"{inner} elements, evenly; the file is damaged, fetch it again")
    if model.architecture in _SCANS:
        return Scan(keys, values // keys, inner // values,
                    common_block(tensors_of(model, "ssm_out")), size)
    return DeltaNet(keys, values // keys, size, common_block(tensors_of(model, "ssm_out")),
                    model.architecture in _TOGETHER)


def _number(model: ModelFile, key: str) -> int:
    value = model.arch_get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{model.path}: {model.architecture}.{key} is {str(value)[:40]!r}, not a "
                         "number of at least 1; the file is damaged, fetch it again")
    return value


def part_of(tensor: TensorInfo, name: str, kind: str, net: DeltaNet | Scan, heads: Range
            ) -> TensorPart | None:
    """Return the slice's part of a tensor; None for one that no slice has a part of.

    name: in the new file
    kind: the tensor's name in its layer
    heads: key heads, or groups, `[a, b)` of the slice
    """
    if kind == "ssm_out.weight":
        return columns_in_bands(tensor, name, *net.columns(heads))
    bands = net.rows(heads).get(kind)
    return None if bands is None else bands_of(tensor, name, *bands)
