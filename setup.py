"""Builds the optional C part; everything else about the package stands in setup.cfg.

Without a compiler it is left out, and Python does its work.
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
)])
