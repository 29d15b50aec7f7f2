"""Builds the optional C parts; everything else about the package stands in setup.cfg.

Without a compiler they are left out: Python or llama.cpp does their work.
"""

from setuptools import Extension, setup

setup(ext_modules=[Extension(
    "pipeinfer.backends.llamacpp._layer_filter",
    ["pipeinfer/backends/llamacpp/layer_filter.c", "pipeinfer/backends/llamacpp/sums.c",
     "pipeinfer/backends/llamacpp/spin.c"],
    depends=["pipeinfer/backends/llamacpp/sums.h"],
    extra_compile_args=["-O3"],
    optional=True,
    py_limited_api=True,
), Extension(
    "pipeinfer.models._short_runs",
    ["pipeinfer/models/short_runs.c", "pipeinfer/models/repacked_runs.c",
     "pipeinfer/models/wide_floats.c", "pipeinfer/models/short_attention.c",
     "pipeinfer/models/huge_pages.c"],
    depends=["pipeinfer/models/short_runs.h"],
    # products and sums are rounded where the code says so
    extra_compile_args=["-O3", "-ffp-contract=off"],
    libraries=["m"],
    optional=True,
    py_limited_api=True,
)])
