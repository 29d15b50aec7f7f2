"""Builds the torch modules of a shard and reads their own tensors, nothing else.

The model is made of transformers' own classes without memory ("meta"), the layers of other shards
are dropped, and the tensors of the rest are read one by one: from safetensors, or from GGUF,
converted to the Hugging Face layout. Independent of cells, rows and ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec import Struct, field
from safetensors import SafetensorError, safe_open
from transformers import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeinfer.backends.pytorch.attention import IMPLEMENTATION, attend
from pipeinfer.backends.pytorch.gguf import GgufTensors, config_of
from pipeinfer.backends.pytorch.options import check_family
from pipeinfer.errors import ModelError, PipeinferError, PlanError, UnsupportedArchitecture
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import FLOATS, ModelDir
from pipeinfer.models.llama_rules import check_numbers
from pipeinfer.models.slice_parts import Sizes, Slice, check_fits, sizes_of

#: kinds of rotary embedding whose angles depend on the row's position alone
ROPES = ("default", "linear", "llama3", "yarn")

#: by the end of a tensor's name: dimension, first, end
Taken = dict[str, tuple[int, int, int]]

AttentionInterface.register(IMPLEMENTATION, attend)


class TensorSource(Protocol):
    """A source of tensors by their Hugging Face names."""

    def read(self, name: str) -> Any:
        """Return the tensor on the CPU. Raises ModelError when it is missing or no float tensor."""

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor of this name."""


class Shard(Struct):
    """The modules of a shard. layers: which of `n_layers` it holds."""

    config: Any
    layers: tuple[int, int]
    n_layers: int
    architecture: str
    decoder: list[Any]
    rotary: Any
    embed: Any = None
    norm: Any = None
    head: Any = None
    types: list[str] = field(default_factory=list)  #: of the decoder layers, where angles differ
    soft_cap: float | None = None
    piece: Slice | None = None  #: what it holds of its layers and of the head; None: all of them

    @property
    def n_embd(self) -> int:
        """Size of the residual stream."""
        return int(self.config.hidden_size)

    @property
    def n_vocab(self) -> int:
        """Tokens of the embedding and the head."""
        return int(self.config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Memory of the parameters; tied ones count once."""
        tensors = {id(p): p for module in self.modules() for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in tensors.values())

    def modules(self) -> Iterator[Any]:
        """The modules that have parameters."""
        yield from self.decoder
        yield from (module for module in (self.embed, self.norm, self.head) if module is not None)

    def heads(self, layer: int) -> tuple[int, int]:
        """Return the number of key-value heads and the head size of a layer.

        layer: its number in the whole model
        """
        low, high = (0, self.config.num_key_value_heads) if self.piece is None else self.piece.heads
        return high - low, int(self.decoder[layer - self.layers[0]].self_attn.head_dim)

    def embedding(self, tokens: Any) -> Any:
        """Return the rows of tokens as they enter the first layer: [1, n] -> [1, n, n_embd]."""
        return self.embed(tokens)

    def angles(self, stream: Any, positions: Any) -> list[Any]:
        """Return the rotary embedding for each of the shard's layers."""
        if not self.types:
            return [self.rotary(stream, positions)] * len(self.decoder)
        by_type = {kind: self.rotary(stream, positions, kind) for kind in set(self.types)}
        return [by_type[kind] for kind in self.types]

    def logits(self, stream: Any) -> Any:
        """Return the logits after the last layer: [1, k, n_embd] -> [1, k, n_vocab]."""
        logits = self.head(self.norm(stream))
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def load_shard(
    path: str | os.PathLike[str], layers: tuple[int, int] | None, dtype: Any, device: Any,
    piece: Slice | None = None,
) -> Shard:
    """Load a shard of a folder or a GGUF file.

    layers: `[start, stop)`; None: all
    dtype: of the weights
    device: to load to
    piece: the slice of the layers to load; None: the whole layers
    Raises ModelError, UnsupportedArchitecture and PlanError.
    """
    with ExitStack() as stack:
        source: TensorSource
        factors: Any = None
        model, config = config_at(path)
        if isinstance(model, ModelDir):
            source = FolderTensors(model, stack)
        else:
            check_numbers(model)
            source = gguf = GgufTensors(model)
            factors = gguf.rope_factors()
        _checked(check_config, path, config, os.fspath(path))
        taken: Taken = {}
        if piece is not None:
            check_fits(model, piece)
            taken = taken_of(sizes_of(model), piece)
        start, stop = layers or (0, config.num_hidden_layers)
        if not 0 <= start < stop <= config.num_hidden_layers:
            raise PlanError(f"layers {start} to {stop} are not a range within the "
                            f"{config.num_hidden_layers} layers of {os.fspath(path)}")
        shard: Shard = _checked(_assemble, path, config, start, stop, device, piece)
        _fill(shard, source, taken, dtype, device)
        if factors is not None:
            shard.rotary.inv_freq = shard.rotary.inv_freq / factors.to(device)
    return shard


def config_at(path: str | os.PathLike[str]) -> tuple[ModelFile | ModelDir, Any]:
    """Return the model at a path and transformers' config of it.

    Raises ModelError and UnsupportedArchitecture.
    """
    if Path(path).is_dir():
        folder = ModelDir(path)
        return folder, folder_config(folder)
    model = ModelFile(path)
    check_family(model.architecture, os.fspath(path), gguf=True)
    return model, _checked(lambda: CONFIG_MAPPING[model.architecture](**config_of(model)), path)


def _checked(make: Callable[..., Any], path: str | os.PathLike[str], *args: Any) -> Any:
    """Return what `make` makes of a config; its errors become a ModelError that names the file."""
    try:
        return make(*args)
    except (PipeinferError, RuntimeError):  # memory is a RuntimeError, and not the file's
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ModelError(f"{os.fspath(path)}: its config cannot be used: {reason}") from error


def folder_config(folder: ModelDir) -> Any:
    """transformers' config of a folder. Raises UnsupportedArchitecture and ModelError."""
    kind = folder.architecture
    check_family(kind, os.fspath(folder.path), gguf=False)
    if folder.config.get("quantization_config"):
        raise UnsupportedArchitecture(f"{folder.path}: is quantised: the torch backend needs float "
                                      "weights; use llama.cpp with a GGUF file for quantised ones")
    try:
        return CONFIG_MAPPING[kind].from_dict(folder.config)
    except Exception as error:  # whatever transformers' own checks raise
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder.path}: config.json cannot be used: {reason}") from error


