"""What differs on older processors: this one imitates them, by libraries and by variables.

    python -m benchmarks.portability --work DIR [--only avx,sse] [--source LLAMA_CPP]

llama.cpp is built for AVX alone, with and without llamafile's kernels, and for SSE 4.2 alone
(stored in --work; some minutes), and pipeinfer loads it by PIPEINFER_LLAMA_LIBRARY. For AVX2 it is
the prebuilt library. torch, oneDNN and numpy are kept from newer instructions by variables. In each
environment `pipeinfer doctor --exact` prints R for every type of weights, and pytest runs the tests
of splits, cache operations, widths, losslessness and sampling. Caches and the clock of an old
processor are not imitated, so no times are measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.peers.programs import sources
from pipeinfer.llama.loader import LIBRARY_VARIABLE
from tests.kit.random_model import RandomSpec, write_random_model

_LATER = dict.fromkeys(("AVX2", "FMA", "F16C", "BMI2"), "OFF")
#: build -> cmake's options of ggml
BUILDS = {"avx": {"SSE42": "ON", "AVX": "ON", **_LATER},
          "avx-no-llamafile": {"SSE42": "ON", "AVX": "ON", **_LATER, "LLAMAFILE": "OFF"},
          "sse": {"SSE42": "ON", "AVX": "OFF", **_LATER}}
_PARTS = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")  #: of llama.cpp, not built
_NEW, _NO_AVX2 = ("X86_V4", "AVX512_ICL", "AVX512_SPR"), {"PIPEINFER_SHORT_RUNS": "one-by-one"}
#: types of the random models; llama.cpp's own mix stands for Q4_K
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M")
_POLICIES = "tests/mpi/test_matrix.py::test_every_policy_writes_the_tokens_of_plain_decoding"
TESTS = (
    "tests/backends/test_split_parity.py::test_splits_are_bit_equal",
    "tests/backends/test_split_parity.py::"
    "test_logits_up_to_the_exact_width_ignore_neighbours_beyond_512_cells",
    "tests/backends/test_kv_state.py", "tests/core/test_sampling.py",
    "tests/backends/test_torch_backend.py::test_rows_up_to_the_exact_width_are_single_rows",
    "tests/backends/test_torch_cells.py",
    *(f"{_POLICIES}[{kind}-{ranks} ranks]" for kind in ("plain", "torch") for ranks in (1, 3)))


@dataclass(frozen=True, slots=True)
class Environment:
    """variables: beside those of the library. numpy: its instruction sets that are left alone."""

    variables: dict[str, str]
    numpy: tuple[str, ...]
    build: str = ""


ENVIRONMENTS = {
    "avx2": Environment({"PIPEINFER_LLAMA": "prebuilt", "ATEN_CPU_CAPABILITY": "avx2",
                         "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, _NEW),
    "avx": Environment({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX",
                        "MKL_ENABLE_INSTRUCTIONS": "AVX", **_NO_AVX2}, ("X86_V3", *_NEW), "avx"),
    "avx-no-llamafile": Environment(_NO_AVX2, ("X86_V3", *_NEW), "avx-no-llamafile"),
    "sse": Environment({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41",
                        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", **_NO_AVX2}, ("X86_V3", *_NEW), "sse"),
}


def library(name: str, work: Path, source: Path | None) -> Path:
    """libllama.so of one of BUILDS; all are built in one tree, as they differ in ggml's kernels."""
    built, tree = work / name / "libllama.so", work / "build"
    if built.is_file():
        return built
    flags = {"GGML_NATIVE": "OFF", "CMAKE_BUILD_TYPE": "Release", "GGML_LLAMAFILE": "ON",
             "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",  # copies find each other, not the tree's
             **{f"LLAMA_BUILD_{part}": "OFF" for part in _PARTS},
             **{f"GGML_{key}": value for key, value in BUILDS[name].items()}}
    subprocess.run(["cmake", "-S", source or sources(work), "-B", tree,
                    *(f"-D{key}={value}" for key, value in flags.items())], check=True)
    subprocess.run(["cmake", "--build", tree, "--target", "llama", "-j", str(os.cpu_count() or 1)],
                   check=True)
    partial = built.parent.with_suffix(".partial")
    shutil.copytree(tree / "bin", partial, symlinks=True, dirs_exist_ok=True)
    partial.rename(built.parent)
    return built


def variables(name: str, work: Path, source: Path | None) -> dict[str, str]:
    """The whole environment of a process that imitates this processor."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    environment = ENVIRONMENTS[name]
    left = [one for one in environment.numpy
            if one in __cpu_dispatch__ and __cpu_features__.get(one)]
    found = {**os.environ, **environment.variables}
    if left:
        found["NPY_DISABLE_CPU_FEATURES"] = " ".join(left)
    if environment.build:
        found[LIBRARY_VARIABLE] = str(library(environment.build, work, source).absolute())
    return found


@click.command()
@click.option("--work", type=click.Path(path_type=Path), required=True,
              help="Stores builds and models.")
@click.option("--only", default=",".join(ENVIRONMENTS), show_default=True)
@click.option("--source", type=click.Path(path_type=Path, exists=True),
              help="A folder of llama.cpp; downloaded otherwise.")
def main(work: Path, only: str, source: Path | None) -> None:
    """Print R by type of weights in each environment, and what the tests report there."""
    names = only.split(",")
    if unknown := set(names) - set(ENVIRONMENTS):
        raise click.BadParameter(f"no environment {', '.join(sorted(unknown))}")
    work.mkdir(parents=True, exist_ok=True)
    models = [work / f"{kind}.gguf" for kind in TYPES]
    for kind, path in zip(TYPES, models, strict=True):
        if not path.exists():
            write_random_model(path, RandomSpec(n_layer=4, n_embd=1024, n_head=8, n_head_kv=4,
                                                n_ff=2816, qtype=kind))
    failed = 0
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            env = variables(name, work, source) | {"PIPEINFER_CACHE": cache}
            for model in ("embedded", *map(str, models)):
                print(f"{name}, {model}:", flush=True)
                failed |= subprocess.run([sys.executable, "-m", "pipeinfer", "doctor", "--exact",
                                          "-m", model], env=env, check=False).returncode
            failed |= subprocess.run([sys.executable, "-m", "pytest", "-q", "-p",
                                      "no:cacheprovider", *TESTS], env=env, check=False).returncode
    sys.exit(failed)


if __name__ == "__main__":
    main()
