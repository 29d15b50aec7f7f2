"""The decision whether llama.cpp may repack a file's weights for this processor's kernels."""

from __future__ import annotations

from pipeinfer.llama import binding, short_runs
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.quant_types import GGMLQuantizationType

#: llama.cpp's numbers for files of Q4_K_S and Q4_K_M; each part of a split file has it, too
_MOSTLY_Q4_K = (14, 15)


def may_repack(model: ModelFile) -> bool:
    """Return whether the file's weights are to be repacked for this processor when they are loaded.

    Compiled for AMX, llama.cpp crashes on repacked weights at two rows or more (its issue 20824).
    Its kernels for repacked Q4_K sum in an order that depends on the number of rows. Those of
    `short_runs` for Q4_K use the file's layout and one order for all. With repacked weights it
    takes a row for an expert at most once; in slices with some experts a row may be several times
    in the place of experts that other slices have. Raises BackendError without a library.
    """
    if model.get("pipeinfer.experts"):
        return False
    if b"AMX_INT8 = 1" in binding.llama_print_system_info():
        return False
    if "q4_K" not in short_runs.used():
        return True
    kind = model.get("general.file_type")
    return not (_mostly_q4_k(model) if kind is None else kind in _MOSTLY_Q4_K)


def _mostly_q4_k(model: ModelFile) -> bool:
    """For files without a stated type: whether more of the file is Q4_K than Q4_0, the other type
    whose layout changes.
    """
    sizes = {GGMLQuantizationType.Q4_0: 0, GGMLQuantizationType.Q4_K: 0}
    for tensor in model.tensors.values():
        if tensor.type in sizes:
            sizes[GGMLQuantizationType(tensor.type)] += tensor.nbytes
    return sizes[GGMLQuantizationType.Q4_K] > sizes[GGMLQuantizationType.Q4_0]
