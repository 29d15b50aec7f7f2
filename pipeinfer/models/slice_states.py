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
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import TensorPart, columns_of, rows_of
from pipeinfer.models.layers import positive
from pipeinfer.models.slice_experts import Range, common_block, tensors_of


class States(Struct, frozen=True):
    """The part of a model's layers with a state that can be cut.

    keys: key heads of a delta net, groups of heads of a scan
    groups: value heads per key head, heads of each group
    size: elements of a head
    block: columns of ssm_out can be cut at multiples of this in all layers
    together: whether the value heads of a key head follow each other
    """

    keys: int
    groups: int
    size: int
    block: int
    together: bool

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

    def bands(self, heads: Range, size: int, start: int = 0) -> tuple[Range, ...]:
        """Return where the value heads of key heads `[a, b)` lie, from `start` on; size: elements
        of a head.
        """
        low, high = heads
        if self.together:
            return ((start + low * self.groups * size, start + high * self.groups * size),)
        firsts = [start + group * self.keys * size for group in range(self.groups)]
        return tuple((first + low * size, first + high * size) for first in firsts)

    def entries(self, heads: Range) -> dict[str, int]:
        """Return the metadata of a slice with key heads `[a, b)`."""
        count = heads[1] - heads[0]
        values = count * self.groups
        return {"ssm.group_count": count, "ssm.time_step_rank": values,
                "ssm.inner_size": values * self.size}


class DeltaNet(States, frozen=True):
    """A delta net."""

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


class Scan(States, frozen=True):
    """A scan. state: elements of a group's input and output of the state."""

    state: int

    def rows(self, heads: Range) -> dict[str, tuple[Range, ...]]:
        """Return the rows of a slice by tensors' names."""
        each = self.groups * self.size
        inner, state = self.keys * each, self.keys * self.state

        def of(size: int, start: int) -> Range:
            return start + heads[0] * size, start + heads[1] * size

        mixed = (of(each, 0), of(self.state, inner), of(self.state, inner + state))
        one = (of(self.groups, 0),)
        return {
            "ssm_in.weight": (of(each, 0), *((inner + a, inner + b) for a, b in mixed),
                              of(self.groups, 2 * (inner + state))),
            "ssm_conv1d.weight": mixed, "ssm_conv1d.bias": mixed, "ssm_norm.weight": (heads,),
            "ssm_dt.bias": one, "ssm_a": one, "ssm_d": one}

    def shapes(self, width: int, kernel: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors by their names, as in `DeltaNet.shapes`."""
        each, heads = self.groups * self.size, self.keys * self.groups
        inner = self.keys * each
        channels = inner + 2 * self.keys * self.state
        return {
            "ssm_in.weight": (width, inner + channels + heads),
            "ssm_conv1d.weight": (kernel, channels), "ssm_conv1d.bias": (channels,),
            "ssm_norm.weight": (each, self.keys), "ssm_dt.bias": (heads,),
            "ssm_a": (1, heads), "ssm_d": (1, heads), "ssm_out.weight": (inner, width)}


def states_of(model: ModelFile) -> DeltaNet | Scan | None:
    """Return the delta net or scan of a model's layers, None if they have none that can be cut."""
    kind = declared(model.architecture).state
    if not kind:
        return None
    keys, values, size, inner = (positive(model, f"ssm.{name}") for name in (
        "group_count", "time_step_rank", "state_size", "inner_size"))
    if values % keys or inner % values:
        raise ModelError(f"{model.path}: {keys} groups do not share {values} heads, or these "
                         f"{inner} elements, evenly; the file is damaged, fetch it again")
    block = common_block(tensors_of(model, "ssm_out"))
    if kind == "scan":
        return Scan(keys, values // keys, inner // values, block, together=True, state=size)
    return DeltaNet(keys, values // keys, size, block, kind == "grouped")


def part_of(tensor: TensorInfo, name: str, kind: str, net: DeltaNet | Scan, heads: Range
            ) -> TensorPart | None:
    """Return the slice's part of a tensor; None for one that no slice has a part of.

    name: in the new file
    kind: the tensor's name in its layer
    heads: key heads, or groups, `[a, b)` of the slice
    """
    if kind == "ssm_out.weight":
        return columns_of(tensor, name, *net.columns(heads))
    bands = net.rows(heads).get(kind)
    return None if bands is None else rows_of(tensor, name, *bands)
