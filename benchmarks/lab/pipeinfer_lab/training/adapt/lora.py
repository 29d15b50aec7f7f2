"""LoRA: a frozen matrix and two thin ones that are learnt beside it, stored as peft does.

A folder with adapter_config.json and adapter_model.safetensors, which peft loads and llama.cpp's
convert_lora_to_gguf.py converts. Does not know: what is learnt, whole models.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pipeinfer.errors import ModelError, UsageError

#: matrices of a layer that may get one
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
           "qkv_proj", "gate_up_proj")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TAGS = "tags.safetensors"  #: rows of tokens that the vocabulary gets, which peft has no place for
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """rank: of the thin matrices. alpha: their product is scaled by alpha / rank. targets: ends of
    the names of the layers that get one."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        wrong = set(self.targets) - set(TARGETS)
        if self.rank < 1 or wrong or not self.targets:
            raise UsageError(f"LoRA needs a rank of at least 1 and targets out of "
                             f"{', '.join(TARGETS)}")


class LoraLinear(nn.Module):
    """`inner` with a difference of low rank: x W + (alpha / rank) x A B."""

    def __init__(self, inner: Any, settings: LoraSettings, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = inner.weight.shape
        self.inner, self.scale = inner, settings.alpha / settings.rank
        bound = 1 / math.sqrt(columns)  # peft's: uniform as a linear layer begins
        start = torch.empty(settings.rank, columns).uniform_(-bound, bound, generator=generator)
        device = inner.weight.device
        self.lora_A = nn.Parameter(start.to(device))
        self.lora_B = nn.Parameter(torch.zeros(rows, settings.rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        thin = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        plain: Tensor = self.inner(x)
        return plain + (self.scale * thin).to(plain.dtype)


def add_lora(layers: Sequence[Any], settings: LoraSettings, seed: int) -> dict[str, nn.Parameter]:
    """Give a model's decoder layers LoRA in place; its parameters by peft's names."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, nn.Parameter] = {}
    for number, layer in enumerate(layers):
        for name, module in list(layer.named_modules()):
            parent, _, leaf = name.rpartition(".")
            if leaf not in settings.targets or not isinstance(module, nn.Linear):
                continue
            made = LoraLinear(module, settings, generator)
            setattr(layer.get_submodule(parent), leaf, made)
            for part in ("lora_A", "lora_B"):
                found[f"{_PREFIX}model.layers.{number}.{name}.{part}.weight"] = getattr(made, part)
    return found


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that a vocabulary gets. first: id of the first; embedding and head [n, n_embd] (head
    None: the embedding's)."""

    texts: tuple[str, ...]
    first: int
    embedding: Tensor
    head: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter as it is stored. weights: by peft's names (none: only tokens are new)."""

    settings: LoraSettings
    weights: Mapping[str, Tensor]
    base: str = ""
    tokens: NewTokens | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, int]:
        """Of the difference to the matrix of this name, which has one."""
        stem = _PREFIX + name.removesuffix(".weight")
        return (self.weights[f"{stem}.lora_B.weight"].shape[0],
                self.weights[f"{stem}.lora_A.weight"].shape[1])

    def difference(self, name: str) -> Tensor | None:
        """What is added to the matrix of this name (`model.layers.0.self_attn.q_proj.weight`)."""
        stem = _PREFIX + name.removesuffix(".weight")
        if (thin := self.weights.get(f"{stem}.lora_A.weight")) is None:
            return None
        wide = self.weights[f"{stem}.lora_B.weight"]
        return self.settings.alpha / self.settings.rank * (wide.float() @ thin.float())


def save_adapter(folder: Path, adapter: LoraAdapter) -> None:
    """Write a folder that peft can load; each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = adapter.settings
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": adapter.base,
        "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(settings.targets), "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "modules_to_save": None,
        "pipeinfer": adapter.about}
    _write(folder / _WEIGHTS, adapter.weights, {"format": "pt"})
    if (new := adapter.tokens) is not None:
        parts = {"embedding": new.embedding} | ({} if new.head is None else {"head": new.head})
        _write(folder / _TAGS, parts, {"texts": json.dumps(new.texts), "first": str(new.first)})
    else:
        (folder / _TAGS).unlink(missing_ok=True)
    write_text(folder / _CONFIG, json.dumps(config, indent=1))


def load_adapter(folder: Path) -> LoraAdapter:
    """A LoRA adapter in peft's format. Raises ModelError."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"{_CONFIG} holds no settings")
        wrong = [f"{key} {config.get(key)!r}" for key, plain in _PLAIN.items()
                 if config.get(key) not in (None, False, plain)]
        if config.get("peft_type") != "LORA" or wrong:
            this = ", ".join(wrong) or repr(config.get("peft_type"))
            raise ModelError(f"{folder}: only plain LoRA can be merged, and this is {this[:200]}; "
                             "merge it with peft")
        settings = LoraSettings(int(config["r"]), float(config["lora_alpha"]))
        weights = _read(folder / _WEIGHTS)[0]
        stray = [name for name in weights if not name.startswith(_PREFIX) or not name.endswith(
            (".lora_A.weight", ".lora_B.weight"))]
        if stray:
            raise ModelError(f"{folder}: has {stray[0][:80]!r}, which is no LoRA matrix; merge it "
                             "with peft")
        _check(settings, weights)
        tokens = _read_tokens(folder / _TAGS) if (folder / _TAGS).is_file() else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, UsageError,
            SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{folder}: cannot be read as a LoRA adapter: {reason}") from error
    about = config.get("pipeinfer")
    return LoraAdapter(settings, weights, str(config.get("base_model_name_or_path") or ""), tokens,
                       about if isinstance(about, dict) else {})


def _check(settings: LoraSettings, weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError for matrices that no sum could be made of."""
    if not math.isfinite(settings.alpha):
        raise ValueError(f"lora_alpha is {settings.alpha}")
    for name, tensor in weights.items():
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(
            ".lora_B.", ".lora_A.")
        inner = 0 if name.endswith("lora_A.weight") else 1
        if other not in weights:
            raise ValueError(f"{name[:80]} has no other half")
        if tensor.dim() != 2 or tensor.shape[inner] != settings.rank:
            raise ValueError(f"{name[:80]} has shape {list(tensor.shape)}, which is none of rank "
                             f"{settings.rank}")
        _check_numbers(name, tensor)


def _check_numbers(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise ValueError(f"{name[:80]} has values that are not finite numbers")


def _read_tokens(path: Path) -> NewTokens:
    """Raises ValueError, TypeError, KeyError, OSError, SafetensorError."""
    parts, told = _read(path)
    texts, first, embedding = json.loads(told["texts"]), int(told["first"]), parts["embedding"]
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts) \
            or len(set(texts)) != len(texts):
        raise ValueError(f"{path.name} names no tokens, or one twice")
    "".join(texts).encode()  # a half of a surrogate pair is no text
    for name in ("embedding", "head"):
        rows = parts.get(name)
        if rows is not None:
            if rows.dim() != 2 or rows.shape != embedding.shape or len(rows) != len(texts):
                raise ValueError(f"{path.name} has {list(rows.shape)} numbers as {name} of "
                                 f"{len(texts)} tokens")
            _check_numbers(name, rows)
    return NewTokens(tuple(texts), first, embedding, parts.get("head"))


#: settings of peft that would change the sum, by the value under which they do not
_PLAIN = {"use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none",
          "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": [], "lora_bias": False}


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _write(path: Path, tensors: Mapping[str, Tensor], told: dict[str, str]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    save_file({name: tensor.detach().float().cpu().contiguous()
               for name, tensor in tensors.items()}, partial, told)
    partial.chmod(0o644)  # the library leaves files to their owner alone
    os.replace(partial, path)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(os.fspath(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
