"""The part of each tensor of a layer that a slice takes, and the models that can be sliced.

    rows      attn_q, attn_k, attn_v, their biases and sinks: its heads; ffn_gate, ffn_up: its FFN
              columns
    columns   attn_output: its heads; ffn_down: its FFN columns
    whole     norms, also those of heads; routers; biases of attn_output and ffn_down; what all
              heads read (deepseek2's compressed cache)
    bands     of a matrix that is two in one (glm4's ffn_up): the rows of each

Of experts:

    rows      of each expert's ffn_gate_exps, ffn_up_exps and their biases
    columns   of each expert's ffn_down_exps
    one slice the bias of ffn_down_exps: it is a part of the sum, which must contain it once
    likewise  ffn_gate_shexp, ffn_up_shexp, ffn_down_shexp, the shared expert

Every slice has the whole router, so each selects the experts of a row itself. Where an expert has
fewer blocks than there are slices, a slice has columns of some experts only. Then llama.cpp sees
the router of these alone, and the whole one follows the file's tensors: `layer_filter.c` selects
with that.

Of a delta net or scan. Several value heads read a key head. In most files there are as many groups
of value heads, of which each has one for every key head, so what a slice has of the values lies in
bands. In qwen3next those of a key head follow each other. A scan (Mamba 2) has groups of heads in
the place of key heads, each with a norm of its own.

    rows      attn_qkv and ssm_conv1d: queries, keys and values of its heads; attn_gate, ssm_alpha,
              ssm_beta, ssm_ba, ssm_dt, ssm_a: its value heads
    columns   ssm_out: its value heads; its product is the partial result of the sum
    whole     ssm_norm

attn_output and ffn_down of a slice yield a partial result of the sum over all slices. llama.cpp
adds a bias of theirs in a node of its own after the product, so it comes after the sum: every slice
has it. Handles one model and one slice; `slices` decides where to cut.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from pipeinfer.errors import ModelError, PlanError, ProtocolError, UnsupportedArchitecture
from pipeinfer.models import layers
from pipeinfer.models.architectures import declared
from pipeinfer.models.architectures.declaration import values_of
from pipeinfer.models.gaps import GapModel
from pipeinfer.models.gguf import ModelFile, TensorInfo
from pipeinfer.models.gguf_parts import (
    Bands,
    Dim,
    Range,
    TensorPart,
    aligned,
    all_of,
    block_size,
    entry,
    part_of,
    without_values,
)
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer.models.layers import positive, windows_of

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


def expert_dims(mixture: Mixture, every: Dim, among: Range, own: Range, shared: Range
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


_WHOLE = ("attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight",
          "attn_output.bias", "ffn_down.bias", "post_attention_norm.weight",
          "post_ffw_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias",
          "attn_q_a.weight", "attn_q_a_norm.weight", "attn_kv_a_mqa.weight",
          "attn_kv_a_norm.weight", "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight",
          "post_ffw_norm_2.weight", "ffn_gate_inp.scale", "ffn_down_exps.scale",
          "layer_output_scale.weight", "ffn_gate_inp_shexp.weight", "ssm_norm.weight",
          "attn_norm_2.weight")
_FOLDER_WHOLE = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm",
                 "self_attn.rotary_emb")
_WAY_OUT = "run it as a plain pipeline, without --grid"
#: what begins each range in a slice's name, in order
_LETTERS = {"h": "heads", "q": "queries", "d": "delta", ".f": "ff", ".e": "experts", ".x": "among",
            ".s": "shared", ".v": "vocab"}
_NAME = re.compile("".join(rf"(?:{re.escape(letter)}(\d{{1,9}})-(\d{{1,9}}))?"
                           for letter in _LETTERS), re.ASCII)


class Slice(Struct, frozen=True):
    """The parts of every layer and of the output head that a slice holds; all ranges are `[a, b)`.

    heads: KV heads
    ff: FFN columns; in a mixture without any other feed forward those of each expert
    vocab: rows of the output head
    queries: query heads of the model, where the slice has only some of those of its one KV head;
        None: all of its KV heads'
    experts: columns of each expert; None: as `ff`
    shared: columns of the shared expert where they are cut on their own
    among: experts of which the slice has these columns; None: all
    delta: key heads of the delta net, or groups of heads of the scan, of layers with a state
    """

    heads: tuple[int, int]
    ff: tuple[int, int]
    vocab: tuple[int, int]
    queries: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    shared: tuple[int, int] | None = None
    among: tuple[int, int] | None = None
    delta: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """All ranges in a text without blanks or slashes: "h0-2.f0-768.v0-24576"."""
        ranges = ((letter, getattr(self, field)) for letter, field in _LETTERS.items())
        return "".join(f"{letter}{own[0]}-{own[1]}" for letter, own in ranges if own is not None)

    @property
    def expert_columns(self) -> tuple[int, int]:
        """The columns of each expert."""
        return self.experts or self.ff

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Return the slice with this name. Raises ProtocolError for any other text."""
        match = _NAME.fullmatch(text)
        if match is not None:
            ends = match.groups()
            ranges = {field: (int(low), int(high)) for field, low, high in zip(
                _LETTERS.values(), ends[::2], ends[1::2], strict=True) if low is not None}
            if {"heads", "ff", "vocab"} <= ranges.keys() and all(
                    low < high for low, high in ranges.values()):
                found = cls(**ranges)
                if found.name == text:  # leading zeros would give one slice two names
                    return found
        raise ProtocolError(f"{text[:80]!r} is no name of a slice; start the same version of "
                            "pipeinfer on every host")


