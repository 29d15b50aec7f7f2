"""Types of tensors are the library's, without what its package brings along."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.launch import ROOT

ALONE = """
import sys
from pipeinfer.models.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType
assert not {"gguf", "yaml"} & set(sys.modules), "the whole package was imported"
import gguf
assert {int(kind): size for kind, size in GGML_QUANT_SIZES.items()} == {
    int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
for kind in gguf.GGMLQuantizationType:
    assert GGMLQuantizationType(kind).name == kind.name
    assert GGMLQuantizationType(kind) == kind
    assert GGML_QUANT_SIZES.get(kind) == gguf.GGML_QUANT_SIZES.get(kind)
"""
BESIDE = """
import gguf
from pipeinfer.models.quant_types import GGMLQuantizationType
assert GGMLQuantizationType is gguf.GGMLQuantizationType
"""


def test_they_are_those_of_the_library_whoever_imports_it_first():
    for program in (ALONE, BESIDE):
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=ROOT)
