"""Builds libllama for processors older than this one, from the sources of llama-cpp-python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.programs import sources

_LATER = ("AVX2", "FMA", "F16C", "BMI2")
#: name -> cmake's options of ggml
FLAGS = {
    "avx": {"SSE42": "ON", "AVX": "ON", **dict.fromkeys(_LATER, "OFF")},
    "avx-no-llamafile": {"SSE42": "ON", "AVX": "ON", **dict.fromkeys(_LATER, "OFF"),
                         "LLAMAFILE": "OFF"},
    "sse": {"SSE42": "ON", "AVX": "OFF", **dict.fromkeys(_LATER, "OFF")},
}
_OFF = ("LLAMA_BUILD_COMMON", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES",
        "LLAMA_BUILD_SERVER", "LLAMA_BUILD_APP")


def library(name: str, work: Path, source: Path | None, jobs: int) -> Path:
    """libllama.so of the build `name` in `FLAGS`; what was built before is taken as it is.

    All builds share one tree, since the flags concern ggml's kernels alone.
    """
    built = work / name / "libllama.so"
    if built.is_file():
        return built
    tree = work / "build"
    flags = {**dict.fromkeys(_OFF, "OFF"), "GGML_NATIVE": "OFF", "CMAKE_BUILD_TYPE": "Release",
             "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",  # copies find each other, not the tree's
             "GGML_LLAMAFILE": "ON",
             **{f"GGML_{key}": value for key, value in FLAGS[name].items()}}
    subprocess.run(["cmake", "-S", source or sources(work), "-B", tree,
                    *(f"-D{key}={value}" for key, value in flags.items())], check=True)
    subprocess.run(["cmake", "--build", tree, "--target", "llama", "-j", str(jobs)], check=True)
    partial = built.parent.with_suffix(".partial")
    shutil.copytree(tree / "bin", partial, symlinks=True, dirs_exist_ok=True)
    partial.rename(built.parent)
    return built
