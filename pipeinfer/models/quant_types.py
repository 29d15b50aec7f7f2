"""llama.cpp's types of tensors and their sizes, from the package gguf.

That package also imports writers, metadata and a YAML reader, a tenth of a rank's start-up time;
this module loads its one file with the constants.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
else:
    def _constants() -> ModuleType:
        if known := sys.modules.get("gguf.constants"):
            return known
        package = importlib.util.find_spec("gguf")
        if package is None or package.origin is None:
            raise ImportError("the package gguf is not installed", name="gguf")
        spec = importlib.util.spec_from_file_location(
            f"{__name__}.constants", Path(package.origin).with_name("constants.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _found = _constants()
    GGML_QUANT_SIZES = _found.GGML_QUANT_SIZES
    GGMLQuantizationType = _found.GGMLQuantizationType

__all__ = ["GGML_QUANT_SIZES", "GGMLQuantizationType"]
