"""A model's tensors with an adapter added, in the Hugging Face layout, one at a time.

Knows folders, GGUF files and LoRA; no training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pipeinfer.backends.pytorch.gguf import GgufTensors
from pipeinfer.backends.pytorch.weights import FolderTensors, check_config, config_at
from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer_lab.training.adapt.lora import LoraAdapter, NewTokens

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Merged:
    """The tensors of a model, whole: differences of `adapter` added, new tokens in their rows.
    changed: tensors to take in place of the model's.

    Raises UnsupportedArchitecture for a family that cannot be trained, and ModelError for an
    adapter of another model.
    """

    def __init__(self, path: Path, adapter: LoraAdapter | None = None,
                 changed: Mapping[str, Tensor] | None = None) -> None:
        self.path, self.adapter, self._instead = path, adapter, changed or {}
        self.model, self.config = config_at(path)
        check_config(self.config, str(path))
        self.names = self._names()
        shapes = dict(self.names)
        if adapter is not None:
            self._check_matrices(adapter, shapes)
        self._check_tokens(shapes)

    @property
    def tokens(self) -> NewTokens | None:
        """Tokens that the vocabulary gets."""
        return None if self.adapter is None else self.adapter.tokens

    @property
    def n_vocab(self) -> int:
        """Rows of the embedding."""
        new, old = self.tokens, int(self.config.vocab_size)
        return old if new is None else max(old, new.first + len(new.texts))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return _HEAD not in dict(self.names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and float32 tensors, one after the other."""
        with ExitStack() as stack:
            source = (FolderTensors(self.model, stack) if isinstance(self.model, ModelDir)
                      else GgufTensors(self.model))
            for name, shape in self.names:
                tensor = self._instead.get(name)
                tensor = source.read(name).float() if tensor is None else tensor.cpu().float()
                if tuple(tensor.shape) != shape:
                    raise ModelError(f"{self.path}: {name} has shape {list(tensor.shape)}, but the "
                                     f"config asks for {list(shape)}; fetch the model again")
                yield name, self._changed(name, tensor)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        if self.adapter is None:
            return tensor
        difference = self.adapter.difference(name)
        if difference is not None:
            return tensor + difference
        new = self.tokens
        if new is None or name not in (_EMBEDDING, _HEAD):
            return tensor
        rows = new.embedding if name == _EMBEDDING or new.head is None else new.head
        grown = torch.zeros(self.n_vocab, tensor.shape[1])
        grown[: len(tensor)] = tensor
        grown[new.first : new.first + len(rows)] = rows
        return grown

    def _check_matrices(self, adapter: LoraAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Each of the adapter's is a difference to one of the model's."""
        for name in adapter.weights:
            stem = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
            if f"{stem}.weight" not in shapes:
                raise ModelError(f"the adapter changes {stem[:80]}, which {self.path} does not "
                                 "have: give the model that it was trained for")
            found, wanted = adapter.shape(f"{stem}.weight"), shapes[f"{stem}.weight"]
            if found != wanted:  # before they are multiplied, which might take any memory
                raise ModelError(f"the adapter's {stem} has shape {list(found)}, the model's "
                                 f"{list(wanted)}: give the model that it was trained for")

    def _check_tokens(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """New tokens come right behind those that the model has."""
        if (new := self.tokens) is None:
            return
        columns = shapes[_EMBEDDING][1]
        least = first_free(self.path) if self.path.is_dir() else 0
        if not least <= new.first <= self.config.vocab_size or new.embedding.shape[1] != columns:
            raise ModelError(f"the adapter's new tokens begin at {new.first} with "
                             f"{new.embedding.shape[1]} numbers each, but {self.path} has room "
                             f"from {least} to {self.config.vocab_size} and {columns}: give the "
                             "model that it was trained for")

    def _names(self) -> list[tuple[str, tuple[int, ...]]]:
        with torch.device("meta"):
            whole: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)](self.config)
        stored = self.model.tensors
        own_head = _HEAD in stored or "output.weight" in stored
        return [(name, tuple(tensor.shape)) for name, tensor in whole.state_dict().items()
                if name != _HEAD or own_head]


def first_free(path: Path) -> int:
    """The id that a vocabulary's next token gets: behind what the tokenizer knows, which may be
    less than the model has rows."""
    if not path.is_dir():
        return ModelFile(path).array_length("tokenizer.ggml.tokens")
    from tokenizers import Tokenizer

    highest: int = max(Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab(True).values())
    return 1 + highest