class Sizes(Struct, frozen=True):
    """The sizes of every layer.

    heads, kv_heads: query heads and KV heads; of layers that differ, those of the layer with the
        fewest KV heads
    key, value: elements of a head's key and value; of layers that differ, what divides all of them
    rotated: elements of a head that are rotated
    ff: FFN columns; in a mixture without any other feed forward those of each expert
    vocab: rows of the output head
    head_block, ff_block: columns of attn_output and of ffn_down can be cut at multiples of these in
        all layers
    new_names: names of tensors in a layer that differ in a slice
    mixture: the experts; None: there are none
    both: whether the model has experts and another feed forward
    layers: KV heads, and elements of a head, of each layer, where they differ
    delta: the delta net or scan of layers with a state
    two_in_one: whether ffn_up has the rows of the gate before its own
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    rotated: int
    ff: int
    vocab: int
    head_block: int
    ff_block: int
    new_names: Mapping[str, str]
    mixture: Mixture | None = None
    both: bool = False
    layers: tuple[tuple[int, int], ...] = ()
    delta: DeltaNet | Scan | None = None
    two_in_one: bool = False

    @property
    def group(self) -> int:
        """The query heads per KV head."""
        return self.heads // self.kv_heads

    def queries(self, piece: Slice) -> tuple[int, int]:
        """Return the query heads `[a, b)` of a slice."""
        if piece.queries is not None:
            return piece.queries
        return piece.heads[0] * self.group, piece.heads[1] * self.group

    @property
    def query(self) -> int:
        """The rows of attn_q of a head: with a delta net in other layers it has a gate, too."""
        return self.key * (2 if isinstance(self.delta, DeltaNet) else 1)

    @property
    def least_group(self) -> int:
        """The query heads per KV head in the layer with the most KV heads."""
        return self.heads // max([self.kv_heads, *(kv_heads for kv_heads, _ in self.layers)])

    def of_layer(self, layer: int) -> Sizes:
        """Return the sizes of one layer."""
        if not self.layers:
            return self
        kv_heads, head = self.layers[layer]
        return structs.replace(self, kv_heads=kv_heads, key=head, value=head, layers=())

    def keys(self, piece: Slice) -> tuple[int, int]:
        """Return the KV heads `[a, b)` of a slice, in a layer that has these sizes."""
        low, high = self.queries(piece)
        return low // self.group, -(-high // self.group)

    def shared(self, piece: Slice) -> tuple[int, int] | None:
        """Return the columns `[a, b)` of the shared expert of a slice, None for none."""
        if piece.shared is not None or self.mixture is None or not self.mixture.tied:
            return piece.shared
        low, high = piece.expert_columns
        return low * self.mixture.tied, high * self.mixture.tied

    def among(self, piece: Slice) -> tuple[int, int]:
        """Return the experts `[a, b)` of a slice."""
        return piece.among or (0, 0 if self.mixture is None else self.mixture.count)

    def limits(self) -> dict[str, tuple[int, int]]:
        """Return the end of each range of a slice, and the step at which it can be cut."""
        query = math.lcm(self.head_block, self.value) // self.value
        found = {"heads": (self.kv_heads, 1), "queries": (self.heads, query),
                 "ff": (self.ff, self.ff_block), "vocab": (self.vocab, 1)}
        if self.mixture is not None:
            found["among"] = (self.mixture.count, 1)
            found["shared"] = (self.mixture.shared, self.mixture.shared_block)
            if self.both:
                found["experts"] = (self.mixture.columns, self.mixture.block)
        return found | ({} if self.delta is None else {"delta": (self.delta.keys, self.delta.step)})

    @property
    def whole(self) -> Slice:
        """The slice that has everything."""
        return Slice(**{name: (0, end) for name, (end, _) in self.limits().items()
                        if name not in ("queries", "among", "shared") and end})

    def dims(self, kind: str, piece: Slice, width: int = 0) -> tuple[Dim, ...] | None:
        """Return the dimensions of a layer's tensor, or the head's: sizes, and a slice's part.

        kind: the tensor's name in its layer
        width: of the model; 0: not known
        Returns None for a tensor that every slice has whole, or whose parts are not known.
        """
        name, _, what = kind.partition(".")
        (low, high), (first, last), every = self.queries(piece), self.keys(piece), (width, None)

        def heads(size: int) -> Dim:
            return self.heads * size, ((low * size, high * size),)

        def keys(size: int) -> Dim:
            return self.kv_heads * size, ((first * size, last * size),)

        ff: Dim = (self.ff, (piece.ff,))
        up = ff if not self.two_in_one else (
            2 * self.ff, (piece.ff, (self.ff + piece.ff[0], self.ff + piece.ff[1])))
        found: dict[str, tuple[Dim, ...]] = {
            "attn_q": (every, heads(self.query)), "attn_k": (every, keys(self.key)),
            "attn_v": (every, keys(self.value)), "attn_output": (heads(self.value), every),
            "attn_sinks": (heads(1),), "attn_q_b": (ANY, heads(self.query)),
            "attn_k_b": (ANY, ANY, heads(1)), "attn_v_b": (ANY, ANY, heads(1)),
            "ffn_gate": (every, ff), "ffn_up": (every, up), "ffn_down": (ff, every),
            "output": (every, (self.vocab, (piece.vocab,)))}
        if self.mixture is not None:
            found |= expert_dims(
                self.mixture, every, self.among(piece), piece.expert_columns,
                self.shared(piece) or (0, self.mixture.shared_block))
        if self.delta is not None and piece.delta is not None:
            found |= self.delta.dims(every, piece.delta)
        if name not in found or what not in ("", "weight", "bias"):
            return None
        return found[name][what == "bias":]


def why_not_sliced(architecture: str) -> str:
    """Return why llama.cpp's layers of this architecture are not sliced; empty where they are."""
    why = declared(architecture).why_not_sliced
    return why and f"layers of a {architecture} are not sliced: {why}"