def check_config(config: Any, path: str) -> None:
    """Refuse what would silently be computed wrongly. Raises UnsupportedArchitecture."""
    ropes = config.rope_parameters
    for rope in ropes.values() if "rope_type" not in ropes else (ropes,):
        if rope["rope_type"] not in ROPES:
            raise UnsupportedArchitecture(
                f"{path}: rotary embeddings of type {rope['rope_type']!r} depend on the length of "
                f"the text so far and are not supported (supported: {', '.join(ROPES)})")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedArchitecture(f"{path}: attends in both directions, so it cannot generate "
                                      "text; use a causal language model")


def _assemble(config: Any, start: int, stop: int, device: Any, piece: Slice | None) -> Shard:
    """The shard's modules, without memory but for what is computed from the config."""
    config._attn_implementation = IMPLEMENTATION
    with torch.device("meta"):
        whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    inner = whole.model
    with torch.device(device):
        rotary = type(inner.rotary_emb)(config=config)
    last = stop == config.num_hidden_layers
    shard = Shard(
        config=config, layers=(start, stop), n_layers=config.num_hidden_layers,
        architecture=config.model_type, decoder=list(inner.layers[start:stop]), rotary=rotary,
        embed=inner.embed_tokens if start == 0 and piece is None else None,
        norm=inner.norm if last else None, head=whole.lm_head if last else None, piece=piece,
        soft_cap=getattr(config, "final_logit_softcapping", None))
    if "rope_type" not in config.rope_parameters:  # one kind of angle per type of layer
        shard.types = list(config.layer_types[start:stop])
    if shard.embed is not None:
        give_scale(shard.embed, device)
    return shard


