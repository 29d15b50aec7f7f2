"""Bytes of a quantised model, from its shapes: what a file has before anyone downloads it.

    bytes of a matrix = rows * columns * bits / 8, in the type that llama.cpp's mix gives it

A mix such as Q3_K_M stores most matrices in its base type and some in a wider one, by the
tensor's name and its layer (`llama_tensor_get_type` in llama.cpp's quantisation). A row length
that is no multiple of 256 takes the fallback type. Q2_K_2023 is what files made before January
2024 have under the name Q2_K: mostly Q3_K. Norms and routers stay float32. Checked against
published file sizes in tests/emulation/test_profiles.py. This module knows no machine.
"""

from __future__ import annotations

from dataclasses import dataclass

#: bits per weight, scales included: bytes of a block of 256 * 8 / 256
BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5, "Q3_K": 3.4375,
        "Q2_K": 2.625, "Q5_0": 5.5, "Q5_1": 6.0, "IQ4_NL": 4.5}
_FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BLOCK = 256
#: mix -> the type of everything without a rule of its own
BASE = {"F16": "F16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K",
        "Q3_K_M": "Q3_K", "Q3_K_S": "Q3_K", "Q2_K": "Q2_K", "Q2_K_2023": "Q2_K"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's shapes. architecture: llama, falcon (one qkv matrix, no gate) or qwen2.

    head_size 0: n_embd / n_head. n_expert 0: dense; else n_expert_used of them see a row.
    """

    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    head_size: int = 0
    n_expert: int = 0
    n_expert_used: int = 0

    @property
    def head(self) -> int:
        """Size of one attention head, in elements."""
        return self.head_size or self.n_embd // self.n_head

    @property
    def kv_width(self) -> int:
        """Elements of a layer's keys (or values) of one token."""
        return self.n_head_kv * self.head


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes: layers on average, of which `expert_bytes` belong to all experts together,
    `attention_bytes` to the attention, and `keys_bytes` of those to keys and values."""

    layer_bytes: int
    expert_bytes: int
    embedding_bytes: int
    output_bytes: int
    kv_bytes_per_token: int
    attention_bytes: int
    keys_bytes: int


def quantised(shape: Shape, mix: str) -> Sizes:
    """Sizes of `shape` under `mix` (a key of BASE); cache in f16."""
    total = experts = attention = keys = 0.0
    for layer in range(shape.n_layers):
        for name, rows, columns in _matrices(shape):
            size = _bytes(_type(shape, mix, name, layer), rows, columns)
            if shape.n_expert and name.startswith("ffn"):
                size *= shape.n_expert
                experts += size
            if name.startswith("attn"):
                attention += size
                keys += size * _keys(shape, name)
            total += size
        total += 2 * 4 * shape.n_embd + 4 * shape.n_embd * shape.n_expert
    output = BASE[mix] if mix in ("F16", "Q8_0") else (
        "Q8_0" if shape.architecture == "falcon" else "Q6_K")
    return Sizes(
        round(total / shape.n_layers), round(experts / shape.n_layers),
        round(_bytes(BASE[mix], shape.n_vocab, shape.n_embd)),
        round(_bytes(output, shape.n_vocab, shape.n_embd)),
        shape.n_layers * 2 * shape.kv_width * 2,
        round(attention / shape.n_layers), round(keys / shape.n_layers),
    )


def _keys(shape: Shape, name: str) -> float:
    """The part of a matrix's rows that makes keys and values."""
    if name == "attn_qkv":
        return 2 * shape.kv_width / (shape.n_head * shape.head + 2 * shape.kv_width)
    return float(name in ("attn_k", "attn_v"))


def pieces(shape: Shape, mix: str) -> tuple[int, int, int]:
    """In how many pieces that end at a block of the quantisation a layer can be cut: whole KV
    groups, query heads within a group, columns of the FFN."""
    block = {"F16": 32, "Q8_0": 32}.get(mix, _BLOCK)
    each = shape.n_head // shape.n_head_kv  # query heads of a KV group
    groups = _pieces(shape.n_head_kv, each * shape.head, block) or 1
    heads = shape.n_head_kv * _pieces(each, shape.head, block)
    return groups, heads, max(shape.n_ff // block, 1)


def _pieces(count: int, columns: int, block: int) -> int:
    """In how many equal parts of whole blocks `count` units of so many columns can be cut."""
    return next((count // step for step in range(1, count + 1)
                 if count % step == 0 and step * columns % block == 0), 0)


def _matrices(shape: Shape) -> list[tuple[str, int, int]]:
    """(name, rows, row length) of a layer's matrices, one expert's where there are several."""
    n, ff, q = shape.n_embd, shape.n_ff, shape.n_head * shape.head
    down = [("attn_output", n, q), ("ffn_up", ff, n), ("ffn_down", n, ff)]
    if shape.architecture == "falcon":
        return [("attn_qkv", q + 2 * shape.kv_width, n), *down]
    return [("attn_q", q, n), ("attn_k", shape.kv_width, n), ("attn_v", shape.kv_width, n),
            ("ffn_gate", ff, n), *down]


def _bytes(kind: str, rows: int, columns: int) -> float:
    if columns % _BLOCK:
        kind = _FALLBACK.get(kind, kind)
    return rows * columns * BITS[kind] / 8


def _more(layer: int, n: int) -> bool:
    """Whether a layer gets the wider type: the ends, and every third between."""
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def _type(shape: Shape, mix: str, name: str, layer: int) -> str:
    base = BASE[mix]
    if base in ("F16", "Q8_0", "Q6_K"):
        return base
    match name:
        case "attn_v":
            return _value_type(shape, mix, layer)
        case "attn_k" if shape.n_expert == 8:
            return "Q8_0"
        case "ffn_down":
            return _down_type(shape, mix, layer)
        case "attn_output" if shape.architecture != "falcon":
            if shape.n_expert == 8 and mix in ("Q2_K", "Q3_K_M", "Q4_K_M"):
                return "Q5_K"
            return {"Q2_K": "Q3_K", "Q2_K_2023": "Q3_K", "Q3_K_M": "Q4_K"}.get(mix, base)
        case "attn_qkv":
            return {"Q3_K_M": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(mix, base)
        case "ffn_gate" | "ffn_up" if mix == "Q2_K_2023":
            return "Q3_K"
    return base


def _value_type(shape: Shape, mix: str, layer: int) -> str:
    if shape.n_expert == 8:
        return "Q8_0"
    grouped = shape.n_head >= 4 * shape.n_head_kv
    kind = {
        "Q2_K": "Q4_K" if grouped else "Q3_K", "Q2_K_2023": "Q4_K" if grouped else "Q3_K",
        "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
    }.get(mix, BASE[mix])
    if mix in ("Q4_K_M", "Q5_K_M") and _more(layer, shape.n_layers):
        return "Q6_K"
    if shape.n_layers == 80 and shape.n_head != shape.n_head_kv and kind in ("Q3_K", "Q4_K"):
        return "Q5_K"  # llama.cpp's rule for 70B models: the matrix is an eighth of the usual
    return kind


def _down_type(shape: Shape, mix: str, layer: int) -> str:
    n, falcon = shape.n_layers, shape.architecture == "falcon"
    more = _more(layer, n)
    match mix:
        case "Q2_K" | "Q2_K_2023":
            return "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if layer < n // 16 else "Q4_K" if more or not falcon else "Q3_K"
        case "Q4_K_M" if falcon:
            return "Q6_K" if layer < n // 16 else "Q5_K" if more else "Q4_K"
        case "Q4_K_M" | "Q5_K_M":
            return "Q6_K" if more else BASE[mix]
    return BASE[mix]
