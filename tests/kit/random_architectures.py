"""What random models of further architectures are made of: their metadata and tensors' shapes.

Each entry has the keys and tensors that llama.cpp's converter writes for that architecture, in
tiny: windows of few tokens, so that a short text goes beyond them, and every pattern by layer at
least once. `random_model` draws the weights and writes the file. Knows no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = "int | float | bool | str | list[int] | list[bool] | list[float]"
Shape: TypeAlias = tuple[int, ...]

EXPERTS, USED, EXPERT_FF = 4, 2, 64  #: of every mixture: experts, drawn per row, their columns
VOCABULARY = 320  #: tokens of tiny models
WINDOW = 8  #: positions that a layer with a sliding window sees
DENSE_FIRST = 2  #: leading layers of a mixture without experts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model: layers, width, query heads, KV heads, elements of a head, FFN columns; of its
    mixtures: experts, and columns of one; of its delta nets: elements of a head, heads of keys and
    of values; of latent attention: elements of its cache, of a head that are rotated, of a value,
    ranks of its queries, and heads that choose positions, which the first layers have, and one of
    so many behind them; of grouped outputs: groups and ranks; of experts by token: so many of each,
    and tokens."""

    n_layer: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    experts: int = EXPERTS
    expert_ff: int = EXPERT_FF
    dense_first: int = DENSE_FIRST
    delta: int = 64
    delta_keys: int = 2
    delta_values: int = 4
    latent: int = 64
    rotated: int = 64
    value: int = 0
    lora: int = 96
    choosers: int = 2
    choose_first: int = 2
    choose_every: int = 3
    groups: int = 2
    group_lora: int = 32
    used: int = USED
    vocab: int = VOCABULARY


@dataclass(frozen=True, slots=True)
class Recipe:
    """How models of one architecture look. keys: metadata without the architecture's name; layer:
    name -> shape (rows, columns) of one layer's tensors, without "blk.i."; common: likewise those
    outside layers, beside the usual ones. tied: the file has no output matrix. further: layers
    that the file has beyond those that compute. layers: as many as show every pattern. models:
    what people know, for the table in docs/models.md."""

    architecture: str
    keys: Callable[[Sizes], dict[str, Key]]
    layer: Callable[[Sizes, int], dict[str, Shape]]
    common: Callable[[Sizes], dict[str, Shape]] = lambda _: {}
    tied: bool = False
    further: int = 0
    layers: int = 4
    models: str = ""


# --- parts of layers --------------------------------------------------------------------------


def _attention(s: Sizes, *, bias: bool = False, head: int = 0, kv_heads: int = 0
               ) -> dict[str, Shape]:
    head, kv_heads = head or s.head, kv_heads or s.kv_heads
    rows = {"attn_q": s.heads * head, "attn_k": kv_heads * head, "attn_v": kv_heads * head}
    found: dict[str, Shape] = {f"{name}.weight": (n, s.width) for name, n in rows.items()}
    if bias:
        found |= {f"{name}.bias": (n,) for name, n in rows.items()}
    return found | {"attn_output.weight": (s.width, s.heads * head)}


def _norms(s: Sizes, *names: str) -> dict[str, Shape]:
    return {f"{name}.weight": (s.width,) for name in names}


def _head_norms(s: Sizes, head: int = 0) -> dict[str, Shape]:
    return {"attn_q_norm.weight": (head or s.head,), "attn_k_norm.weight": (head or s.head,)}


def _dense(s: Sizes, suffix: str = "", columns: int = 0) -> dict[str, Shape]:
    ff = columns or s.ff
    return {f"ffn_gate{suffix}.weight": (ff, s.width), f"ffn_up{suffix}.weight": (ff, s.width),
            f"ffn_down{suffix}.weight": (s.width, ff)}


def _experts(s: Sizes, columns: int = 0) -> dict[str, Shape]:
    columns = columns or s.expert_ff
    return {"ffn_gate_inp.weight": (s.experts, s.width),
            "ffn_gate_exps.weight": (s.experts, columns, s.width),
            "ffn_up_exps.weight": (s.experts, columns, s.width),
            "ffn_down_exps.weight": (s.experts, s.width, columns)}


def _fused(s: Sizes) -> dict[str, Shape]:
    """Queries, keys and values in one matrix."""
    return {"attn_qkv.weight": ((s.heads + 2 * s.kv_heads) * s.head, s.width),
            "attn_output.weight": (s.width, s.heads * s.head)}


# --- keys -------------------------------------------------------------------------------------

_RMS: dict[str, Key] = {"attention.layer_norm_rms_epsilon": 1e-5}
_LAYER_NORM: dict[str, Key] = {"attention.layer_norm_epsilon": 1e-5}
_MIXTURE: dict[str, Key] = {"expert_count": EXPERTS, "expert_used_count": USED}
_SPARSE: dict[str, Key] = _MIXTURE | {"expert_feed_forward_length": EXPERT_FF}


def _heads(s: Sizes) -> dict[str, Key]:
    return {"attention.key_length": s.head, "attention.value_length": s.head}


def _plain(*parts: dict[str, Key]) -> Callable[[Sizes], dict[str, Key]]:
    """Keys that do not depend on sizes, beside the sizes of heads."""

    def keys(s: Sizes) -> dict[str, Key]:
        found = _heads(s)
        for part in parts:
            found |= part
        return found

    return keys


def _llama_layer(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s) | _dense(s)


# --- architectures ----------------------------------------------------------------------------


def _qwen2moe(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _attention(s, bias=True) | _experts(s)
            | _dense(s, "_shexp", 96) | {"ffn_gate_inp_shexp.weight": (s.width,)})


def _qwen3moe(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s) | _head_norms(s) | _experts(s)


def _gpt_oss(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "post_attention_norm") | _attention(s, bias=True) | _experts(s)
            | {"attn_output.bias": (s.width,), "attn_sinks.weight": (s.heads,),
               "ffn_gate_inp.bias": (s.experts,), "ffn_gate_exps.bias": (s.experts, s.expert_ff),
               "ffn_up_exps.bias": (s.experts, s.expert_ff),
               "ffn_down_exps.bias": (s.experts, s.width)})


def _gemma2(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            | _attention(s) | _dense(s))


def _gemma3(s: Sizes, i: int) -> dict[str, Shape]:
    return _gemma2(s, i) | _head_norms(s)


def _gemma4_pattern(s: Sizes) -> list[bool]:
    return [i % 3 != 2 for i in range(s.n_layer)]


def _gemma4_keys(s: Sizes) -> dict[str, Key]:
    pattern = _gemma4_pattern(s)
    near, far = 2 * s.head, 4 * s.head
    return _RMS | _SPARSE | {
        "attention.head_count_kv": [s.kv_heads if one else 1 for one in pattern],
        "attention.key_length": far, "attention.value_length": far,
        "attention.key_length_swa": near, "attention.value_length_swa": near,
        "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": pattern,
        "attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0,
        "rope.dimension_count": far, "rope.dimension_count_swa": near,
        "rope.freq_base_swa": 1000.0, "final_logit_softcapping": 30.0}


