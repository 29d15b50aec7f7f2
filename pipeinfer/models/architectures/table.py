"""The declarations of all architectures, by family. See `declaration` for the fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import (
    Architecture,
    Cut,
    Torch,
    number,
    values_of,
)
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import block_size


def _llama_config(model: ModelFile, _: Callable[..., Any]) -> dict[str, Any]:
    return {"attention_bias": True} if "blk.0.attn_q.bias" in model.tensors else {}


def _minicpm_scale(model: ModelFile) -> Mapping[str, float]:
    if model.arch_get(keys.RESIDUAL_SCALE) is not None:
        return {}
    return {keys.RESIDUAL_SCALE: float(
        np.float32(1.4) / np.sqrt(np.float32(model.n_layers), dtype=np.float32))}


NORMS = "its norm of queries and keys goes over all heads, of which a slice has some"


def _is_lite(model: ModelFile) -> bool:
    return "blk.0.attn_q.weight" in model.tensors


def _deepseek2_mistaken(model: ModelFile, count: int) -> bool:
    """With 26 or 27 layers llama.cpp assumes uncompressed queries."""
    return not _is_lite(model) and (
        count in (26, 27) or (count, model.n_vocab) == (48, 128256))


def _deepseek2_writes(model: ModelFile) -> Mapping[str, int]:
    """What llama.cpp would otherwise derive from the number of layers or tokens."""
    found = {"attention.q_lora_rank": 0} if _is_lite(model) else {}
    if not number(model, "expert_gating_func"):
        sigmoid = model.n_layers in (47, 48) and model.n_vocab == 154880
        found["expert_gating_func"] = 2 if sigmoid else 1
    return found


_WITH_WINDOWS = 64  #: number of layers from which llama.cpp knows an exaone4 with windows


def _exaone4_refuses(model: ModelFile) -> str:
    return "" if model.n_layers != _WITH_WINDOWS else (
        f"llama.cpp tells by its {_WITH_WINDOWS} layers that most of them have a sliding window, "
        "and a part of it has fewer")


def _llama4_refuses(model: ModelFile) -> str:
    return "" if model.arch_get(keys.WINDOW) != 0 else (
        "without chunked attention llama.cpp treats the last layer it has as another kind")


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


def _streams(get: Callable[[str], Any]) -> int:
    """Hyper-connections: a token has several rows between layers."""
    return int(get("hyper_connection.count") or 1)


#: the checks before loading do not cover their graphs
_stateful = functools.partial(Architecture, checked=False)
_BLOCK = "nemotron_h_block_out-%d"

_CSA = 4  #: tokens of a compressed cell in layers that choose among them
_BATCH = 256  #: rows of a decode at most, for which a cache with a window has cells


def _deepseek4_cells(model: Any, layer: int, n_cells: int, item_bytes: int) -> float:
    """The compressed cells, the window, and the rows of the block at hand."""
    ratio = int(values_of(model, keys.RATIOS)[layer])
    key, chooser = (int(model.arch_get(f"attention.{name}key_length") or 0)
                    for name in ("", "indexer."))
    if ratio != _CSA:
        chooser = 0
    compressed = n_cells / ratio * (key + chooser) if ratio else 0.0
    states = 16 * ratio * (2 * (key + chooser) if ratio == _CSA else key // 2)
    return item_bytes * (compressed + (number(model, keys.WINDOW) + _BATCH) * key) + states


ARCHITECTURES = (
    # --- plain transformers; Mistral and Mixtral are "llama"
    Architecture(("llama",), sliced=True, drawn="norm", layer_inputs=True, paired=True,
                 with_gaps="qwen2vl", torch=Torch(("llama", "mistral"), config=_llama_config)),
    Architecture(("qwen2",), sliced=True, slices_as="seed_oss",
                 renamed={"ffn_norm.weight": "post_attention_norm.weight"},
                 with_gaps="qwen2vl", torch=Torch(("qwen2",))),
    Architecture(("qwen3",), sliced=True, layer_inputs=True, with_gaps="qwen3vl",
                 torch=Torch(("qwen3",))),
    Architecture(("apertus", "stablelm"), Cut(head=True)),
    Architecture(("arcee", "ernie4_5", "hunyuan-dense", "k2-horizon", "nanbeige", "seed_oss")),
    Architecture(("command-r", "falcon", "starcoder2"), fills_width=True),
    Architecture(("internlm2", "nemotron"), Cut(head=True), fills_width=True),
    Architecture(("qwen2vl", "qwen3vl", "hunyuan_vl"), sections=True),
    Architecture(("glm4",), partly_rotated=True, sliced=True, two_in_one=True, entry="embd"),
    Architecture(("granite", "mistral3"), sliced=True),
    Architecture(("minicpm",), Cut(writes=_minicpm_scale), sliced=True, embedding_scale=12.0),
    # llama.cpp computes these without windows
    Architecture(("phi3",), Cut(no_windows=True), partly_rotated=True, fills_width=True,
                 torch=Torch(("phi3",))),
    Architecture(("phi2",), Cut(head=True), partly_rotated=True, fills_width=True),
    Architecture(("dflash",), splits=False, partly_rotated=True),
    # every fourth layer does not rotate
    Architecture(("smollm3",), Cut(step=4), sliced=True),
    # --- mixtures of experts whose layers have attention alike; Kimi K2 is "deepseek2"
    Architecture(("arctic",), fills_width=True),
    Architecture(("bailingmoe2",), Cut(head=True), partly_rotated=True),
    Architecture(
        ("deepseek2",), Cut(mistaken=_deepseek2_mistaken, writes=_deepseek2_writes),
        latent=True, sliced=True, shared_tied=True, final_rows=True, mtp=True),
    Architecture(("dots1", "grovemoe"), Cut(head=True)),
    Architecture(("glm4moe",), partly_rotated=True, sliced=True, shared_tied=True, final_rows=True,
                 entry="embd", mtp=True),
    Architecture(("granitemoe",), sliced=True, drawn="norm"),
    Architecture(("ernie4_5-moe", "hunyuan-moe", "hy_v3")),
    Architecture(("minimax-m2",), Cut(head=True), partly_rotated=True, unsliced=NORMS,
                 layer_inputs=True),
    Architecture(("olmoe", "qwen2moe"), Cut(head=True), fills_width=True),
    Architecture(("qwen3moe",), sliced=True, drawn="norm", layer_inputs=True),
    Architecture(("deepseek32", "mistral4"), latent=True),
    Architecture(("glm-dsa",), Cut(begins=keys.INDEXERS), latent=True),
    # as soon as a context has several sequences, its layers read all positions
    Architecture(("minimax-m3",), Cut(head=True), checked=False, copied_whole=True,
                 one_sequence=True),
    Architecture(("qwen3vlmoe",), sections=True),
    # computed without windows, as phi3
    Architecture(("phimoe",), Cut(no_windows=True, head=True), partly_rotated=True,
                 fills_width=True),
    # --- some layers have a sliding window or attention in chunks
    # every fourth layer does not rotate
    Architecture(("afmoe",), Cut(period=4, step=4), scaled=True, entry="inp_embd_scaled"),
    # with as many layers as that llama.cpp rotates all: no stage, nor what one gets from a lost one
    Architecture(("smallthinker",), Cut(period=-4, step=8, both_kinds=True,
                                        mistaken=lambda _, count: count == 4)),
    Architecture(("laguna",), Cut(period=-4), partly_rotated=True),
    Architecture(("mellum",), Cut(period=4, plain=True, head=True)),
    Architecture(("mimo2",), Cut(period=4, head=True), partly_rotated=True, unequal_heads=True,
                 output="h_nextn", older_output="l_out-%d"),
    Architecture(("step35",), Cut(period=4, head=True), partly_rotated=True, output="h_nextn"),
    Architecture(("cohere2",), Cut(period=4, window_first=True), partly_rotated=True,
                 fills_width=True),
    Architecture(("cohere2moe",), Cut(period=4, window_first=True, both_kinds=True)),
    Architecture(("exaone-moe",), Cut(period=4, head=True, window_first=True, both_kinds=True)),
    Architecture(("exaone4",), Cut(no_windows=True, always="attn_output",
                                   refuses=_exaone4_refuses), fills_width=True),
    Architecture(("granite_swa", "spark2_5"), Cut(period=4)),
    Architecture(("muse-glimmer",), Cut(period=4, head=True, window_first=True, both_kinds=True),
                 entry="embd_norm"),
    Architecture(("gpt-oss",), Cut(period=2, head=True), sliced=True, drawn="softmax",
                 layer_inputs=True, final_rows=True),
    Architecture(("llama4",), Cut(period=4, step=4, window_first=True, both_kinds=True,
                                  refuses=_llama4_refuses), sliced=True, shared_tied=True,
                 chunked=True),
    Architecture(("olmo2",), Cut(period=4, plain=True, head=True, always="attn_output"),
                 fills_width=True, unsliced=NORMS),
    # --- rows of tokens are multiplied by the root of their size, and layers have windows
    Architecture(("gemma",), scaled=True, entry="inp_scaled",
                 torch=Torch(("gemma",), norm_offset=1.0)),
    Architecture(
        ("gemma2",), Cut(period=2, refuses=_refuses(_SCALED_OTHERWISE_2)), scaled=True,
        partly_rotated=True, sliced=True, entry="inp_scaled",
        torch=Torch(("gemma2",), norm_offset=1.0, names=_GEMMA2_NAMES, config=_gemma2_config)),
    Architecture(("gemma3",), Cut(period=6, plain=True, refuses=_refuses(_SCALED_OTHERWISE_3)),
                 scaled=True, partly_rotated=True, sliced=True,
                 torch=Torch(("gemma3_text",), gguf=False)),
    Architecture(("gemma4",),
                 Cut(period=1, least=2, far_only=("rope_freqs.weight",), refuses=_gemma4_refuses),
                 varied_heads=True, scaled=True, partly_rotated=True, sliced=True,
                 entry="inp_scaled", reads_again="attn_out-0",
                 row_parts=lambda get: 1 + (int(get(keys.PER_LAYER) or 0) > 0)),
    Architecture(("gemma3n",), splits=False, checked=False, unsplit="its rows have four streams, "
                 "each layer reads the token itself, and the last ones read the cache of others"),
    Architecture(("gemma4-assistant",), splits=False, checked=False, assistant=True),
    # --- layers, or some of them, keep a state of the text so far
    _stateful(
        ("deepseek4",), Cut(no_windows=True, ends=(keys.RATIOS, _CSA), head=True),
        copied_whole=True, cell_bytes=_deepseek4_cells, entry="hc_init", output="h_nextn",
        older_output="l_last-%d", row_parts=_streams),
    _stateful(("mamba", "mamba2"), headless=True,
              unsliced="its layers keep a state, which is not cut"),
    _stateful(("rwkv6", "rwkv6qwen2", "rwkv7"), splits=False, headless=True),
    _stateful(("glm5-next",), Cut(begins=keys.INDEXERS, head=True), copied_whole=True,
              one_sequence=True, entry="hc_init", row_parts=_streams),
    _stateful(("qwen4exp",), splits=False, copied_whole=True, one_sequence=True, interval=4,
              unsplit="some of its layers read tokens, and llama.cpp cannot keep its cells in order"
              ),
    _stateful(("kimi-k3",), splits=False, unsplit="each layer mixes the inputs of earlier ones, "
              "of which llama.cpp takes none from another stage"),
    _stateful(("falcon-h1",), state_and_cache=True),
    _stateful(("granitehybrid",),
              unsliced="its norm of states goes over all heads, of which a slice has some"),
    _stateful(("kimi-linear",), Cut(head=True)),
    _stateful(("jamba",)),
    _stateful(
        ("lfm2",), Cut(norm="token_embd_norm"), layer_inputs=True,
        unsliced="llama.cpp wants its convolutions to be as wide as the model"),
    _stateful(("lfm2moe",), Cut(norm="token_embd_norm")),
    _stateful(("nemotron_h",), parted=True, sliced=True, state="scan", layer_inputs=True,
              final_rows=True, output=_BLOCK),
    _stateful(("nemotron_h_moe",), parted=True, final_rows=True, output=_BLOCK),
    _stateful(("qwen35",), interval=4, sliced=True, state="delta", layer_inputs=True,
              final_rows=True, sections=True, mtp=True),
    _stateful(("qwen35moe",), interval=4, sliced=True, state="delta", drawn="norm",
              layer_inputs=True, final_rows=True, sections=True, mtp=True),
    _stateful(("qwen3next",), interval=4, sliced=True, state="grouped", drawn="norm",
              layer_inputs=True, final_rows=True),
)
