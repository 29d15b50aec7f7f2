"""Architectures whose layers, or some of them, keep a state of the text so far."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut, number, values_of


def _streams(get: Callable[[str], Any]) -> int:
    """Hyper-connections: a token has several rows between layers."""
    return int(get("hyper_connection.count") or 1)


#: the checks before loading do not cover their graphs
_stateful = functools.partial(Architecture, checked=False)
_SCAN = "ssm."
_DELTA_NET = Cut((_SCAN, keys.INTERVAL, keys.NEXTN))
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
    _stateful(
        ("deepseek4",), Cut((keys.WINDOW, keys.NEXTN), ends=(keys.RATIOS, _CSA), head=True, arrays=(
            keys.RATIOS, "swiglu_clamp_exp", "swiglu_clamp_shexp")),
        whole=True, cell_bytes=_deepseek4_cells, entry="hc_init", output="h_nextn",
        older_output="l_last-%d",
        row_parts=_streams),
    _stateful(("mamba", "mamba2"), Cut((_SCAN,)), headless=True,
              unsliced="its layers keep a state, which is not cut"),
    _stateful(("rwkv6", "rwkv6qwen2", "rwkv7"), splits=False, headless=True),
    _stateful(("glm5-next",), Cut((_SCAN, keys.DENSE), arrays=(keys.KV_HEADS, keys.INDEXERS),
                                  begins=keys.INDEXERS, head=True),
              whole=True, alone=True, entry="hc_init", row_parts=_streams),
    _stateful(("qwen4exp",), splits=False, whole=True, alone=True, interval=4,
              unsplit="some of its layers read tokens, and llama.cpp cannot keep its cells in order"
              ),
    _stateful(("kimi-k3",), splits=False, unsplit="each layer mixes the inputs of earlier ones, "
              "of which llama.cpp takes none from another stage"),
    _stateful(("falcon-h1",), Cut((_SCAN,)), both=True),
    _stateful(("granitehybrid",), Cut((*keys.SCALES, _SCAN), arrays=(keys.KV_HEADS,)),
              unsliced="its norm of states goes over all heads, of which a slice has some"),
    _stateful(("kimi-linear",), Cut((_SCAN, keys.DENSE), arrays=(keys.KV_HEADS,), head=True)),
    _stateful(("jamba",), Cut((_SCAN,), arrays=(keys.KV_HEADS,))),
    _stateful(
        ("lfm2",), Cut(arrays=(keys.KV_HEADS,), norm="token_embd_norm"), layer_inputs=True,
        unsliced="llama.cpp wants its convolutions to be as wide as the model"),
    _stateful(("lfm2moe",), Cut((keys.DENSE,), arrays=(keys.KV_HEADS,), norm="token_embd_norm")),
    _stateful(("nemotron_h",), Cut((_SCAN,), arrays=(keys.KV_HEADS, keys.FF)), parted=True,
              sliced=True, state="scan", layer_inputs=True, final_rows=True, output=_BLOCK),
    _stateful(
        ("nemotron_h_moe",), Cut((_SCAN, keys.NEXTN), arrays=(
            keys.KV_HEADS, keys.FF, "expert_feed_forward_length", "expert_used_count")),
        parted=True, final_rows=True, output=_BLOCK),
    _stateful(("qwen35",), _DELTA_NET, interval=4, sliced=True, state="delta", layer_inputs=True,
              final_rows=True, sections=True, mtp=True),
    _stateful(("qwen35moe",), _DELTA_NET, interval=4, sliced=True, state="delta", drawn="norm",
              layer_inputs=True, final_rows=True, sections=True, mtp=True),
    _stateful(("qwen3next",), _DELTA_NET, interval=4, sliced=True, state="grouped", drawn="norm",
              layer_inputs=True, final_rows=True),
)
