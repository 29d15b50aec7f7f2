"""The part of a mixture's experts that a slice takes: some columns of every expert.

    rows      of each expert's ffn_gate_exps, ffn_up_exps and their biases
    columns   of each expert's ffn_down_exps
    one slice the bias of ffn_down_exps: it is a part of the sum, which must contain it once
    likewise  ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp, the shared expert

Every slice has the whole router, so each selects the experts of a row itself. Handles tensors of
one layer; `slice_parts` has the rest of the layer.
"""

from __future__ import annotations

import math

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import (
    TensorPart,
    bands_of_each,
    block_size,
    columns_of,
    nothing_of,
    rows_of,
)

#: architectures whose shared expert has so many columns for each column of an expert
_TIED = ("deepseek2", "glm4moe", "llama4")
Range = tuple[int, int]


class Mixture(Struct, frozen=True):
    """The experts of a model.

    count: of a layer
    columns: of each
    block: columns can be cut at multiples of this in all layers
    shared: columns of the shared expert; 0: there is none
    shared_block: the same for it
    tied: columns of the shared expert for each column of an expert, where llama.cpp derives one
        from the other; 0: its columns are cut on their own
    """

    count: int
    columns: int
    block: int
    shared: int = 0
    shared_block: int = 1
    tied: int = 0

    @property
    def apart(self) -> int:
        """The columns of a shared expert that are cut on their own; 0 if there are none."""
        return 0 if self.tied else self.shared


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
    if not both:
        return Mixture(count, columns, block)
    shared, shared_block = both[0].shape[0], common_block(both)
    if model.architecture not in _TIED:
        return Mixture(count, columns, block, shared, shared_block)
    return Mixture(count, columns, math.lcm(block, shared_block), shared, shared_block,
                   shared // columns)


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
        "ffn_down_exps.weight": (columns, width, count), "ffn_down_exps.bias": (width, count),
        "ffn_down_shexp.weight": (shared, width)}


def part_of(tensor: TensorInfo, name: str, kind: str, experts: Range, shared: Range) -> TensorPart:
    """Return the slice's part of a tensor of the experts.

    name: in the new file
    kind: the tensor's name in its layer
    experts, shared: columns `[a, b)` of each expert and of the shared expert
    """
    if kind == "ffn_down_exps.bias":
        return columns_of(tensor, name, (0, tensor.shape[0])) if experts[0] == 0 \
            else nothing_of(tensor, name)
    if kind in ("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.weight"):
        return columns_of(tensor, name, experts)
    if kind == "ffn_down_shexp.weight":
        return columns_of(tensor, name, shared)
    if kind in ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"):
        return rows_of(tensor, name, shared)
    return bands_of_each(tensor, name, experts)
