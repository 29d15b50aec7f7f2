"""Architectures whose layers, or some of them, keep a state of the text so far."""

from __future__ import annotations

import functools

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut

#: the checks before loading do not cover their graphs
_stateful = functools.partial(Architecture, checked=False)
_SCAN = "ssm."
_DELTA_NET = Cut((_SCAN, keys.INTERVAL, keys.NEXTN))
_BLOCK = "nemotron_h_block_out-%d"

ARCHITECTURES = (
    _stateful(("mamba", "mamba2"), Cut((_SCAN,)), headless=True,
              unsliced="its layers keep a state, which is not cut"),
    _stateful(("rwkv6", "rwkv6qwen2", "rwkv7"), splits=False, headless=True),
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
