"""Builds the optional C parts; everything else about the package stands in pyproject.toml.

Without a compiler they are left out: Python or llama.cpp does their work.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

#: Python's own flags have -g, which nearly doubles the time
NO_DEBUG_INFO = "-g0"


class Parallel(build_ext):
    """Compiles the files of an extension at the same time: one after the other takes longer than
    all downloads."""

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [name for found in pool.map(
                    lambda source: one_by_one([source], **options), sources) for name in found]

        self.compiler.compile = compile_all
        super().build_extensions()


PARTS = [Extension(
    "pipeinfer.llama.kernels._layer_filter",
    ["pipeinfer/llama/kernels/layer_filter.c", "pipeinfer/llama/kernels/sums.c",
     "pipeinfer/llama/kernels/spin.c"],
    depends=["pipeinfer/llama/kernels/sums.h"],
    extra_compile_args=["-O3", NO_DEBUG_INFO],
    libraries=["m"],
    optional=True,
    py_limited_api=True,
), Extension(
    "pipeinfer.llama.kernels._short_runs",
    [f"pipeinfer/llama/kernels/{name}.c" for name in (
        "short_runs", "products_avx2", "products_avx_vnni", "products_avx512_vnni", "floats_avx2",
        "floats_avx512", "products_neon", "products_dotprod", "products_dotprod_own", "floats_neon",
        "wide_prompts", "repacked_runs", "repacked_prompts", "repacked_experts", "short_attention",
        "wide_attention", "huge_pages")],
    depends=[f"pipeinfer/llama/kernels/{name}.h" for name in (
        "short_runs", "repacked", "avx2", "wide", "attention", "products_x86", "neon",
        "products_neon")],
    # products and sums are rounded where the code says so
    extra_compile_args=["-O3", "-ffp-contract=off", NO_DEBUG_INFO],
    libraries=["m"],
    optional=True,
    py_limited_api=True,
)]
setup(cmdclass={"build_ext": Parallel},
      ext_modules=[] if os.environ.get("PIPEINFER_WITHOUT_C") else PARTS)
