"""The part of a mixture's experts that a slice takes: some columns of every expert.

    rows      of each expert's ffn_gate_exps, ffn_up_exps and their biases
    columns   of each expert's ffn_down_exps
    one slice the bias of ffn_down_exps: it is a part of the sum, which must contain it once
    likewise  ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp, the shared expert

Every slice has the whole router, so each selects the experts of a row itself. Where an expert has
fewer blocks than there are slices, a slice has columns of some experts only. Then llama.cpp sees
the router of these alone, and the whole one follows the file's tensors: `layer_filter.c` selects
with that. `slice_parts` has the rest of the layer.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import Dim, Range, TensorPart, aligned, all_of, block_size

_FLOAT32 = 0
Floats = npt.NDArray[np.float32]


class Mixture(Struct, frozen=True):
    """The experts of a model.

    count: of a layer
    columns: of each
    block: columns can be cut at multiples of this in all layers
    shared: columns of the shared expert; 0: there is none
    shared_block: the same for it
    tied: columns of the shared expert for each column of an expert, where llama.cpp derives one
        from the other; 0: its columns are cut on their own
    drawn: experts that a row draws, where slices can have some of the experts; else 0
    """

    count: int
    columns: int
    block: int
    shared: int = 0
    shared_block: int = 1
    tied: int = 0
    drawn: int = 0

    @property
    def apart(self) -> int:
        """The columns of a shared expert that are cut on their own; 0 if there are none."""
        return 0 if self.tied else self.shared

    @property
    def groups(self) -> int:
        """Into how many parts the experts can be divided, so that each has as many as a row
        draws.
        """
        return max(1, self.count // self.drawn) if self.drawn else 1


def mixture_of(model: ModelFile) -> Mixture | None:
    """Return the experts of a model, None if it has none. Raises ModelError for a damaged file."""
    count = model.arch_get("expert_count")
    if not isinstance(count, int) or not count:
        return None
    down = tensors_of(model, "ffn_down_exps")
    if not down or any(len(one.shape) != 3 or one.shape[0] != down[0].shape[0] for one in down):
        raise ModelError(f"{model.path}: the experts of its layers have different sizes, or are "
                         "missing; the file is damaged, fetch it again")
    columns, block = down[0].shape[0], common_block(down)
    both = tensors_of(model, "ffn_down_shexp")
    shared, shared_block = (both[0].shape[0], common_block(both)) if both else (0, 1)
    if not (both and declared(model.architecture).shared_tied):
        return Mixture(count, columns, block, shared, shared_block, drawn=_drawn(model))
    if shared % columns:
        raise ModelError(f"{model.path}: its shared experts have {shared} columns, no multiple of "
                         f"{columns}; the file is damaged, fetch it again")
    return Mixture(count, columns, math.lcm(block, shared_block), shared, shared_block,
                   shared // columns)


def layout(slices: int, columns: int, groups: int) -> tuple[int, int]:
    """Return how many slices share the columns of an expert, and into how many groups the experts
    are divided; (0, 0) if so many slices are not possible.

    columns, groups: the most of each
    Columns go first: members with some experts wait for the one of which a row draws most.
    """
    for count in range(min(slices, columns), 0, -1):
        if slices % count == 0 and slices // count <= groups:
            return count, slices // count
    return 0, 0


def _drawn(model: ModelFile) -> int:
    """The experts that a row draws if slices can have some of the experts, see `Mixture`."""
    drawn = model.arch_get("expert_used_count")
    routers = tensors_of(model, "ffn_gate_inp")
    plain = model.arch_get("expert_weights_scale", 0) in (0, 1) and not tensors_of(
        model, "ffn_down")
    if not declared(model.architecture).drawn or not isinstance(drawn, int) or drawn < 1 \
            or not plain or any(tensor.type != _FLOAT32 for tensor in routers):
        return 0
    return drawn


def routers_of(model: ModelFile, start: int, stop: int) -> list[TensorPart]:
    """Return the routers of layers `[start, stop)` and their biases, which follow the tensors of a
    slice with whole experts: llama.cpp itself reads those of its own experts only.
    """
    found = (model.tensors.get(f"blk.{layer}.ffn_gate_inp.{kind}")
             for layer in range(start, stop) for kind in ("weight", "bias"))
    return [all_of(tensor, tensor.name) for tensor in found if tensor is not None]


def read_routers(file: ModelFile) -> list[tuple[Floats, Floats | None]]:
    """Return the routers that `routers_of` has put into the file of a slice: for each layer the
    weights, float32[experts, n_embd], and the biases, float32[experts].

    Raises ModelError if the file cannot be read.
    """
    at = max(tensor.offset + aligned(tensor.nbytes) for tensor in file.tensors.values())
    count = file.get("pipeinfer.experts", 0)
    assert isinstance(count, int)
    try:
        with file.path.open("rb") as stream:
            def floats(number: int) -> Floats:
                nonlocal at
                stream.seek(at)
                at += aligned(4 * number)
                return np.frombuffer(stream.read(4 * number), np.float32, number)

            return [(floats(count * file.n_embd),
                     floats(count) if f"blk.{i}.ffn_gate_inp.bias" in file.tensors else None)
                    for i in range(file.n_layers)]
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.path}: its routers cannot be read ({error}); remove the file, it "
                         "is then made again") from None


def tensors_of(model: ModelFile, name: str) -> list[TensorInfo]:
    """Return the weights of this name in all layers that compute."""
    return [tensor for tensor in model.tensors.values()
            if tensor.layer is not None and tensor.layer < model.n_layers
            and tensor.name.endswith(f".{name}.weight")]


def common_block(tensors: list[TensorInfo]) -> int:
    """Return the multiple at which the columns of all of them can be cut, as types may differ."""
    return math.lcm(*map(block_size, tensors))


def dims_of(mixture: Mixture, every: Dim, among: Range, own: Range, shared: Range
            ) -> dict[str, tuple[Dim, ...]]:
    """Return the dimensions of experts' tensors, as `Sizes.dims` does.

    every: of the model's width. among: experts of a slice; own: its columns of each; shared: of the
    shared expert
    """
    count, size = (mixture.count, (among,)), mixture.columns
    columns, both = (size, (own,)), (2 * size, (own, (size + own[0], size + own[1])))
    one = (mixture.shared, (shared,))
    return {
        "ffn_gate_inp": (every, count), "ffn_gate_exps": (every, columns, count),
        "ffn_up_exps": (every, columns, count), "ffn_gate_up_exps": (every, both, count),
        "ffn_down_exps": (columns, every, count), "ffn_gate_shexp": (every, one),
        "ffn_up_shexp": (every, one), "ffn_down_shexp": (one, every)}