def sizes_of(model: ModelFile | ModelDir) -> Sizes:
    """Return the sizes that a model is sliced by.

    Raises UnsupportedArchitecture for a model that cannot be sliced, ModelError for a damaged one.
    """
    if isinstance(model, ModelDir):
        return _sizes_of_folder(model)
    if isinstance(model, GapModel):
        raise UnsupportedArchitecture(
            f"{model.path.name}: layers rewritten for gaps between positions are not sliced: "
            f"{_WAY_OUT}, or choose a decomposer that leaves no gaps")
    if why := why_not_sliced(model.architecture):
        raise UnsupportedArchitecture(f"{model.path.name}: {why}: {_WAY_OUT}")
    heads, mixture = positive(model, "attention.head_count"), mixture_of(model)
    layers: tuple[tuple[int, int], ...] = ()
    own = declared(model.architecture)
    if own.varied_heads:
        layers = _varied(model)
        kv_heads = min(kv_heads for kv_heads, _ in layers)
    else:
        kv_heads = _same(model, "attention.head_count_kv", heads)
    suffix = "_mla" if own.latent else ""
    key, value = (positive(model, f"attention.{name}_length{suffix}", model.n_embd // heads)
                  for name in ("key", "value"))
    if layers:
        key = value = math.gcd(*(head for _, head in layers))
    down = tensors_of(model, "ffn_down")
    ff, block = (mixture.columns, mixture.block) if mixture is not None and not down else (
        _same(model, "feed_forward_length"), common_block(down))
    sizes = Sizes(
        heads, kv_heads, key, value, positive(model, "rope.dimension_count", key), ff,
        model.n_vocab, common_block(tensors_of(model, "attn_output")), block,
        own.renamed, mixture,
        both=mixture is not None and bool(down), layers=layers, delta=states_of(model),
        two_in_one=own.two_in_one)
    if own.slices_as and "output.bias" in model.tensors:
        raise UnsupportedArchitecture(
            f"{model.path.name}: has a bias in its output head, and slices of "
            f"{model.architecture} models cannot have one: {_WAY_OUT}")
    for count in {kv_heads, *(count for count, _ in layers)}:
        if kv_heads < 1 or heads % count or count % kv_heads:
            raise ModelError(f"{model.path}: {heads} heads cannot share {count} KV heads evenly; "
                             "the file is damaged, fetch it again")
    for tensor in model.tensors.values():
        if tensor.name in ("output.weight", "output.bias") or (
                tensor.layer is not None and tensor.layer < model.n_layers):
            _check(model, tensor, sizes.of_layer(tensor.layer or 0))
    return sizes


def _sizes_of_folder(folder: ModelDir) -> Sizes:
    """The same for a Hugging Face folder: floats, which can be cut anywhere.

    Sizes that a config may omit are taken from the tensors.
    """
    width, heads = folder.n_embd, positive(folder, "attention.head_count")
    first = {tensor.name.split(".", 3)[3]: tensor.shape for tensor in folder.tensors.values()
             if tensor.layer == 0}
    try:
        (queries, _), (keys, _) = (first[f"self_attn.{name}_proj.weight"] for name in "qk")
        ff, _ = first["mlp.gate_proj.weight"]
    except (KeyError, ValueError):
        raise UnsupportedArchitecture(
            f"{folder.path.name}: its layers have no attention and feed forward that are known "
            f"here, so they are not sliced: {_WAY_OUT}") from None
    size = queries // heads
    kv_heads = keys // max(size, 1)
    if not size or not kv_heads or heads % kv_heads:
        raise ModelError(f"{folder.path}: {queries} and {keys} rows of queries and keys do not "
                         f"belong to {heads} heads; fetch the model again")
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * size, width), "self_attn.k_proj": (kv_heads * size, width),
        "self_attn.v_proj": (kv_heads * size, width), "self_attn.o_proj": (width, heads * size),
        "mlp.gate_proj": (ff, width), "mlp.up_proj": (ff, width), "mlp.down_proj": (width, ff),
    }
    for tensor in folder.tensors.values():
        if tensor.layer is None:
            continue
        part, _, kind = tensor.name.split(".", 3)[3].rpartition(".")
        if part not in (*shapes, *_FOLDER_WHOLE):
            raise UnsupportedArchitecture(
                f"{folder.path.name}: has the tensor {tensor.name!r}, and it is not known how to "
                f"slice that: {_WAY_OUT}")
        shape = shapes.get(part, tensor.shape)
        expected = shape if kind == "weight" else shape[:1]
        if tensor.shape != expected:
            raise ModelError(f"{folder.path}: tensor {tensor.name!r} has shape "
                             f"{list(tensor.shape)}, {list(expected)} expected; fetch the model "
                             "again")
    return Sizes(heads, kv_heads, size, size, size, ff, folder.n_vocab, 1, 1, {})


