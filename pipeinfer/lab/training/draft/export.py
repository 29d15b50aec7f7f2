"""Writes a draft as GGUF, with the tokenizer of its target.

Does not know: training.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf

from pipeinfer.lab.training.network.export import add_shape, copy_field, write_weights
from pipeinfer.lab.training.network.model import Llama

_TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_1": gguf.GGMLQuantizationType.Q4_1,
          "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
               "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
QUANTISATIONS = tuple(_TYPES)


def write_draft(path: Path, draft: Llama, target: Path, quantisation: str, description: str
                ) -> None:
    """Write `path` whole or not at all; vocabulary, marks and chat template are the target's.

    Matrices get `quantisation` (a name of QUANTISATIONS), norms stay float32.
    """
    reader = gguf.GGUFReader(target)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    named = reader.fields.get("general.name")
    writer.add_name(f"draft for {named.contents() if named else target.stem}")
    writer.add_description(description)
    if (licence := reader.fields.get("general.license")) is not None:
        writer.add_license(licence.contents())
    writer.add_file_type(_FILE_TYPES[quantisation])
    add_shape(writer, draft.config)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            copy_field(writer, field, field.contents())
    write_weights(writer, draft, _TYPES[quantisation])
    os.replace(partial, path)


def as_quantised(draft: Llama, quantisation: str) -> Llama:
    """A copy whose matrices have gone through `quantisation`, as those of the file have."""
    kind, copy = _TYPES[quantisation], Llama(draft.config)
    import torch

    copy.load_state_dict({
        name: value if value.ndim == 1 else torch.from_numpy(gguf.quants.dequantize(
            gguf.quants.quantize(value.float().numpy(), kind), kind))
        for name, value in draft.state_dict().items()})
    return copy
