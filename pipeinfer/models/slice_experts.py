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
from pipeinfer.models.gguf_parts import (
    TensorPart,
    aligned,
    all_of,
    block_size,
    columns_of,
    rows_of,
    rows_of_each,
    without_values,
)

_FLOAT32 = 0
Range = tuple[int, int]
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


def is_expert(kind: str) -> bool:
    """Return whether a layer's tensor belongs to its experts, also to the shared one."""
    return kind.split(".")[0].endswith(("_exps", "_shexp"))


def shapes_of(mixture: Mixture, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the experts' tensors by their names; width: of the model."""
    count, columns, shared = mixture.count, mixture.columns, mixture.shared
    found: dict[str, tuple[int, ...]] = {}
    for name in ("gate", "up"):
        found[f"ffn_{name}_exps.weight"] = (width, columns, count)
        found[f"ffn_{name}_exps.bias"] = (columns, count)
        found[f"ffn_{name}_shexp.weight"] = (width, shared)
    return found | {
        "ffn_gate_up_exps.weight": (width, 2 * columns, count),
        "ffn_down_exps.weight": (columns, width, count), "ffn_down_exps.bias": (width, count),
        "ffn_down_shexp.weight": (shared, width)}


def part_of(tensor: TensorInfo, name: str, kind: str, among: Range, experts: Range,
            shared: Range | None, least: int) -> TensorPart:
    """Return the slice's part of a tensor of the experts.

    name: in the new file
    kind: the tensor's name in its layer
    among: experts `[a, b)` that the slice has
    experts: columns `[a, b)` of each of them
    shared: columns `[a, b)` of the shared expert; None: of the slice it consists of zeros
    least: columns of zeros
    """
    if kind.split(".")[0].endswith("_shexp") and shared is None:
        return without_values(part_of(tensor, name, kind, among, experts, (0, least), least))
    shared = shared or (0, 0)
    if kind == "ffn_down_exps.bias":
        own = columns_of(tensor, name, (0, tensor.shape[0]), last=among)
        return own if experts[0] == 0 else without_values(own)
    if kind in ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.weight"):
        return columns_of(tensor, name, experts, last=among)
    if kind == "ffn_down_shexp.weight":
        return columns_of(tensor, name, shared)
    if kind in ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"):
        return rows_of(tensor, name, shared)
    if kind == "ffn_gate_up_exps.weight":  # the rows of the gate before the others
        half, (low, high) = tensor.shape[1] // 2, experts
        return rows_of_each(tensor, name, among, experts, (half + low, half + high))
    return rows_of_each(tensor, name, among, experts)
