"""llama.cpp's own programs: a folder that has them, or one in which they are built.

The sources are those that llama-cpp-python brings, so both sides run one state of llama.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import click

from pipeinfer.llama.loader import NATIVE
from pipeinfer.llama.platform_check import cpu_flags

NAMES = ("llama-bench", "llama-speculative-simple", "ggml-rpc-server")
SERVER = "llama-server"
PACKAGE = f"llama-cpp-python=={NATIVE.newest}"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_RPC=ON", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_UI=OFF", "-DGIT_EXE=false",
)
_DOWNLOAD_SECONDS, _BUILD_SECONDS = 900.0, 4 * 3600.0


def find(folder: Path | None, work: Path, names: Sequence[str] = NAMES) -> Path:
    """The folder with these programs: the one named, else one below `work`, built if need be.

    Raises ClickException, saying what to do.
    """
    if folder is not None:
        if lacking := _lacking(folder, names):
            raise click.ClickException(
                f"{folder} has no {', '.join(lacking)}: build llama.cpp's targets of these names "
                "with -DGGML_RPC=ON, or leave --programs out")
        return folder
    build = work / f"llama.cpp-{NATIVE.newest}"
    if _lacking(build / "bin", names):
        _build(sources(work), build, names)
    return build / "bin"


def step(command: list[str], seconds: float, hint: str) -> None:
    """Run one step of a preparation, its output on standard error.

    Raises ClickException with `hint` where it fails or takes longer than `seconds`.
    """
    try:
        done = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False,
                              timeout=seconds)
    except FileNotFoundError:
        raise click.ClickException(f"there is no {command[0]} here: {hint}") from None
    except subprocess.TimeoutExpired:
        raise click.ClickException(
            f"`{' '.join(command)}` took over {seconds:.0f} s: {hint}") from None
    if done.returncode:
        raise click.ClickException(f"`{' '.join(command)}` failed: {hint}")


def fetch(package: str, folder: Path, *options: str) -> None:
    """Download one package as it is from PyPI into `folder`. Raises ClickException."""
    step([sys.executable, "-m", "pip", "download", "--no-deps", *options, "-d", str(folder),
          package], _DOWNLOAD_SECONDS, f"put the file of {package} from PyPI into {folder}")


def sources(work: Path) -> Path:
    """llama.cpp's sources, downloaded and unpacked below `work` on first use. Raises
    ClickException."""
    name = PACKAGE.replace("llama-cpp-python==", "llama_cpp_python-")
    source = work / name / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").is_file():
        archive = work / f"{name}.tar.gz"
        if not archive.is_file():
            fetch(PACKAGE, work, "--no-binary", ":all:")
        click.echo(f"unpacking {archive}", err=True)
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
    return source


def _build(source: Path, build: Path, names: Sequence[str]) -> None:
    hint = "install cmake and a C++ compiler, or name a folder of programs with --programs"
    step(["cmake", "-S", str(source), "-B", str(build), *FLAGS, *_without_amx()], 600, hint)
    step(["cmake", "--build", str(build), "-j", str(os.cpu_count() or 1), "--target", *names],
         _BUILD_SECONDS, hint)


def _without_amx() -> list[str]:
    """As launch/demo --native compiles: with AMX llama.cpp crashes on weights laid out anew."""
    if "amx_int8" not in cpu_flags():
        return []
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    return [f"-DCMAKE_{language}_FLAGS={flags}" for language in ("C", "CXX")]


def _lacking(folder: Path, names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.access(folder / name, os.X_OK)]
