"""Models that other programs have stored on this host: Ollama, llama.cpp, the Hugging Face hub.

Reads the stores' own indices; opens no model. Each model has the name that `-m` accepts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from pipeinfer.errors import ModelError

_MOST_MANIFEST = 1 << 20
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_OLLAMA_SYSTEM = "/usr/share/ollama/.ollama/models"  #: of the service that its installer makes


class Stored(Struct, frozen=True):
    """A model by name. place: the store that it is in."""

    name: str
    path: Path
    place: str


def stored() -> Iterator[Stored]:
    """Yield all stored models, by store."""
    yield from ollama_models()
    yield from llama_cpp_models()
    yield from hub_models()


def find(name: str) -> Stored | None:
    """Return the model with this name in Ollama's store or llama.cpp's cache; None without one.

    Ollama's tag may be left out where it is `latest`, and the ending `.gguf`, too.
    """
    for one in (*ollama_models(), *llama_cpp_models()):
        if one.name in (name, f"{name}:latest", f"{name}.gguf"):
            return one
    return None


# --- Ollama ---------------------------------------------------------------------------------------


def ollama_folders() -> list[Path]:
    """Return Ollama's folders of models: $OLLAMA_MODELS alone, or the user's and the service's."""
    if given := os.environ.get("OLLAMA_MODELS"):
        return [Path(given)]
    return [Path.home() / ".ollama" / "models", Path(_OLLAMA_SYSTEM)]


def ollama_models() -> Iterator[Stored]:
    """Yield Ollama's models, such as `llama3.2:1b`, whose weights are GGUF files on this host."""
    for folder in ollama_folders():
        root = folder / "manifests"
        for manifest in _files(root):
            blob = _weights(manifest, folder / "blobs")
            if blob is not None:
                yield Stored(_ollama_name(manifest.relative_to(root).parts), blob, "Ollama")


def _files(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.rglob("*") if path.is_file())
    except OSError:
        return []


def _weights(manifest: Path, blobs: Path) -> Path | None:
    """The blob with the weights; None where the manifest names none on this host."""
    try:
        layers = json.loads(manifest.read_bytes()[:_MOST_MANIFEST])["layers"]
        digests = [one["digest"] for one in layers if one["mediaType"] == _MODEL_LAYER]
        found = _DIGEST.fullmatch(digests[0])
        path = blobs / f"sha256-{found[1]}" if found else None
        with open(path or os.devnull, "rb") as file:
            return path if file.read(4) == b"GGUF" else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


def _ollama_name(parts: tuple[str, ...]) -> str:
    """host/user/model/tag as Ollama prints it, without its own host and the user `library`."""
    *path, tag = parts
    if path[:1] == ["registry.ollama.ai"]:
        path = path[1:]
    if path[:1] == ["library"]:
        path = path[1:]
    return f"{'/'.join(path)}:{tag}"


# --- llama.cpp ------------------------------------------------------------------------------------


def llama_cpp_folder() -> Path:
    """Return the folder of llama.cpp's downloads."""
    if given := os.environ.get("LLAMA_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp"


def llama_cpp_models() -> Iterator[Stored]:
    """Yield the GGUF files in it, by name; of those in several parts the first."""
    try:
        paths = sorted(llama_cpp_folder().glob("*.gguf"))
    except OSError:
        return
    for path in paths:
        if not _LATER_PART.search(path.name) and "mmproj" not in path.name:
            yield Stored(path.name, path, "llama.cpp")


# --- the hub's cache ------------------------------------------------------------------------------


def hub_models() -> Iterator[Stored]:
    """Yield complete models in the hub's cache, such as `user/repo:Q4_K_M`."""
    from pipeinfer.models import hub, hub_files

    seen: set[str] = set()
    for repo, files in hub.snapshots():
        sizes = dict.fromkeys(files, 0)
        for first in hub_files.models_in(sizes):
            name = hub_files.name_of(repo, first)
            try:
                hub_files.parts_of(first, sizes)
            except ModelError:
                continue
            if name not in seen:
                seen.add(name)
                yield Stored(name, files[first], "hub cache")


def label(path: Path) -> str:
    """Return a name for a model's file, Ollama's where the file's own is only a digest."""
    if _DIGEST.fullmatch(path.name):
        return next((one.name for one in ollama_models() if one.path == path), path.name)
    return path.name
