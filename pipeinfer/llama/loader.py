"""Finds the llama.cpp library to run: a compiled llama-cpp-python, else the prebuilt xllamacpp.

Of either package only the shared library is used, never its Python code; `binding` binds the
functions. Only versions that were tested are accepted, because the layouts of their structs are
stored here; others are refused. PIPEINFER_LLAMA=prebuilt ignores a compiled library,
PIPEINFER_LLAMA=vulkan takes cyllama-vulkan, whose GPU backend is Vulkan's.
PIPEINFER_LLAMA_LIBRARY=/path/libllama.so ignores both packages: the file counts as a build of the
compiled package's version.

Uses packages and files; loads nothing.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from pipeinfer.errors import BackendError
from pipeinfer.llama.platform_check import COMPILE, why_no_wheel, why_not_here

#: values of PIPEINFER_LLAMA
CHOICES = ("", "native", "prebuilt", "vulkan")
#: the variable with the path of a library
LIBRARY_VARIABLE = "PIPEINFER_LLAMA_LIBRARY"


class Package(Struct, frozen=True):
    """A package that contains the library.

    module: its name for Python
    file: the library in it, a pattern
    layouts: (version, layout of its structs), see `binding`
    """

    name: str
    module: str
    file: str
    layouts: tuple[tuple[str, str], ...]

    @property
    def newest(self) -> str:
        """The version to install."""
        return self.layouts[-1][0]


NATIVE = Package("llama-cpp-python", "llama_cpp", "lib/libllama.so", (("0.3.36", "plain"),))
PREBUILT = Package("xllamacpp", "xllamacpp", "xllamacpp.abi3.so",
                   (("2026.10.11549", "moe cache"),))
VULKAN = Package("cyllama-vulkan", "cyllama", "../cyllama_vulkan.libs/libllama-*",
                 (("0.7.0", "moe cache"),))


class Library(Struct, frozen=True):
    """A library that can be loaded.

    layouts: possible layouts of its structs; the first that matches its defaults is used
    compiled: whether a user compiled it for this host
    stamp: distinguishes builds of the same name
    """

    package: str
    version: str
    path: Path
    layouts: tuple[str, ...]
    compiled: bool
    stamp: str = ""

    @property
    def name(self) -> str:
        """Package and version, which identify llama.cpp's source and layout."""
        return f"{self.package} {self.version}"


def find_library() -> Library:
    """Return the library that this process runs. Raises BackendError, in one line, without one."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        return _named(Path(named))
    choice = os.environ.get("PIPEINFER_LLAMA", "")
    if choice not in CHOICES:
        raise BackendError(f"PIPEINFER_LLAMA={choice}: not one of {', '.join(CHOICES[1:])}")
    if choice == "vulkan":
        if (path := _path_of(VULKAN)) is None:
            raise BackendError(f"no llama.cpp with Vulkan is installed: pip install {VULKAN.name}"
                               f"=={VULKAN.newest} (Python 3.12 or newer, x86-64)")
        return _known(VULKAN, path.resolve(), compiled=False)
    native = None if choice == "prebuilt" else _path_of(NATIVE)
    if native is not None:
        return _known(NATIVE, native, compiled=True)
    if choice == "native":
        raise BackendError(f"no compiled llama.cpp is installed: {COMPILE}")
    prebuilt = _path_of(PREBUILT)
    if prebuilt is None:
        raise BackendError("llama.cpp is not installed: " + (
            f"{reason}, and {COMPILE}" if (reason := why_no_wheel()) else
            f"pip install {PREBUILT.name}=={PREBUILT.newest} installs it prebuilt, {COMPILE}"))
    if reason := why_not_here():
        raise BackendError(reason)
    return _known(PREBUILT, prebuilt, compiled=False)


def _named(path: Path) -> Library:
    """The library at this path; its version is only checked by its defaults (see `binding`)."""
    if not path.is_absolute() or not path.is_file():
        raise BackendError(f"{LIBRARY_VARIABLE}={path}: not the absolute path of a file")
    like = NATIVE.newest
    known = tuple(layout for package in (NATIVE, PREBUILT) for _, layout in package.layouts)
    # other libraries in the same folder may be parts of the build; a link may lead nowhere
    built = max(one.stat().st_mtime_ns for one in (path, *path.parent.glob("*.so*"))
                if one.exists())
    return Library(str(path), f"as {NATIVE.name} {like}", path, known, compiled=True,
                   stamp=str(built))


def _path_of(package: Package) -> Path | None:
    """The package's library, None where it is not installed or was built without one."""
    spec = find_spec(package.module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(package.file)):
            return path
    return None


def _known(package: Package, path: Path, *, compiled: bool) -> Library:
    try:
        found = version(package.name)
    except PackageNotFoundError:
        found = "of an unknown version"
    layout = dict(package.layouts).get(found)
    if layout is None:
        raise BackendError(
            f"{package.name} {found} is installed, whose C structs pipeinfer does not know: "
            f"pip install {package.name}=={package.newest}")
    return Library(package.name, found, path, (layout,), compiled)
