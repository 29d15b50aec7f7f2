"""Architectures of which some layers have a sliding window or attention in chunks."""

from __future__ import annotations

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut
from pipeinfer.models.architectures.mixtures import NORMS
from pipeinfer.models.gguf import ModelFile

_WITH_WINDOWS = 64  #: number of layers from which llama.cpp knows an exaone4 with windows


def _exaone4_refuses(model: ModelFile) -> str:
    return "" if model.n_layers != _WITH_WINDOWS else (
        f"llama.cpp tells by its {_WITH_WINDOWS} layers that most of them have a sliding window, "
        "and a part of it has fewer")


def _llama4_refuses(model: ModelFile) -> str:
    return "" if model.arch_get(keys.WINDOW) != 0 else (
        "without chunked attention llama.cpp treats the last layer it has as another kind")


ARCHITECTURES = (
    # every fourth layer does not rotate
    Architecture(("afmoe",), Cut((keys.DENSE,), period=4, step=4), scaled=True,
                 entry="inp_embd_scaled"),
    # with as many layers as that llama.cpp rotates all: no stage, nor what one gets from a lost one
    Architecture(("smallthinker",), Cut(period=-4, step=8, far=True,
                                        mistaken=lambda _, count: count == 4)),
    Architecture(("laguna",), Cut((keys.DENSE,), period=-4, arrays=(keys.HEADS,)), partly=True),
    Architecture(("mellum",), Cut((keys.DENSE,), period=4, plain=True, head=True)),
    Architecture(("mimo2",), Cut((keys.DENSE, keys.NEXTN), period=4, head=True, arrays=(
        keys.HEADS, keys.KV_HEADS)), partly=True, unequal=True, output="h_nextn",
                 older_output="l_out-%d"),
    Architecture(("step35",), Cut((keys.DENSE, keys.NEXTN), period=4, head=True, arrays=(
        keys.HEADS, keys.KV_HEADS, "swiglu_clamp_exp", "swiglu_clamp_shexp")), partly=True,
        output="h_nextn"),
    Architecture(("cohere2",), Cut(("logit_scale",), period=4, near_first=True), partly=True,
                 fills_width=True),
    Architecture(("cohere2moe",), Cut((keys.DENSE, "logit_scale"), period=4, near_first=True,
                                      far=True)),
    Architecture(("exaone-moe",), Cut((keys.DENSE, keys.NEXTN), period=4, head=True,
                                      near_first=True, far=True)),
    Architecture(("exaone4",), Cut((keys.WINDOW, keys.NEXTN), always="attn_output",
                                   refuses=_exaone4_refuses), fills_width=True),
    Architecture(("granite_swa",), Cut(keys.SCALES, period=4)),
    Architecture(("muse-glimmer",), Cut(("logit_scale",), period=4, head=True, near_first=True,
                                        far=True), entry="embd_norm"),
    Architecture(("spark2_5",), Cut((keys.DENSE,), period=4)),
    Architecture(("gpt-oss",), Cut(period=2, head=True), sliced=True, drawn="softmax",
                 layer_inputs=True, final_rows=True),
    Architecture(("llama4",), Cut((keys.MOE_STEP,), period=4, step=4, near_first=True, far=True,
                                  refuses=_llama4_refuses), sliced=True, shared_tied=True,
                 chunked=True),
    Architecture(("olmo2",), Cut(period=4, plain=True, head=True, always="attn_output"),
                 fills_width=True, unsliced=NORMS),
)
