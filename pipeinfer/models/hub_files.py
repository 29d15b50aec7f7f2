"""Names of models on the Hugging Face hub, and the files of a repository that they mean.

`user/repo:Q4_K_M` is a repository and a quantisation. Without a quantisation it means the file that
llama.cpp would choose: Q4_K_M, else Q8_0, else the first. Independent of network and cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from pipeinfer.errors import ModelError

PREFERRED = ("Q4_K_M", "Q8_0")  #: where no quantisation is requested
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w./-]+))?", re.ASCII)
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*))"
                    r"(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE | re.ASCII)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)
MTP_FILE, EAGLE_FILE = "mtp-", "eagle3-"  #: how names of prediction heads start
BLOCK_FILES = ("dflash-", "dspark-")
_MOST_NAMES = 40


class Wanted(Struct, frozen=True):
    """A model of a repository: by its quantisation, by its file, or the preferred one."""

    repo: str
    quant: str = ""
    file: str = ""

    @classmethod
    def parse(cls, name: str) -> Wanted | None:
        """Return the model that a name such as `user/repo:Q8_0` or `user/repo:dir/m.gguf` means;
        None for another kind of name.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        of = found[2] or ""
        return cls(found[1], file=of) if of.endswith(".gguf") else cls(found[1], of)

    @property
    def precise(self) -> bool:
        """Whether it names one file and leaves no choice."""
        return bool(self.quant or self.file)

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


def quant_of(path: str) -> str:
    """Return the quantisation in a file's name; empty where there is none."""
    found = _QUANT.search(path)
    return found[1].upper() if found else ""


def models_in(files: Mapping[str, int]) -> list[str]:
    """Return the GGUF files that are models; of those in several parts the first."""
    return [path for path in sorted(files) if path.endswith(".gguf")
            and not _goes_along(path.rsplit("/", 1)[-1])
            and ((part := _PART.match(path)) is None or int(part[2]) == 1)]


def _goes_along(name: str) -> bool:
    """Whether a GGUF file goes along with a model. A model may have "mtp" inside its name."""
    return "mmproj" in name or "imatrix" in name or name.startswith(
        (MTP_FILE, EAGLE_FILE, *BLOCK_FILES))


def name_of(repo: str, path: str) -> str:
    """Return the name of a file of a repository: `user/repo:Q8_0`."""
    quant = quant_of(path)
    return f"{repo}:{quant}" if quant else repo


def choose(wanted: Wanted, files: Mapping[str, int]) -> list[str]:
    """Return the parts of the file that `wanted` means, in order.

    files: of the repository, with their bytes
    Raises ModelError, which lists the available files, for what the repository does not have.
    """
    models = models_in(files) or [one for start in (EAGLE_FILE, *BLOCK_FILES)
                                  for one in _named(start, files)]
    if wanted.file:
        if wanted.file not in files:
            raise ModelError(f"{wanted.repo} has no file {wanted.file}: {_listed(models, files)}")
        return parts_of(wanted.file, files)
    if not models:
        kinds = sorted({path.rsplit(".", 1)[-1] for path in files if "." in path})
        raise ModelError(
            f"{wanted.repo} holds no GGUF model ({len(files)} files: {', '.join(kinds[:8])}): look "
            "for a repository whose name ends in -GGUF, or convert it with llama.cpp")
    for quant in (wanted.quant,) if wanted.quant else PREFERRED:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quant)}[.-]", re.IGNORECASE)
        for path in models:
            if pattern.search(path):
                return parts_of(path, files)
    if wanted.quant:
        raise ModelError(f"{wanted.repo} has no {wanted.quant}: {_listed(models, files)}")
    return parts_of(models[0], files)


def head_beside(path: str, files: Mapping[str, int], start: str) -> str:
    """Return the prediction head next to a model: of its quantisation, else the smallest; "" where
    there is none.

    path: of the model
    files: of the repository, with their bytes
    start: of the head's name
    """
    folder, quant = path.rpartition("/")[0], quant_of(path)
    heads = [one for one in _named(start, files) if one.rpartition("/")[0] == folder]
    return min(heads, key=lambda one: (quant_of(one) != quant, files[one]), default="")


def _named(start: str, files: Mapping[str, int]) -> list[str]:
    return [path for path in sorted(files) if path.endswith(".gguf")
            and path.rsplit("/", 1)[-1].startswith(start)]


def parts_of(path: str, files: Mapping[str, int]) -> list[str]:
    """Return all parts of the model whose first part, or only file, is `path`.

    Raises ModelError where a part is missing.
    """
    found = _PART.match(path)
    if found is None:
        return [path]
    parts = [f"{found[1]}-{i:05d}-of-{found[3]}.gguf" for i in range(1, int(found[3]) + 1)]
    if missing := [part for part in parts if part not in files]:
        raise ModelError(f"{path} is one of {len(parts)} parts, but {', '.join(missing[:3])} "
                         "cannot be found with it")
    return parts


def size_text(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _listed(models: list[str], files: Mapping[str, int]) -> str:
    names = [f"{quant_of(path) or path} ({size_text(_total(path, files))})" for path in models]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"there are {', '.join(names[:_MOST_NAMES])}{more}" if names else "it has no model"


def _total(path: str, files: Mapping[str, int]) -> int:
    try:
        return sum(files[part] for part in parts_of(path, files))
    except ModelError:
        return files[path]
