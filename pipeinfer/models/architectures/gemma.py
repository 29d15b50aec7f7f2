"""Gemma: rows of tokens are multiplied by the root of their size, and layers have windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut, Torch, number
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import block_size

_SCALED_OTHERWISE_2, _SCALED_OTHERWISE_3 = 46, 62
_GEMMA2_NAMES = {"post_attention_layernorm": "post_attention_norm",
                 "pre_feedforward_layernorm": "ffn_norm",
                 "post_feedforward_layernorm": "post_ffw_norm"}


def _refuses(n_layers: int) -> Callable[[ModelFile], str]:
    """The refusal of the one model whose queries are scaled in another way."""
    return lambda model: "" if model.n_layers != n_layers else (
        f"llama.cpp tells by its {n_layers} layers how to scale queries, and a part of it has "
        "fewer")


def _gemma4_refuses(model: ModelFile) -> str:
    table = model.tensors.get("per_layer_token_embd.weight")
    if table is not None and number(model, keys.PER_LAYER) % block_size(table):
        return f"the columns that a layer has of {table.name} are no whole blocks"
    if len({number(model, f"attention.key_length{kind}") % 64 == 0 for kind in ("", "_swa")}) > 1:
        return "llama.cpp tells by the size of heads of its first layer how to keep keys"
    if not model.is_array(f"{model.architecture}.{keys.PATTERN}"):
        return ("it does not say which layers have a sliding window "
                f"({model.architecture}.{keys.PATTERN})")
    return ""


def _gemma2_config(model: ModelFile, value: Callable[..., Any]) -> dict[str, Any]:
    width = model.n_embd // int(value("attention.head_count"))
    return {"sliding_window": int(value(keys.WINDOW, 4096)),
            "attn_logit_softcapping": float(value("attn_logit_softcapping", 50.0)),
            "final_logit_softcapping": float(value("final_logit_softcapping", 30.0)),
            "query_pre_attn_scalar": width if model.n_layers == _SCALED_OTHERWISE_2
            else int(value("attention.key_length", width))}


ARCHITECTURES = (
    Architecture(("gemma",), scaled=True, entry="inp_scaled",
                 torch=Torch(("gemma",), norm_offset=1.0)),
    Architecture(
        ("gemma2",), Cut(period=2, refuses=_refuses(_SCALED_OTHERWISE_2)), scaled=True,
        partly=True, sliced=True, entry="inp_scaled",
        torch=Torch(("gemma2",), norm_offset=1.0, names=_GEMMA2_NAMES, config=_gemma2_config)),
    Architecture(("gemma3",), Cut(period=6, plain=True, refuses=_refuses(_SCALED_OTHERWISE_3)),
                 scaled=True, partly=True, sliced=True, torch=Torch(("gemma3_text",), gguf=False)),
    Architecture(
        ("gemma4",), Cut(period=1, arrays=(keys.KV_HEADS, keys.FF), least=2,
                         far_only=("rope_freqs.weight",), refuses=_gemma4_refuses),
        varied=True, scaled=True, partly=True, sliced=True, entry="inp_scaled", again="attn_out-0",
        row_parts=lambda get: 1 + (int(get(keys.PER_LAYER) or 0) > 0)),
    Architecture(("gemma3n",), splits=False, checked=False, unsplit="its rows have four streams, "
                 "each layer reads the token itself, and the last ones read the cache of others"),
    Architecture(("gemma4-assistant",), splits=False, checked=False, assistant=True),
)
