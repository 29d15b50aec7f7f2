"""Writes a head as a GGUF file of the architecture `eagle3`, without what is the target's.

Embedding, output matrix and vocabulary are left out; `pipeinfer.models.heads` adds them.
Independent of training.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from pipeinfer.lab.training.eagle3.head import EagleHead
from pipeinfer.lab.training.network.export import finish

FROM_TARGET = "pipeinfer.eagle3.from_target"  #: key with what the file leaves to the target
_NAMES = {"enc_norm": "enc.output_norm", "fc": "fc", "output_norm": "output_norm"}
_Q4_0 = gguf.GGMLQuantizationType.Q4_0


def write_head(path: Path, head: EagleHead, tokens: npt.NDArray[np.int64], target: Path,
               description: str) -> None:
    """Write `path` whole or not at all: matrices in Q4_0, norms in float32.

    tokens: int64[n], those that the head can propose; the output matrix has their rows, in order.
    """
    fields = gguf.GGUFReader(target).fields
    named, shape = fields.get("general.name"), head.config
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "eagle3")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"EAGLE-3 head for {named.contents() if named else target.stem}")
    writer.add_description(description)
    if (licence := fields.get("general.license")) is not None:
        writer.add_license(licence.contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(1)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_array("eagle3.target_layers", list(shape.taps))
    writer.add_uint32("eagle3.target_hidden_size", shape.n_embd)
    writer.add_bool("eagle3.norm_before_fc", True)
    writer.add_array(FROM_TARGET, ["token_embd", "output", "tokenizer"])
    for name, value in head.state_dict().items():
        part = name.removesuffix(".weight")
        data = value.float().numpy()
        stored = f"{_NAMES.get(part, f'blk.0.{part}')}.weight"
        if data.ndim == 1:
            writer.add_tensor(stored, data)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(data, _Q4_0), raw_dtype=_Q4_0)
    writer.add_tensor("d2t", tokens)
    finish(writer)
    os.replace(partial, path)
