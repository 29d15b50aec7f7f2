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
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import Bands, Dim, Range
from pipeinfer.models.layers import positive
from pipeinfer.models.slice_experts import common_block, tensors_of

ANY: Dim = (0, None)


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

    def bands(self, heads: Range, size: int, start: int = 0) -> Bands:
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

    def dims(self, every: Dim, heads: Range) -> dict[str, tuple[Dim, ...]]:
        """Return the dimensions of a layer's tensors, as `Sizes.dims` does.

        every: of the model's width
        heads: key heads `[a, b)` of a slice
        """
        values, half = self.keys * self.groups, self.keys * self.size
        low, high = heads[0] * self.size, heads[1] * self.size
        mixed = (2 * half + values * self.size, (
            (low, high), (half + low, half + high), *self.bands(heads, self.size, 2 * half)))
        own, each, both = ((values * size, self.bands(heads, size)) for size in (self.size, 1, 2))
        return {
            "attn_qkv": (every, mixed), "ssm_conv1d": (ANY, mixed), "attn_gate": (every, own),
            "ssm_alpha": (every, each), "ssm_beta": (every, each), "ssm_ba": (every, both),
            "ssm_dt": (ANY, each), "ssm_a": (each,), "ssm_norm": ((self.size, None),),
            "ssm_out": (own, every)}


class Scan(States, frozen=True):
    """A scan. state: elements of a group's input and output of the state."""

    state: int

    def dims(self, every: Dim, heads: Range) -> dict[str, tuple[Dim, ...]]:
        """Return the dimensions of a layer's tensors, as in `DeltaNet.dims`."""
        each = self.groups * self.size
        inner, state, count = self.keys * each, self.keys * self.state, self.keys * self.groups

        def of(size: int, start: int = 0) -> Range:
            return start + heads[0] * size, start + heads[1] * size

        own, mixed = of(each), (of(each), of(self.state, inner), of(self.state, inner + state))
        channels, one = (inner + 2 * state, mixed), (count, (of(self.groups),))
        read = (own, *((inner + a, inner + b) for a, b in mixed),
                of(self.groups, 2 * (inner + state)))
        return {
            "ssm_in": (every, (2 * (inner + state) + count, read)), "ssm_conv1d": (ANY, channels),
            "ssm_norm": ((each, None), (self.keys, (heads,))), "ssm_dt": (ANY, one),
            "ssm_a": ((1, None), one), "ssm_d": ((1, None), one),
            "ssm_out": ((inner, (own,)), every)}


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
