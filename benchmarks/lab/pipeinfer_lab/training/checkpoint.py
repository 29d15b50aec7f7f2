"""Checkpoints: nested dicts, lists, numbers, texts and tensors in one safetensors file.

The structure is JSON in the file's metadata, with a number in the place of every tensor; nothing
that is read can run code. Does not know what is stored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeinfer.errors import ModelError

_KEY = "pipeinfer.state"


def save_state(path: Path, state: Any) -> None:
    """Write `state` whole or not at all. Raises TypeError for what is no plain data."""
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(_take_apart(state, tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {_KEY: skeleton})
    os.replace(partial, path)


def load_state(path: Path) -> Any:
    """What `save_state` stored; tuples come back as lists. Raises ModelError for anything else."""
    try:
        with safe_open(os.fspath(path), "pt") as file:
            skeleton = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        return _put_together(skeleton, tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: is not a checkpoint of this version ({error}): remove it, or "
                         "train into another directory") from error


def _take_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_scalar(key), _take_apart(v, tensors)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        return [_take_apart(v, tensors) for v in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be part of a checkpoint")


def _put_together(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_together(v, tensors) for v in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {key: _put_together(v, tensors) for key, v in value["dict"]}
    return value
