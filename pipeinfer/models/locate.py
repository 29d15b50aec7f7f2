"""Opening model files by path or by name, whatever their format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeinfer.config import JobConfig, ModelConfig

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "embedded"  #: the models that the package ships
TASK_MODEL = "task"  #: names the embedded model that knows the methods of `decomposers`


def model_paths(config: JobConfig) -> tuple[Path, Path | None]:
    """Target and draft files; the embedded pair when no target is named."""
    tasks = config.model.model == TASK_MODEL or (
        bool(config.speculation.decomposer) and not config.model.model
    )
    target = EMBEDDED / ("task.gguf" if tasks else "target.gguf")
    if config.model.model and not tasks:
        target = Path(config.model.model)
    if config.model.draft_model:
        draft: Path | None = Path(config.model.draft_model)
    else:
        draft = None if config.model.model or tasks else EMBEDDED / "draft.gguf"
    return target, draft


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