def most_by_columns(sizes: Sizes) -> int:
    """Return the most slices with some columns of every kind of feed forward each."""
    most, mixture = sizes.ff // sizes.ff_block, sizes.mixture
    if mixture is not None:
        most = min(most, mixture.columns // mixture.block)
        if mixture.apart:
            most = min(most, mixture.apart // mixture.shared_block)
    return max(1, most)


def is_whole(kind: str) -> bool:
    """Return whether every slice has all of a layer's tensor with this name."""
    return kind in _WHOLE or kind.startswith("nextn.")


def architecture_of(model: ModelFile) -> str:
    """Return the architecture that is written into slices of the model."""
    return declared(model.architecture).slices_as or model.architecture


def slice_of(tensor: TensorInfo, block: str, piece: Slice, sizes: Sizes) -> TensorPart:
    """Return the slice's part of a layer's tensor.

    block: the layer's name in the new file, such as "blk.0"
    """
    kind = tensor.name.split(".", 2)[2]
    name = f"{block}.{sizes.new_names.get(kind, kind)}"
    piece = structs.replace(piece, queries=sizes.queries(piece))
    sizes = sizes.of_layer(tensor.layer or 0)
    dims = sizes.dims(kind, piece)
    if dims is None:
        return all_of(tensor, name)
    found = part_of(tensor, name, *(own for _, own in dims))
    # a bias that is added before the sum is in it once
    absent = sizes.shared(piece) is None if "_shexp" in kind else (
        kind == "ffn_down_exps.bias" and piece.expert_columns[0] > 0)
    return without_values(found) if absent else found


def entries_of(model: ModelFile, piece: Slice, start: int, stop: int) -> dict[str, bytes]:
    """Return the metadata in which a slice of layers `[start, stop)` differs from its model, by
    key."""
    sizes = sizes_of(model)
    given = _by_layer(model, sizes, structs.replace(piece, queries=sizes.queries(piece)))
    ranged = layers.entries(model, start, stop, takes_tokens=False, given=given) \
        if architecture_of(model) == model.architecture else {}
    return ranged | numbers_of(model, piece, sizes, given)


def numbers_of(model: ModelFile, piece: Slice, sizes: Sizes, given: Collection[str] = ()
               ) -> dict[str, bytes]:
    """Return the metadata of a slice that all of its layers share, by key.

    given: keys without the architecture that have a value per layer instead
    Sizes that the loader would derive from the number of heads are written explicitly.
    """
    arch = architecture_of(model)
    low, high = sizes.queries(piece)
    numbers = {
        f"{arch}.attention.head_count": high - low,
        f"{arch}.attention.head_count_kv": piece.heads[1] - piece.heads[0],
        f"{arch}.feed_forward_length": piece.ff[1] - piece.ff[0],
        "pipeinfer.vocab_start": piece.vocab[0],
    }
    numbers = {key: value for key, value in numbers.items()
               if key.removeprefix(f"{arch}.") not in given}
    # theirs are others, or differ
    if not (declared(arch).latent or declared(arch).varied_heads):
        numbers |= {
            f"{arch}.attention.key_length": sizes.key,
            f"{arch}.attention.value_length": sizes.value,
            f"{arch}.rope.dimension_count": sizes.rotated,
        }
    if sizes.delta is not None and piece.delta is not None:
        numbers |= {f"{arch}.{key}": value
                    for key, value in sizes.delta.entries(piece.delta).items()}
    if sizes.mixture is not None:
        own, shared = piece.expert_columns, sizes.shared(piece)
        numbers[f"{arch}.expert_feed_forward_length"] = own[1] - own[0]
        numbers["pipeinfer.shared_expert"] = int(sizes.mixture.shared > 0)
        if piece.among is not None:
            numbers[f"{arch}.expert_count"] = piece.among[1] - piece.among[0]
            numbers |= {"pipeinfer.experts": sizes.mixture.count,
                        "pipeinfer.first_expert": piece.among[0]}
        if sizes.mixture.apart:
            low, high = shared or (0, sizes.mixture.shared_block)
            numbers[f"{arch}.expert_shared_feed_forward_length"] = high - low
    texts = {"general.architecture": arch, "pipeinfer.piece": piece.name}
    return {key: entry(key, value) for key, value in (numbers | texts).items()}


def check_fits(model: ModelFile | ModelDir, piece: Slice) -> None:
    """Raise PlanError unless the model has this slice; also raises what `sizes_of` raises."""
    sizes = sizes_of(model)
    limits, problem = sizes.limits(), ""
    for name in piece.__struct_fields__:
        own, (end, step) = getattr(piece, name), limits.get(name, (0, 1))
        if own is None and name not in ("queries", "among", "shared") and name in limits:
            problem = f"it has {end} {name}"
        elif own is not None and (own[1] > end or any(one % step and one < end for one in own)):
            problem = f"{name} {own[0]} to {own[1]} are not among its {end}, in steps of {step}"
    heads, (low, high) = piece.heads, sizes.queries(piece)
    if not heads[0] * sizes.group <= low < high <= heads[1] * sizes.group:
        problem = f"query heads {low} to {high} do not belong to these KV heads"
    elif any(one * sizes.value % sizes.head_block for one in (low, high)):
        problem = f"its attention columns are quantised in blocks of {sizes.head_block}"
    elif piece.among is not None and sizes.mixture is not None and not (
            piece.among[1] - piece.among[0] >= sizes.mixture.drawn > 0):
        problem = "its experts cannot be divided so"
    if problem:
        raise PlanError(f"{model.path.name} cannot be cut into the slice {piece.name}: {problem}; "
                        "start the same version of pipeinfer on every host")


def _varied(model: ModelFile) -> tuple[tuple[int, int], ...]:
    """The KV heads, and the elements of a head, of each layer."""
    windows = windows_of(model, 0)
    counts = values_of(model, "attention.head_count_kv")
    return tuple((count, positive(model, f"attention.key_length{'_swa' if near else ''}"))
                 for count, near in zip(counts, windows, strict=False))


def _same(model: ModelFile, key: str, default: int | None = None) -> int:
    """A number that is the same in all layers which have it."""
    if not model.is_array(f"{model.architecture}.{key}"):
        return positive(model, key, default)
    found = {*values_of(model, key)[:model.n_layers]} - {0}
    if len(found) != 1 or min(found) < 1:
        raise UnsupportedArchitecture(
            f"{model.path.name}: its layers have different values of {key}, so they are not "
            f"sliced: {_WAY_OUT}")
    return int(found.pop())


def _by_layer(model: ModelFile, sizes: Sizes, piece: Slice) -> dict[str, list[int]]:
    """The metadata of a slice with one value per layer, by key."""
    kv, ff = "attention.head_count_kv", "feed_forward_length"
    found = {}
    if model.is_array(f"{model.architecture}.{kv}"):
        keys = (sizes.of_layer(layer).keys(piece) for layer in range(model.n_layers))
        found[kv] = [high - low if count else 0 for (low, high), count in zip(
            keys, values_of(model, kv), strict=False)]
    if model.is_array(f"{model.architecture}.{ff}"):
        found[ff] = [piece.ff[1] - piece.ff[0] if count else 0
                     for count in values_of(model, ff)[:model.n_layers]]
    return found


def _check(model: ModelFile, tensor: TensorInfo, sizes: Sizes) -> None:
    """Check that a layer's tensor, or the output head, is known and has the expected size."""
    kind = tensor.name if tensor.layer is None else tensor.name.split(".", 2)[2]
    dims = sizes.dims(kind, sizes.whole, model.n_embd)
    if dims is None and kind not in _WHOLE:
        raise UnsupportedArchitecture(
            f"{model.path.name}: has the tensor {tensor.name!r}, and it is not known how to slice "
            f"that: {_WAY_OUT}")
    expected = tensor.shape if dims is None else tuple(
        size or own for (size, _), own in itertools.zip_longest(dims, tensor.shape, fillvalue=ANY))
    if tensor.shape != expected:
        raise ModelError(f"{model.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                         f"{list(expected)} expected; the file is damaged, fetch it again")