def give_scale(embed: Any, device: Any) -> None:
    """Set the factor that some families' embeddings have, as no file contains it."""
    if hasattr(embed, "embed_scale"):
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale, device=device)


def taken_of(sizes: Sizes, piece: Slice) -> Taken:
    """Return a slice's parts of tensors, by the ends of their names; others are taken whole."""
    low, high = sizes.queries(piece)
    own = {"self_attn.q_proj": (low * sizes.key, high * sizes.key),
           "self_attn.k_proj": (piece.heads[0] * sizes.key, piece.heads[1] * sizes.key),
           "self_attn.v_proj": (piece.heads[0] * sizes.value, piece.heads[1] * sizes.value),
           "mlp.gate_proj": piece.ff, "mlp.up_proj": piece.ff}
    rows = {f"{name}.{kind}": (0, *ends) for name, ends in own.items()
            for kind in ("weight", "bias")}
    return rows | {"self_attn.o_proj.weight": (1, low * sizes.value, high * sizes.value),
                   "mlp.down_proj.weight": (1, *piece.ff), "weight": (0, *piece.vocab)}


def _fill(shard: Shard, source: TensorSource, taken: Taken, dtype: Any, device: Any) -> None:
    """Read every parameter of the shard, or the part of it that `taken` names."""
    embedding, head = "model.embed_tokens", "lm_head"
    tied = not source.has(f"{head}.weight")
    if tied and shard.head is not None and not getattr(shard.config, "tie_word_embeddings", True):
        raise ModelError("the model has no lm_head.weight and its config does not tie it to the "
                         "embedding; fetch the model again")
    parts = [(f"model.layers.{i}", layer) for i, layer in enumerate(shard.decoder, shard.layers[0])]
    if shard.embed is not None:
        parts.append((embedding, shard.embed))
    if shard.norm is not None:
        parts.append(("model.norm", shard.norm))
    if shard.head is not None and not (tied and shard.embed is not None):
        parts.append((embedding if tied else head, shard.head))
    for prefix, module in parts:
        for name, parameter in list(module.named_parameters()):
            tensor = source.read(f"{prefix}.{name}")
            if tuple(tensor.shape) != tuple(parameter.shape):
                raise ModelError(f"{prefix}.{name} has shape {list(tensor.shape)}, but the config "
                                 f"asks for {list(parameter.shape)}")
            if name in taken and module is not shard.norm:
                dim, low, high = taken[name]
                # a copy: a view would keep all of the tensor in memory
                tensor = tensor.narrow(dim, low, high - low).clone()
            owner, _, leaf = name.rpartition(".")
            holder = module.get_submodule(owner)
            setattr(holder, leaf, torch.nn.Parameter(tensor.to(device=device, dtype=dtype),
                                                     requires_grad=False))
            if leaf == "weight" and isinstance(holder, torch.nn.Linear):
                holder.out_features, holder.in_features = tensor.shape
        module.requires_grad_(False).eval()
    if shard.head is not None and tied and shard.embed is not None:
        shard.head.weight = shard.embed.weight


class FolderTensors:
    """The tensors of a folder, each read from mapped files when it is needed."""

    def __init__(self, folder: ModelDir, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._folder.tensors

    def read(self, name: str) -> Any:
        """Return the tensor on the CPU."""
        info = self._folder.tensors.get(name)
        if info is None:
            raise ModelError(f"{self._folder.path}: tensor {name!r} is missing; the model is "
                             f"incomplete or not of type {self._folder.architecture}")
        if info.dtype not in FLOATS:
            raise ModelError(f"{info.file}: tensor {name!r} has type {info.dtype}; the torch "
                             "backend needs float weights")
        try:
            if info.file not in self._open:
                self._open[info.file] = self._stack.enter_context(
                    safe_open(info.file, framework="pt"))
            # a copy, because a view would hold the whole file in memory
            return self._open[info.file].get_tensor(name).clone()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{info.file}: cannot be read: {error}") from None
