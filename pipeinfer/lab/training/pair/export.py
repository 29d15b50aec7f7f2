"""Writes a trained model and its tokenizer as one GGUF file that any llama.cpp loads.

Matrices become Q8_0 (blocks of 32 along a row), norms stay float32. The output matrix is left
out: loaders tie it to the embedding.

Does not know: training, or where files belong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from pipeinfer.lab.training.pair.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT_ID,
    IM_END_ID,
    PAD_ID,
    SPECIALS,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pipeinfer.lab.training.pair.model import Llama, LlamaConfig


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The general.* fields that say what a file is."""

    name: str
    description: str
    license: str


def write_gguf(
    path: Path,
    model: Llama,
    tokenizer: Tokenizer,
    card: ModelCard,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    *,
    tags: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``path`` whole or not at all.

    ``tags``: so many tokens after the control tokens are user-defined, that is, parsed from any
    text and rendered as text. ``metadata``: further string fields of the header.
    """
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(card.name)
    writer.add_description(card.description)
    writer.add_license(card.license)
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_Q8_0
        if qtype == gguf.GGMLQuantizationType.Q8_0
        else gguf.LlamaFileType.ALL_F32
    )
    add_shape(writer, model.config)
    _add_tokenizer(writer, tokenizer, tags)
    for key, value in (metadata or {}).items():
        writer.add_string(key, value)
    write_weights(writer, model, qtype)
    os.replace(partial, path)


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


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, tags: int) -> None:
    """The vocabulary, merges and control tokens as llama.cpp wants them."""
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["merges"]]
    kinds = np.full(len(tokens), int(gguf.TokenType.NORMAL))
    kinds[: len(SPECIALS)] = int(gguf.TokenType.CONTROL)
    kinds[len(SPECIALS) : len(SPECIALS) + tags] = int(gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds.tolist())
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_TEXT_ID)
    writer.add_eos_token_id(END_OF_TEXT_ID)
    writer.add_eot_token_id(IM_END_ID)
    writer.add_pad_token_id(PAD_ID)
    # Every training document begins with the end-of-text token, so a prompt does too.
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
