"""Parts of writing a model as a GGUF file that any llama.cpp loads: its shape and its weights.

The output matrix is left out: loaders tie it to the embedding. Does not know: training, tokenizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf

if TYPE_CHECKING:
    from pipeinfer.lab.training.network.model import Llama, LlamaConfig


def add_shape(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    """The sizes of a model."""
    writer.add_vocab_size(config.n_vocab)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_ff)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head_kv)
    writer.add_rope_dimension_count(config.head_size)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def write_weights(
    writer: gguf.GGUFWriter, model: Llama, qtype: gguf.GGMLQuantizationType
) -> None:
    """Write the whole file: header and weights, matrices as ``qtype``, norms as float32."""
    for name, parameter in model.state_dict().items():
        data = parameter.float().numpy()
        if data.ndim == 1:
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    finish(writer)


def copy_field(writer: gguf.GGUFWriter, field: gguf.ReaderField, value: Any) -> None:
    """Write ``value`` under the name and with the type of another file's field."""
    kind = field.types[0]
    sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, value, kind, sub_type=sub)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
