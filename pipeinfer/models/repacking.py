"""Whether llama.cpp may lay out a file's weights anew for this processor's kernels."""

from __future__ import annotations

from pipeinfer.llama import binding, short_runs
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.quant_types import GGMLQuantizationType

#: llama.cpp's numbers for files of Q4_K_S and Q4_K_M; what each part of a split file still says
_MOSTLY_Q4_K = (14, 15)

def may_repack(model: ModelFile) -> bool:
    """Whether the file's weights are to be laid out anew for this processor's kernels when they
    are loaded.

    Compiled for AMX, llama.cpp crashes on repacked weights at two rows or more (its issue 20824).
    Of Q4_K its kernels for repacked weights take each number of rows in another order, while those
    of `short_runs` take them in the file's layout, all alike. Raises BackendError without a
    library.
    """
    if b"AMX_INT8 = 1" in binding.llama_print_system_info():
        return False
    if "q4_K" not in short_runs.used():
        return True
    kind = model.get("general.file_type")
    return not (_mostly_q4_k(model) if kind is None else kind in _MOSTLY_Q4_K)


def _mostly_q4_k(model: ModelFile) -> bool:
    """For files that do not say what they are: whether more of it is Q4_K than Q4_0, the other type
    whose layout changes."""
    sizes = {GGMLQuantizationType.Q4_0: 0, GGMLQuantizationType.Q4_K: 0}
    for tensor in model.tensors.values():
        if tensor.type in sizes:
            sizes[GGMLQuantizationType(tensor.type)] += tensor.nbytes
    return sizes[GGMLQuantizationType.Q4_K] > sizes[GGMLQuantizationType.Q4_0]