def _gemma4(s: Sizes, i: int) -> dict[str, Shape]:
    near = _gemma4_pattern(s)[i]
    head, kv_heads = (2 * s.head, s.kv_heads) if near else (4 * s.head, 1)
    found = (_norms(s, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm",
                    "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
             | _attention(s, head=head, kv_heads=kv_heads) | _head_norms(s, head) | _dense(s)
             | {"layer_output_scale.weight": (1,), "ffn_gate_inp.weight": (EXPERTS, s.width),
                "ffn_gate_inp.scale": (s.width,), "ffn_down_exps.scale": (EXPERTS,),
                "ffn_gate_up_exps.weight": (EXPERTS, 2 * s.expert_ff, s.width),
                "ffn_down_exps.weight": (EXPERTS, s.width, s.expert_ff)})
    if not near:  # keys serve as values
        del found["attn_v.weight"]
    return found


def _gemma4_dense_keys(s: Sizes) -> dict[str, Key]:
    return {key: value for key, value in _gemma4_keys(s).items() if not key.startswith("expert")}


def _gemma4_dense(s: Sizes, i: int) -> dict[str, Shape]:
    further = ("exps", "gate_inp", "norm_1", "norm_2")
    return {name: shape for name, shape in _gemma4(s, i).items()
            if not any(part in name for part in further)}


_PER_LAYER = 64  #: columns that a layer has of a token's row


def _gemma4_small_keys(s: Sizes) -> dict[str, Key]:
    """The last third of the layers reads the caches of those before, and is wider."""
    own = 2 * s.n_layer // 3
    return _gemma4_dense_keys(s) | {
        "attention.shared_kv_layers": s.n_layer - own,
        "embedding_length_per_layer_input": _PER_LAYER,
        "feed_forward_length": [s.ff if i < own else 2 * s.ff for i in range(s.n_layer)]}


def _gemma4_small(s: Sizes, i: int) -> dict[str, Shape]:
    shared = i >= 2 * s.n_layer // 3
    found = _gemma4_dense(s, i) | _dense(s, columns=2 * s.ff if shared else s.ff)
    return {name: shape for name, shape in found.items()
            if not (shared and name.startswith(("attn_k", "attn_v")))} | {
        "inp_gate.weight": (_PER_LAYER, s.width), "proj.weight": (s.width, _PER_LAYER),
        "post_norm.weight": (s.width,)}


def _glm4_keys(s: Sizes) -> dict[str, Key]:
    return _RMS | _heads(s) | {"rope.dimension_count": s.head // 2}


def _glm4(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
            | _attention(s, bias=True)
            | {"ffn_up.weight": (2 * s.ff, s.width), "ffn_down.weight": (s.width, s.ff)})


def _glm4moe_keys(s: Sizes) -> dict[str, Key]:
    return _glm4_keys(s) | _SPARSE | {
        "expert_shared_count": 1, "leading_dense_block_count": DENSE_FIRST,
        "expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
        "nextn_predict_layers": 1}


def _glm4moe(s: Sizes, i: int) -> dict[str, Shape]:
    found = (_norms(s, "attn_norm", "post_attention_norm") | _attention(s, bias=True)
             | _head_norms(s))
    if i < s.dense_first:
        return found | _dense(s)
    found |= _experts(s) | _dense(s, "_shexp", s.expert_ff) | {"exp_probs_b.bias": (s.experts,)}
    return found | _nextn(s) if i == s.n_layer else found


def _nextn(s: Sizes) -> dict[str, Shape]:
    """What a head for further tokens has beside a layer."""
    return _norms(s, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm") | {
        "nextn.eh_proj.weight": (s.width, 2 * s.width)}


def _deepseek2_keys(s: Sizes) -> dict[str, Key]:
    return _deepseek2_lite_keys(s) | {"attention.q_lora_rank": s.lora, "expert_gating_func": 2}


def _deepseek2_lite_keys(s: Sizes) -> dict[str, Key]:
    return _RMS | _SPARSE | {
        "attention.head_count_kv": 1, "attention.kv_lora_rank": s.latent,
        "attention.key_length": s.latent + s.rotated, "attention.value_length": s.latent,
        "attention.key_length_mla": s.head + s.rotated,
        "attention.value_length_mla": s.value or s.head,
        "rope.dimension_count": s.rotated, "leading_dense_block_count": s.dense_first,
        "expert_shared_count": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64, "rope.scaling.yarn_log_multiplier": 0.07}


def _deepseek2_lite(s: Sizes, i: int) -> dict[str, Shape]:
    found: dict[str, Shape] = _norms(s, "attn_norm", "ffn_norm") | {
        "attn_q.weight": (s.heads * (s.head + s.rotated), s.width),
        "attn_kv_a_mqa.weight": (s.latent + s.rotated, s.width),
        "attn_kv_a_norm.weight": (s.latent,),
        "attn_k_b.weight": (s.heads, s.latent, s.head),
        "attn_v_b.weight": (s.heads, s.value or s.head, s.latent),
        "attn_output.weight": (s.width, s.heads * (s.value or s.head))}
    if i < s.dense_first:
        return found | _dense(s)
    return found | _experts(s) | _dense(s, "_shexp", 2 * s.expert_ff)


def _deepseek2(s: Sizes, i: int) -> dict[str, Shape]:
    found = _deepseek2_lite(s, i)
    del found["attn_q.weight"]
    return found | {
        "attn_q_a.weight": (s.lora, s.width), "attn_q_a_norm.weight": (s.lora,),
        "attn_q_b.weight": (s.heads * (s.head + s.rotated), s.lora)} | (
            {} if i < s.dense_first else {"exp_probs_b.bias": (s.experts,)})


def _phi3(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _fused(s) | {
        "ffn_up.weight": (2 * s.ff, s.width), "ffn_down.weight": (s.width, s.ff)}


def _falcon(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "attn_norm_2") | _fused(s) | {
        "attn_norm.bias": (s.width,), "attn_norm_2.bias": (s.width,),
        "ffn_up.weight": (s.ff, s.width), "ffn_down.weight": (s.width, s.ff)}


def _falcon7b(s: Sizes, i: int) -> dict[str, Shape]:
    return {name: shape for name, shape in _falcon(s, i).items() if "norm_2" not in name}


def _granitemoe(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _attention(s) | _experts(s, s.ff)
            | _dense(s, "_shexp", 96))


def _olmo2(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "post_attention_norm", "post_ffw_norm") | _attention(s) | _dense(s)
            | {"attn_q_norm.weight": (s.heads * s.head,),
               "attn_k_norm.weight": (s.kv_heads * s.head,)})


def _cohere2(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm") | _attention(s) | _dense(s)


def _llama4(s: Sizes, i: int) -> dict[str, Shape]:
    found = _norms(s, "attn_norm", "ffn_norm") | _attention(s)
    return found | (_experts(s) | _dense(s, "_shexp", s.expert_ff) if i % 2 else _dense(s))


def _exaone4(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "post_attention_norm", "post_ffw_norm") | _attention(s) | _head_norms(s)
            | _dense(s))


def _seed_oss(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "post_attention_norm") | _attention(s, bias=True) | _dense(s))


def _qwen2vl(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s, bias=True) | _dense(s)


def _hunyuan(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s) | _head_norms(s) | _dense(s)


def _hunyuan_moe(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _attention(s) | _head_norms(s)
            | _experts(s, s.ff) | _dense(s, "_shexp"))


def _later_experts(s: Sizes, i: int, kv_heads: int = 0) -> dict[str, Shape]:
    """Experts behind the first layers, one of them shared."""
    found = _norms(s, "attn_norm", "ffn_norm") | _attention(s, kv_heads=kv_heads)
    if i < s.dense_first:
        return found | _dense(s)
    return found | _experts(s) | _dense(s, "_shexp", s.expert_ff) | {
        "exp_probs_b.bias": (s.experts,)}


def _dots1(s: Sizes, i: int) -> dict[str, Shape]:
    return _later_experts(s, i, kv_heads=s.heads) | _head_norms(s)


def _bailingmoe2(s: Sizes, i: int) -> dict[str, Shape]:
    found = {name: shape for name, shape in _later_experts(s, i).items()
             if name not in ("attn_q.weight", "attn_k.weight", "attn_v.weight")}
    return found | _fused(s) | _head_norms(s)


_LATER: dict[str, Key] = _SPARSE | {
    "leading_dense_block_count": DENSE_FIRST, "expert_shared_count": 1, "expert_gating_func": 2,
    "expert_weights_scale": 1.5, "expert_weights_norm": True}


def _wide_norms(s: Sizes, kv_heads: int) -> dict[str, Shape]:
    """Norms of queries and keys over all heads."""
    return {"attn_q_norm.weight": (s.heads * s.head,), "attn_k_norm.weight": (kv_heads * s.head,)}


def _minimax_m2(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _attention(s) | _wide_norms(s, s.kv_heads)
            | _experts(s, s.ff) | {"exp_probs_b.bias": (s.experts,)})


def _olmoe(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _attention(s, kv_heads=s.heads)
            | _wide_norms(s, s.heads) | _experts(s, s.ff))


def _arctic(s: Sizes, _: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm", "ffn_norm_exps") | _attention(s)
            | _dense(s, columns=s.width) | _experts(s, s.ff))


def _normed_experts(s: Sizes, i: int) -> dict[str, Shape]:
    """As `_later_experts`, with norms of queries and keys."""
    return _later_experts(s, i) | _head_norms(s)


def _hy_v3(s: Sizes, i: int) -> dict[str, Shape]:
    """Its expert bias has another name than elsewhere."""
    return {name.replace("_b.bias", "_b"): shape for name, shape in _normed_experts(s, i).items()}


def _cohere2moe(s: Sizes, i: int) -> dict[str, Shape]:
    return {name: shape for name, shape in _later_experts(s, i).items()
            if name not in ("ffn_norm.weight", "exp_probs_b.bias")}


_INDEXER = 128  #: elements of a head that chooses which positions are read


def _indexed(s: Sizes) -> dict[str, Key]:
    return {"attention.indexer.head_count": s.choosers, "attention.indexer.key_length": _INDEXER,
            "attention.indexer.top_k": WINDOW}


def _mistral4_keys(s: Sizes) -> dict[str, Key]:
    return {key: value for key, value in _deepseek2_keys(s).items()
            if not key.startswith("rope.scaling")} | {"expert_shared_count": 1}


def _mistral4(s: Sizes, i: int) -> dict[str, Shape]:
    found = _deepseek2(s, i)
    return found if i < s.dense_first else found | _dense(s, "_shexp", s.expert_ff)


def _deepseek32(s: Sizes, i: int) -> dict[str, Shape]:
    return _mistral4(s, i) | {
        "indexer.k_norm.weight": (_INDEXER,), "indexer.k_norm.bias": (_INDEXER,),
        "indexer.proj.weight": (s.choosers, s.width), "indexer.attn_k.weight": (_INDEXER, s.width),
        "indexer.attn_q_b.weight": (s.choosers * _INDEXER, s.lora)}


def _glm_dsa_types(s: Sizes) -> list[int]:
    return [int(max(0, i + 1 - s.choose_first) % s.choose_every == 0) for i in range(s.n_layer)]


def _glm_dsa(s: Sizes, i: int) -> dict[str, Shape]:
    """Some layers read the positions that the last one with an indexer has chosen."""
    return _deepseek32(s, i) if _glm_dsa_types(s)[i] else _mistral4(s, i)


def _minimax_m3(s: Sizes, i: int) -> dict[str, Shape]:
    """Layers with experts choose blocks of cells."""
    chooses: dict[str, Shape] = {
        "indexer.k_norm.weight": (_INDEXER,), "indexer.k_proj.weight": (_INDEXER, s.width),
        "indexer.q_norm.weight": (_INDEXER,),
        "indexer.q_proj.weight": (s.choosers * _INDEXER, s.width)}
    return _normed_experts(s, i) | ({} if i < s.dense_first else chooses)


def _muse_glimmer(s: Sizes, i: int) -> dict[str, Shape]:
    return _gemma3(s, i) | {"attn_gate.weight": (s.heads * s.head, s.width)}


def _spark(s: Sizes, i: int) -> dict[str, Shape]:
    return _llama_layer(s, i) | {"attn_gate.weight": (s.heads, s.width)}


def _granite_swa(s: Sizes, i: int) -> dict[str, Shape]:
    return _llama_layer(s, i) | {"attn_sinks.weight": (s.heads,)}


def _grovemoe(s: Sizes, i: int) -> dict[str, Shape]:
    return _qwen3moe(s, i) | {
        f"ffn_{name}_chexps.weight": shape for name, shape in (
            ("gate", (s.experts // 2, 32, s.width)), ("up", (s.experts // 2, 32, s.width)),
            ("down", (s.experts // 2, s.width, 32)))}


def _headed(s: Sizes, heads: int) -> Sizes:
    """The sizes of a layer with another number of query heads."""
    return dataclasses.replace(s, heads=heads)


def _more_heads(s: Sizes, first: bool) -> list[int]:
    """Query heads of each layer: twice as many in every fourth, or in all others."""
    return [s.heads * (1 + ((i % 4 == 0) == first)) for i in range(s.n_layer)]


def _step35_keys(s: Sizes) -> dict[str, Key]:
    return _patterned(4)(s) | {
        "attention.head_count": _more_heads(s, True), "rope.freq_base_swa": 1000.0,
        "expert_shared_feed_forward_length": EXPERT_FF,
        "swiglu_clamp_exp": [6.0 + i / 4 for i in range(s.n_layer)],
        "swiglu_clamp_shexp": [0.5 + i / 4 for i in range(s.n_layer)]}


def _step35(s: Sizes, i: int) -> dict[str, Shape]:
    heads = _more_heads(s, True)[i]
    return _normed_experts(_headed(s, heads), i) | {"attn_gate.weight": (heads, s.width)}


def _laguna_keys(s: Sizes) -> dict[str, Key]:
    return _WINDOWED | {
        "attention.head_count": _more_heads(s, False), "rope.freq_base_swa": 1000.0,
        "rope.dimension_count_swa": s.head // 2, "expert_shared_feed_forward_length": EXPERT_FF}


def _laguna(s: Sizes, i: int) -> dict[str, Shape]:
    heads = _more_heads(s, False)[i]
    return _normed_experts(_headed(s, heads), i) | {"attn_gate.weight": (heads, s.width)}


def _mimo2_heads(s: Sizes) -> list[int]:
    return [s.heads if i % 3 == 1 else s.kv_heads for i in range(s.n_layer)]


def _mimo2_keys(s: Sizes) -> dict[str, Key]:
    return _patterned(3)(s) | {
        "attention.head_count_kv": _mimo2_heads(s), "attention.value_length": s.head // 2,
        "rope.dimension_count": s.head // 2, "rope.freq_base_swa": 1000.0}


def _mimo2(s: Sizes, i: int) -> dict[str, Shape]:
    """Heads of values are smaller than those of keys."""
    kv = _mimo2_heads(s)[i]
    return {name: shape for name, shape in _later_experts(s, i).items() if "shexp" not in name} | {
        "attn_k.weight": (kv * s.head, s.width), "attn_v.weight": (kv * s.head // 2, s.width),
        "attn_output.weight": (s.width, s.heads * s.head // 2), "attn_sinks.weight": (s.heads,)}


def _apertus_keys(s: Sizes) -> dict[str, Key]:
    """Values of the activation in each layer, without the architecture's name."""
    return {"/xielu.alpha_n": [0.7 + i / 8 for i in range(s.n_layer)],
            "/xielu.alpha_p": [0.9 - i / 8 for i in range(s.n_layer)],
            "/xielu.beta": [0.5] * s.n_layer, "/xielu.eps": [1e-6] * s.n_layer}


def _apertus(s: Sizes, i: int) -> dict[str, Shape]:
    return _arcee(s, i) | _head_norms(s)


def _afmoe(s: Sizes, i: int) -> dict[str, Shape]:
    return _normed_experts(s, i) | _norms(s, "post_attention_norm", "post_ffw_norm") | {
        "attn_gate.weight": (s.heads * s.head, s.width)}


def _smallthinker(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s) | _experts(s)


def _phi2(s: Sizes, _: int) -> dict[str, Shape]:
    return {name: shape for name, shape in _starcoder2(s, _).items() if "ffn_norm" not in name}


def _phimoe(s: Sizes, _: int) -> dict[str, Shape]:
    return _layer_norms(s, "attn_norm", "ffn_norm") | _attention(s) | _experts(s, s.ff) | {
        "attn_output.bias": (s.width,)}


def _with_biases(s: Sizes) -> dict[str, Shape]:
    return {"output_norm.bias": (s.width,), "output.bias": (VOCABULARY,)}


def _layer_norms(s: Sizes, *names: str) -> dict[str, Shape]:
    return _norms(s, *names) | {f"{name}.bias": (s.width,) for name in names}


def _starcoder2(s: Sizes, _: int) -> dict[str, Shape]:
    return _layer_norms(s, "attn_norm", "ffn_norm") | _attention(s, bias=True) | {
        "attn_output.bias": (s.width,), "ffn_up.weight": (s.ff, s.width), "ffn_up.bias": (s.ff,),
        "ffn_down.weight": (s.width, s.ff), "ffn_down.bias": (s.width,)}


def _nemotron(s: Sizes, _: int) -> dict[str, Shape]:
    return _layer_norms(s, "attn_norm", "ffn_norm") | _attention(s) | {
        "ffn_up.weight": (s.ff, s.width), "ffn_down.weight": (s.width, s.ff)}


def _stablelm(s: Sizes, _: int) -> dict[str, Shape]:
    return _layer_norms(s, "attn_norm", "ffn_norm") | _attention(s) | _dense(s)


def _arcee(s: Sizes, _: int) -> dict[str, Shape]:
    return _norms(s, "attn_norm", "ffn_norm") | _attention(s) | {
        "ffn_up.weight": (s.ff, s.width), "ffn_down.weight": (s.width, s.ff)}


def _patterned(period: int) -> Callable[[Sizes], dict[str, Key]]:
    """Windows in all but the last of every so many layers, as the file lists them."""
    return lambda s: _WINDOWED | {"attention.sliding_window_pattern": [
        i % period < period - 1 for i in range(s.n_layer)]}


def _with(first: Callable[[Sizes], dict[str, Key]], *others: Callable[[Sizes], dict[str, Key]]
          ) -> Callable[[Sizes], dict[str, Key]]:
    def keys(s: Sizes) -> dict[str, Key]:
        found = first(s)
        for other in others:
            found |= other(s)
        return found

    return keys


def _as_many_kv_heads(*parts: dict[str, Key]) -> Callable[[Sizes], dict[str, Key]]:
    return lambda s: _plain(*parts)(s) | {"attention.head_count_kv": s.heads}


_WINDOWED: dict[str, Key] = {"attention.sliding_window": WINDOW}
_SCALES: dict[str, Key] = {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 2.0,
                           "attention.scale": 0.1}
_YARN: dict[str, Key] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                         "rope.scaling.original_context_length": 16,
                         "rope.scaling.yarn_log_multiplier": 1.0}

_SECTIONS: dict[str, Key] = {"rope.dimension_sections": [8, 8, 8, 8]}

#: by architecture, or architecture and variant
RECIPES = {
    "qwen2moe": Recipe("qwen2moe", _plain(_RMS, _SPARSE, {
        "expert_shared_feed_forward_length": 96}), _qwen2moe, models="Qwen1.5-MoE, Qwen2-57B-A14B"),
    "qwen3moe": Recipe("qwen3moe", _plain(_RMS, _SPARSE), _qwen3moe,
                       models="Qwen3-30B-A3B, Qwen3-235B-A22B"),
    "gpt-oss": Recipe("gpt-oss", _plain(_RMS, _SPARSE, _WINDOWED, _YARN), _gpt_oss,
                      models="gpt-oss-20b, gpt-oss-120b"),
    "gemma2": Recipe("gemma2", _plain(_RMS, _WINDOWED, {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}), _gemma2, tied=True,
                     models="Gemma 2"),
    "gemma3": Recipe("gemma3", _plain(_RMS, _WINDOWED, {"rope.freq_base_swa": 1000.0}), _gemma3,
                     tied=True, layers=7, models="Gemma 3"),
    "gemma3-no-window": Recipe("gemma3", _plain(_RMS), _gemma3, tied=True),
    "gemma4": Recipe("gemma4", _gemma4_keys, _gemma4,
                     lambda s: {"rope_freqs.weight": (2 * s.head,)}, tied=True, layers=5,
                     models="Gemma 4; E2B, E4B without slices"),
    "gemma4-dense": Recipe("gemma4", _gemma4_dense_keys, _gemma4_dense,
                           lambda s: {"rope_freqs.weight": (2 * s.head,)}, tied=True, layers=5),
    "gemma4-small": Recipe("gemma4", _gemma4_small_keys, _gemma4_small, lambda s: {
        "rope_freqs.weight": (2 * s.head,), "per_layer_proj_norm.weight": (_PER_LAYER,),
        "per_layer_token_embd.weight": (VOCABULARY, _PER_LAYER * s.n_layer),
        "per_layer_model_proj.weight": (_PER_LAYER * s.n_layer, s.width)}, tied=True, layers=9),
    "glm4": Recipe("glm4", _glm4_keys, _glm4, models="GLM-4"),
    "glm4moe": Recipe("glm4moe", _glm4moe_keys, _glm4moe, further=1, models="GLM-4.5, 4.6, Air"),
    "deepseek2": Recipe("deepseek2", _deepseek2_keys, _deepseek2,
                        models="DeepSeek-V2, V3, R1, Kimi K2"),
    "deepseek2-lite": Recipe("deepseek2", _deepseek2_lite_keys, _deepseek2_lite,
                             layers=27),
    "phi3": Recipe("phi3", _plain(_RMS, {
        "attention.sliding_window": 16, "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.19}), _phi3,
        lambda s: {f"rope_factors_{kind}.weight": (s.head // 2,) for kind in ("long", "short")},
                   models="Phi-3, Phi-3.5-mini, Phi-4"),
    "falcon": Recipe("falcon", _plain(_LAYER_NORM), _falcon,
                     lambda s: {"output_norm.bias": (s.width,)}, models="Falcon"),
    "falcon-7b": Recipe("falcon", _plain(_LAYER_NORM), _falcon7b,
                        lambda s: {"output_norm.bias": (s.width,)}),
    "mistral3": Recipe("mistral3", _plain(_RMS, _YARN, {"attention.temperature_scale": 0.1}),
                       _llama_layer, models="Ministral 3"),
    "granite": Recipe("granite", _plain(_RMS, _SCALES), _llama_layer, models="Granite 3"),
    "granitemoe": Recipe("granitemoe", _plain(_RMS, _SCALES, _MIXTURE, {
        "expert_shared_feed_forward_length": 96}), _granitemoe, models="Granite 3: mixtures"),
    "smollm3": Recipe("smollm3", _plain(_RMS), _llama_layer, tied=True, layers=5, models="SmolLM3"),
    "olmo2": Recipe("olmo2", _plain(_RMS), _olmo2, models="OLMo 2, OLMo 3"),
    "olmo2-window": Recipe("olmo2", _plain(_RMS, _WINDOWED, _YARN), _olmo2, layers=5),
    "cohere2": Recipe("cohere2", _plain(_LAYER_NORM, _WINDOWED, {"logit_scale": 0.25}), _cohere2,
                      tied=True, layers=5, models="Command R7B, Command A"),
    "llama4": Recipe("llama4", _plain(_RMS, _SPARSE, {"interleave_moe_layer_step": 2}), _llama4,
                     layers=8, models="Llama 4 Scout, Maverick"),
    "minicpm": Recipe("minicpm", _plain(_RMS, {
        "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 2.0}), _llama_layer,
                      models="MiniCPM"),
    "minicpm-old": Recipe("minicpm", _plain(_RMS), _llama_layer),
    "exaone4": Recipe("exaone4", _plain(_RMS), _exaone4, tied=True, models="EXAONE 4.0 1.2B"),
    "seed_oss": Recipe("seed_oss", _plain(_RMS), _seed_oss, models="Seed-OSS-36B"),
    "hunyuan-dense": Recipe("hunyuan-dense", _plain(_RMS), _hunyuan, tied=True, models="Hunyuan"),
    "hunyuan-moe": Recipe("hunyuan-moe", _plain(_RMS, _SPARSE), _hunyuan_moe, tied=True,
                          models="Hunyuan-A13B"),
    "ernie4_5": Recipe("ernie4_5", _plain(_RMS), _llama_layer, tied=True, models="ERNIE 4.5 0.3B"),
    "ernie4_5-moe": Recipe("ernie4_5-moe", _plain(_RMS, _LATER, {
        "interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": EXPERT_FF}),
        _later_experts, tied=True, models="ERNIE 4.5 21B-A3B, 300B-A47B"),
    "dots1": Recipe("dots1", _as_many_kv_heads(_RMS, _LATER), _dots1, models="dots.llm1"),
    "bailingmoe2": Recipe("bailingmoe2", _plain(_RMS, _LATER), _bailingmoe2,
                          models="Ling 2.0, Ring 2.0"),
    "minimax-m2": Recipe("minimax-m2", _plain(_RMS, _SPARSE, {"expert_gating_func": 2}),
                         _minimax_m2, models="MiniMax-M2"),
    "olmoe": Recipe("olmoe", _as_many_kv_heads(_RMS, _MIXTURE), _olmoe, models="OLMoE"),
    "arctic": Recipe("arctic", _plain(_RMS, _MIXTURE), _arctic, models="Snowflake Arctic"),
    "internlm2": Recipe("internlm2", _plain(_RMS), _llama_layer, models="InternLM2, 2.5"),
    "nanbeige": Recipe("nanbeige", _plain(_RMS), _llama_layer, models="Nanbeige"),
    "k2-horizon": Recipe("k2-horizon", _plain(_RMS), _llama_layer, models="K2 Horizon"),
    "arcee": Recipe("arcee", _plain(_RMS), _arcee, models="Arcee AFM-4.5B"),
    "nemotron": Recipe("nemotron", _plain(_LAYER_NORM), _nemotron,
                       lambda s: {"output_norm.bias": (s.width,)}, models="Nemotron-4, Minitron"),
    "command-r": Recipe("command-r", _plain(_LAYER_NORM, {"logit_scale": 0.5}), _cohere2,
                        tied=True, models="Command R, R+"),
    "stablelm": Recipe("stablelm", _plain(_LAYER_NORM), _stablelm,
                       lambda s: {"output_norm.bias": (s.width,)}, models="StableLM"),
    "starcoder2": Recipe("starcoder2", _plain(_LAYER_NORM), _starcoder2,
                         lambda s: {"output_norm.bias": (s.width,)}, tied=True,
                         models="StarCoder2"),
    "gemma": Recipe("gemma", _plain(_RMS), _llama_layer, tied=True, models="Gemma 1"),
    "qwen2vl": Recipe("qwen2vl", _plain(_RMS, _SECTIONS), _qwen2vl,
                      models="Qwen2-VL, Qwen2.5-VL (text)"),
    "qwen3vl": Recipe("qwen3vl", _plain(_RMS, _SECTIONS, {"n_deepstack_layers": 2}), _hunyuan,
                      models="Qwen3-VL (text)"),
    "qwen3vlmoe": Recipe("qwen3vlmoe", _plain(_RMS, _SPARSE, _SECTIONS, {
        "n_deepstack_layers": 2}), _qwen3moe, models="Qwen3-VL mixtures (text)"),
    "hunyuan_vl": Recipe("hunyuan_vl", _plain(_RMS, _SECTIONS), _hunyuan, tied=True,
                         models="Hunyuan VL (text)"),
    "hy_v3": Recipe("hy_v3", _plain(_RMS, _LATER), _hy_v3, tied=True, models="Hunyuan 3"),
    "mistral4": Recipe("mistral4", _mistral4_keys, _mistral4, models="Mistral Small 4"),
    "deepseek32": Recipe("deepseek32", _with(_mistral4_keys, _indexed), _deepseek32,
                         models="DeepSeek-V3.2"),
    "exaone-moe": Recipe("exaone-moe", _with(_plain(_RMS, _LATER), _patterned(4)), _normed_experts,
                         layers=8, models="K-EXAONE"),
    "cohere2moe": Recipe("cohere2moe", _with(_plain(_LAYER_NORM, _LATER, {"logit_scale": 0.25}),
                                             _patterned(4)), _cohere2moe, tied=True, layers=8,
                         models="Command mixtures"),
    "glm-dsa": Recipe("glm-dsa", _with(_mistral4_keys, _indexed, lambda s: {
        "attention.indexer.types": _glm_dsa_types(s)}), _glm_dsa, layers=6,
                      models="GLM-5, 5.1, 5.2"),
    "muse-glimmer": Recipe("muse-glimmer", _with(_plain(_RMS, {
        "logit_scale": 1.0, "final_logit_softcapping": 30.0, "rope.freq_base_swa": 1000.0}),
        _patterned(4)), _muse_glimmer, layers=8, models="Muse Glimmer 30B"),
    "spark2_5": Recipe("spark2_5", _with(_plain(_RMS, _LATER), _patterned(2)), _spark, tied=True,
                       models="Spark 2.5"),
    "granite_swa": Recipe("granite_swa", _with(_plain(_RMS, _SCALES), _patterned(2)), _granite_swa,
                          models="Granite with windows"),
    "step35": Recipe("step35", _with(_plain(_RMS, _LATER), _step35_keys), _step35, layers=5,
                     models="Step 3.5"),
    "laguna": Recipe("laguna", _with(_plain(_RMS, _LATER, _YARN), _laguna_keys), _laguna,
                     tied=True, layers=9, models="Laguna"),
    "mimo2": Recipe("mimo2", _with(_plain(_RMS, _LATER), _mimo2_keys), _mimo2, layers=5,
                    models="MiMo-V2"),
    "apertus": Recipe("apertus", _with(_plain(_RMS), _apertus_keys), _apertus, models="Apertus"),
    "afmoe": Recipe("afmoe", _with(_plain(_RMS, _LATER), _patterned(4)), _afmoe, tied=True,
                    layers=8, models="Arcee Trinity"),
    "smallthinker": Recipe("smallthinker", _plain(_RMS, _SPARSE, _WINDOWED, {
        "expert_gating_func": 2}), _smallthinker, tied=True, layers=10, models="SmallThinker"),
    "mellum": Recipe("mellum", _with(_plain(_RMS, _SPARSE), _patterned(4)), _qwen3moe, layers=5,
                     models="Mellum 2"),
    "phi2": Recipe("phi2", lambda s: _plain(_LAYER_NORM)(s) | {
        "rope.dimension_count": s.head // 2}, _phi2, _with_biases, models="Phi-1, 1.5, 2"),
    "phimoe": Recipe("phimoe", _plain(_RMS, _MIXTURE, {
        "attention.sliding_window": 16, "rope.scaling.original_context_length": 256}), _phimoe,
        lambda s: _with_biases(s) | {
            f"rope_factors_{kind}.weight": (s.head // 2,) for kind in ("long", "short")},
                     models="Phi-3.5-MoE"),
    "grovemoe": Recipe("grovemoe", _plain(_RMS, _SPARSE, {
        "expert_group_scale": 0.05, "experts_per_group": 2,
        "expert_chunk_feed_forward_length": 32}), _grovemoe, models="GroveMoE"),
}


# --- models with a state ----------------------------------------------------------------------

_STATE, _CONV, _TIME = 16, 4, 8  #: of a state; of its convolution; of its steps, or its heads


def _mamba(s: Sizes, _: int) -> dict[str, Shape]:
    inner = 2 * s.width
    return _norms(s, "attn_norm") | {
        "ssm_in.weight": (2 * inner, s.width), "ssm_conv1d.weight": (inner, _CONV),
        "ssm_conv1d.bias": (inner,), "ssm_x.weight": (_TIME + 2 * _STATE, inner),
        "ssm_dt.weight": (inner, _TIME), "ssm_dt.bias": (inner,), "ssm_a": (inner, _STATE),
        "ssm_d": (inner,), "ssm_out.weight": (s.width, inner)}


def _state_keys(s: Sizes) -> dict[str, Key]:
    return _RMS | {"ssm.conv_kernel": _CONV, "ssm.inner_size": 2 * s.width,
                   "ssm.state_size": _STATE, "ssm.time_step_rank": _TIME}


def _mamba2(s: Sizes, _: int, groups: int = 1) -> dict[str, Shape]:
    inner, channels = 2 * s.width, 2 * s.width + 2 * groups * _STATE
    return _norms(s, "attn_norm") | {
        "ssm_in.weight": (inner + channels + _TIME, s.width), "ssm_dt.bias": (_TIME,),
        "ssm_conv1d.weight": (channels, _CONV), "ssm_conv1d.bias": (channels,),
        "ssm_a": (_TIME, 1), "ssm_d": (_TIME, 1), "ssm_norm.weight": (groups, inner // groups),
        "ssm_out.weight": (s.width, inner)}


def _mamba2_keys(s: Sizes) -> dict[str, Key]:
    return _state_keys(s) | {"ssm.group_count": 1}


def _hybrid_keys(s: Sizes) -> dict[str, Key]:
    """Every other layer has attention."""
    return _mamba2_keys(s) | {"attention.head_count_kv": [
        s.kv_heads if i % 2 else 0 for i in range(s.n_layer)]}


def _hybrid(s: Sizes, i: int) -> dict[str, Shape]:
    return (_norms(s, "attn_norm", "ffn_norm") | _dense(s)
            | (_attention(s) if i % 2 else _mamba2(s, i)))


def _parted_keys(s: Sizes) -> dict[str, Key]:
    """State, feed forward, attention, and so on."""
    return _mamba2_keys(s) | _LAYER_NORM | _heads(s) | {
        "attention.head_count_kv": [s.kv_heads if i % 3 == 2 else 0 for i in range(s.n_layer)],
        "feed_forward_length": [s.ff if i % 3 == 1 else 0 for i in range(s.n_layer)]}


def _parted(s: Sizes, i: int, groups: int = 1) -> dict[str, Shape]:
    if i % 3 == 0:
        return _mamba2(s, i, groups)
    return _norms(s, "attn_norm") | (_attention(s) if i % 3 == 2 else {
        "ffn_up.weight": (s.ff, s.width), "ffn_down.weight": (s.width, s.ff)})


def _parted_moe(s: Sizes, i: int) -> dict[str, Shape]:
    if i % 3 != 1:
        return _parted(s, i)
    found = _norms(s, "attn_norm") | _experts(s) | _dense(s, "_shexp", s.expert_ff) | {
        "exp_probs_b.bias": (s.experts,)}
    return {name: shape for name, shape in found.items() if "gate_exps" not in name
            and "gate_shexp" not in name}


_INTERVAL = 4  #: one of so many layers has attention


def _delta_keys(s: Sizes) -> dict[str, Key]:
    return _RMS | _heads(s) | {
        "rope.dimension_count": s.head // 2, "ssm.conv_kernel": _CONV,
        "ssm.inner_size": s.delta_values * s.delta, "ssm.state_size": s.delta,
        "ssm.time_step_rank": s.delta_values, "ssm.group_count": s.delta_keys,
        "full_attention_interval": _INTERVAL}


def _sections(s: Sizes) -> dict[str, Key]:
    return {"rope.dimension_sections": [s.head // 8, s.head // 8, 0, 0]}


def _delta(s: Sizes, i: int) -> dict[str, Shape]:
    """Attention with a gate among its queries, or a delta net, without its rates."""
    found = _norms(s, "attn_norm", "post_attention_norm")
    if (i + 1) % _INTERVAL == 0:
        return found | _attention(s) | _head_norms(s) | {
            "attn_q.weight": (2 * s.heads * s.head, s.width)}
    values = s.delta_values * s.delta
    channels = 2 * s.delta_keys * s.delta + values
    return found | {
        "attn_qkv.weight": (channels, s.width), "attn_gate.weight": (values, s.width),
        "ssm_conv1d.weight": (channels, _CONV), "ssm_dt.bias": (s.delta_values,),
        "ssm_a": (s.delta_values,), "ssm_norm.weight": (s.delta,),
        "ssm_out.weight": (s.width, values)}


def _with_rates(s: Sizes, i: int) -> dict[str, Shape]:
    found = _delta(s, i)
    if "ssm_a" in found:
        found |= {f"ssm_{name}.weight": (s.delta_values, s.width) for name in ("alpha", "beta")}
    return found


def _qwen35(s: Sizes, i: int) -> dict[str, Shape]:
    return _with_rates(s, i) | _dense(s)


def _shared_experts(s: Sizes) -> dict[str, Shape]:
    return _experts(s) | _dense(s, "_shexp", s.expert_ff) | {
        "ffn_gate_inp_shexp.weight": (s.width,)}


_SHARED: dict[str, Key] = _SPARSE | {"expert_shared_feed_forward_length": EXPERT_FF}


def _qwen35moe(s: Sizes, i: int) -> dict[str, Shape]:
    return _with_rates(s, i) | _shared_experts(s)


def _qwen3next(s: Sizes, i: int) -> dict[str, Shape]:
    found = _delta(s, i)
    if "ssm_a" in found:
        found["ssm_ba.weight"] = (2 * s.delta_values, s.width)
    return found | _shared_experts(s)


def _lfm2_keys(s: Sizes) -> dict[str, Key]:
    return _RMS | {"attention.head_count_kv": [s.kv_heads if i % 3 == 2 else 0
                                               for i in range(s.n_layer)], "shortconv.l_cache": 3}


def _lfm2(s: Sizes, i: int) -> dict[str, Shape]:
    found = _norms(s, "attn_norm", "ffn_norm") | _dense(s)
    if i % 3 == 2:
        return found | _attention(s) | _head_norms(s)
    return found | {
        "shortconv.conv.weight": (s.width, 3), "shortconv.in_proj.weight": (3 * s.width, s.width),
        "shortconv.out_proj.weight": (s.width, s.width)}


def _lfm2moe_keys(s: Sizes) -> dict[str, Key]:
    return _lfm2_keys(s) | _SPARSE | {"leading_dense_block_count": DENSE_FIRST,
                                      "expert_gating_func": 2}


def _lfm2moe(s: Sizes, i: int) -> dict[str, Shape]:
    found = _lfm2(s, i)
    if i < s.dense_first:
        return found
    return {name: shape for name, shape in found.items() if name not in _dense(s)} | _experts(s) \
        | {"exp_probs_b.bias": (s.experts,)}


def _jamba_keys(s: Sizes) -> dict[str, Key]:
    return _state_keys(s) | _MIXTURE | {"attention.head_count_kv": [
        s.kv_heads if i % 2 else 0 for i in range(s.n_layer)]}


def _jamba(s: Sizes, i: int) -> dict[str, Shape]:
    """Every other layer has attention, and every third experts."""
    found = _mamba(s, i) | {"ssm_dt_norm.weight": (_TIME,), "ssm_b_norm.weight": (_STATE,),
                            "ssm_c_norm.weight": (_STATE,)}
    if i % 2:
        found = _norms(s, "attn_norm") | _attention(s)
    return found | _norms(s, "ffn_norm") | (_experts(s, s.ff) if i % 3 == 1 else _dense(s))


def _kimi_keys(s: Sizes) -> dict[str, Key]:
    """Every third layer has attention over a compressed cache."""
    return _deepseek2_lite_keys(s) | {
        "attention.head_count_kv": [int(i % 3 == 2) for i in range(s.n_layer)],
        "kda.head_dim": s.delta, "ssm.conv_kernel": _CONV, "expert_shared_count": 1,
        "expert_gating_func": 2, "leading_dense_block_count": 1}


def _kimi(s: Sizes, i: int) -> dict[str, Shape]:
    found = _norms(s, "attn_norm", "ffn_norm")
    if i % 3 == 2:
        found |= {name: shape for name, shape in _deepseek2_lite(s, 0).items() if "attn" in name}
    else:
        inner = s.heads * s.delta
        found |= _attention(dataclasses.replace(s, head=s.delta), kv_heads=s.heads) | {
            "ssm_a": (s.heads, 1), "ssm_beta.weight": (s.heads, s.width), "ssm_dt.bias": (inner,),
            "ssm_norm.weight": (s.delta,),
            **{f"ssm_{name}_a.weight": (s.delta, s.width) for name in "fg"},
            **{f"ssm_{name}_b.weight": (inner, s.delta) for name in "fg"},
            **{f"ssm_conv1d_{name}.weight": (inner, 1, _CONV) for name in "qkv"}}
    return found | (_dense(s) if i < 1 else _experts(s) | _dense(s, "_shexp", s.expert_ff) | {
        "exp_probs_b.bias": (s.experts,)})


_STREAMS, _HASHED = 4, 3  #: rows of a token; layers whose experts follow from the token


def _deepseek4_ratios(s: Sizes) -> list[int]:
    return [(4, 128)[i % 2] if i > 1 else 0 for i in range(s.n_layer)]


_MIXED: dict[str, Key] = {
    "hyper_connection.count": _STREAMS, "hyper_connection.sinkhorn_iterations": 3,
    "hyper_connection.epsilon": 1e-6}


def _mixes(s: Sizes) -> dict[str, Shape]:
    """How a layer mixes the rows of a token."""
    mixes = (2 + _STREAMS) * _STREAMS
    found: dict[str, Shape] = {}
    for part in ("attn", "ffn"):
        found |= {f"hc_{part}_fn.weight": (mixes, _STREAMS * s.width),
                  f"hc_{part}_base.weight": (mixes,), f"hc_{part}_scale.weight": (3,)}
    return found


def _glm5_next_keys(s: Sizes) -> dict[str, Key]:
    """As Kimi Linear, without rotation, and with indexers that see blocks of cells."""
    unrotated = dataclasses.replace(s, rotated=0)
    found = _deepseek2_keys(unrotated) | _kimi_keys(unrotated) | _indexed(s) | _MIXED | {
        "attention.indexer.types": [int(i != 5) for i in range(s.n_layer)],
        "attention.indexer.kpool": 4, "attention.indexer.kpool_select_tail": True,
        "kda.gate_lower_bound": -5.0}
    return {key: value for key, value in found.items() if not key.startswith("rope.scaling")}


def _glm5_next(s: Sizes, i: int) -> dict[str, Shape]:
    found = _kimi(s, i) | _mixes(s)
    if i % 3 != 2:
        return found | {"ssm_a": (s.heads,)}
    unrotated = dataclasses.replace(s, rotated=0)
    found = {name: shape for name, shape in found.items() if "attn" not in name or "hc" in name} | {
        name: shape for name, shape in _deepseek2(unrotated, 0).items() if "attn" in name}
    return found if i == 5 else found | {
        name: shape for name, shape in _deepseek32(s, 0).items() if "indexer" in name} | {
        "indexer_compressor_ape.weight": (4, _INDEXER),
        "indexer_compressor_gate.weight": (_INDEXER, s.width)}


def _deepseek4_keys(s: Sizes) -> dict[str, Key]:
    """Cells of 4 or 128 tokens, beside a window."""
    return _RMS | _SPARSE | _indexed(s) | _WINDOWED | _MIXED | {
        "attention.head_count_kv": 1, "attention.key_length": 4 * s.head,
        "attention.value_length": 4 * s.head, "attention.q_lora_rank": s.lora,
        "attention.output_group_count": s.groups, "attention.output_lora_rank": s.group_lora,
        "attention.compress_rope_freq_base": 40000.0, "rope.dimension_count": s.rotated,
        "attention.compress_ratios": _deepseek4_ratios(s), "hash_layer_count": _HASHED,
        "swiglu_clamp_exp": [5.0 + i / 4 for i in range(s.n_layer)],
        "expert_shared_count": 1, "expert_gating_func": 4,
        "expert_weights_scale": 1.5, "expert_weights_norm": True}


def _deepseek4(s: Sizes, i: int) -> dict[str, Shape]:
    head, ratio = 4 * s.head, _deepseek4_ratios(s)[i]
    found = _norms(s, "attn_norm", "ffn_norm") | _mixes(s) | _experts(s)
    found |= _dense(s, "_shexp", s.expert_ff) | {
        "attn_q_a.weight": (s.lora, s.width), "attn_q_a_norm.weight": (s.lora,),
        "attn_q_b.weight": (s.heads * head, s.lora), "attn_kv.weight": (head, s.width),
        "attn_kv_a_norm.weight": (head,), "attn_sinks.weight": (s.heads,),
        "attn_output_a.weight": (s.groups, s.group_lora, s.heads * head // s.groups),
        "attn_output_b.weight": (s.width, s.group_lora * s.groups)}
    for part, size in (("attn", head), ("indexer", _INDEXER)):
        if ratio and (part == "attn" or ratio == 4):
            columns = size * (1 + (ratio == 4))
            found |= {f"{part}_compressor_{name}.weight": (columns, s.width)
                      for name in ("kv", "gate")}
            found |= {f"{part}_compressor_ape.weight": (ratio, columns),
                      f"{part}_compressor_norm.weight": (size,)}
    if ratio == 4:
        found |= {"indexer.attn_q_b.weight": (s.choosers * _INDEXER, s.lora),
                  "indexer.proj.weight": (s.choosers, s.width)}
    return found | ({"ffn_gate_tid2eid.weight": (s.vocab, s.used)} if i < _HASHED
                    else {"exp_probs_b.bias": (s.experts,)})


def _falcon_h1(s: Sizes, i: int) -> dict[str, Shape]:
    """A state and attention in every layer."""
    return _mamba2(s, i) | {"ffn_norm": (s.width,)} | _attention(s) | _dense(s)


#: models whose layers keep a state; see `RECIPES`
STATEFUL = {
    "mamba": Recipe("mamba", _state_keys, _mamba, models="Mamba"),
    "mamba2": Recipe("mamba2", _mamba2_keys, _mamba2, models="Mamba 2, Codestral Mamba"),
    "granitehybrid": Recipe("granitehybrid", _hybrid_keys, _hybrid, layers=6,
                            models="Granite 4 H: dense"),
    "nemotron_h": Recipe("nemotron_h", _parted_keys, _parted, layers=7,
                         models="Nemotron-H, Nemotron Nano 2"),
    "nemotron_h_moe": Recipe("nemotron_h_moe", lambda s: _parted_keys(s) | _SPARSE | {
        "expert_shared_feed_forward_length": EXPERT_FF, "expert_weights_scale": 2.5,
        "expert_weights_norm": True}, _parted_moe, layers=7, models="Nemotron 3 Nano"),
    "nemotron_h-groups": Recipe(
        "nemotron_h", lambda s: _parted_keys(s) | {"ssm.group_count": 4},
        lambda s, i: _parted(s, i, 4), layers=7),
    "lfm2": Recipe("lfm2", _lfm2_keys, _lfm2, tied=True, layers=7, models="LFM2: dense"),
    "lfm2moe": Recipe("lfm2moe", _lfm2moe_keys, _lfm2moe, tied=True, layers=7,
                      models="LFM2: mixtures"),
    "kimi-linear": Recipe("kimi-linear", _kimi_keys, _kimi, layers=9, models="Kimi Linear"),
    "jamba": Recipe("jamba", _jamba_keys, _jamba, layers=6, models="Jamba"),
    "deepseek4": Recipe("deepseek4", _deepseek4_keys, _deepseek4, lambda s: {
        "output_hc_fn.weight": (_STREAMS, _STREAMS * s.width), "output_hc_base.weight": (_STREAMS,),
        "output_hc_scale.weight": (1,)}, layers=11, models="DeepSeek-V4 Flash"),
    "falcon-h1": Recipe("falcon-h1", lambda s: _mamba2_keys(s) | _heads(s), _falcon_h1,
                        models="Falcon-H1"),
    "qwen35": Recipe("qwen35", lambda s: _delta_keys(s) | _sections(s), _qwen35, layers=12,
                     models="Qwen3.5 to 3.8: dense"),
    "qwen35-tied": Recipe("qwen35", lambda s: _delta_keys(s) | _sections(s), _qwen35, tied=True,
                          layers=8),
    "qwen35moe": Recipe("qwen35moe", lambda s: _delta_keys(s) | _sections(s) | _SHARED, _qwen35moe,
                        layers=8, models="Qwen3.5 to 3.8: mixtures"),
    "qwen3next": Recipe("qwen3next", lambda s: _delta_keys(s) | _SHARED, _qwen3next, layers=8,
                        models="Qwen3-Next-80B-A3B"),
}


#: of which llama.cpp computes one sequence at a time; see `RECIPES`
ALONE = {
    "glm5-next": Recipe("glm5-next", _glm5_next_keys, _glm5_next, layers=12,
                        models="GLM-5.3-Flash, one request at a time"),
    "minimax-m3": Recipe("minimax-m3", _with(_plain(_RMS, _LATER), _indexed, lambda s: {
        "rope.dimension_count": s.head // 2, "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1, "attention.indexer.top_k": 2}), _minimax_m3, layers=5,
                         models="MiniMax-M3, one request at a time"),
}


def _with_head(recipe: Recipe) -> Recipe:
    """The same with a head for further tokens, of the kind of layer 3."""
    return dataclasses.replace(
        recipe, further=1, layers=12 if recipe.layers > 4 else recipe.layers,
        keys=lambda s: recipe.keys(s) | {"nextn_predict_layers": 1},
        layer=lambda s, i: recipe.layer(s, 3) | _nextn(s) if i == s.n_layer else recipe.layer(s, i))


#: models with a head for further tokens, as "glm4moe" is; see `RECIPES`
HEADED = {f"{name}-mtp": _with_head((RECIPES | STATEFUL)[name])
          for name in ("deepseek2", "qwen35", "qwen35moe")}


def tensors_of(recipe: Recipe, sizes: Sizes) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor but embedding, output matrix and last norm."""
    yield from recipe.common(sizes).items()
    for i in range(sizes.n_layer + recipe.further):
        for name, shape in recipe.layer(sizes, i).items():
            yield f"blk.{i}.{name}", shape


def stages_of(name: str) -> int:
    """Into how many stages tests cut a tiny model of that name: three, where it can be."""
    return 2 if name in ("afmoe", "llama4", "smallthinker", "smollm3") else 3
