"""Mixtures of experts whose layers have attention alike; Kimi K2 is "deepseek2"."""

from __future__ import annotations

from collections.abc import Mapping

from pipeinfer.models.architectures import keys
from pipeinfer.models.architectures.declaration import Architecture, Cut, number
from pipeinfer.models.gguf import ModelFile

NORMS = "its norm of queries and keys goes over all heads, of which a slice has some"


def _ernie_refuses(model: ModelFile) -> str:
    return "" if number(model, keys.MOE_STEP, 1) == 1 else (
        "llama.cpp tells by a layer's number whether it has experts")


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


ARCHITECTURES = (
    Architecture(("arctic",), fills_width=True),
    Architecture(("bailingmoe2",), Cut((keys.DENSE, keys.NEXTN), head=True), partly=True),
    Architecture(
        ("deepseek2",), Cut((keys.DENSE, keys.NEXTN, "attention.temperature_scale"),
                            mistaken=_deepseek2_mistaken, writes=_deepseek2_writes),
        latent=True, sliced=True, shared_tied=True, final_rows=True, mtp=True),
    Architecture(("dots1",), Cut((keys.DENSE,), head=True)),
    Architecture(("ernie4_5-moe",), Cut((keys.DENSE, keys.MOE_STEP), refuses=_ernie_refuses)),
    Architecture(("glm4moe",), Cut((keys.DENSE, keys.NEXTN)), partly=True, sliced=True,
                 shared_tied=True, final_rows=True, entry="embd", mtp=True),
    Architecture(("granitemoe",), Cut(keys.SCALES), sliced=True, drawn="norm"),
    Architecture(("hunyuan-moe",)),
    Architecture(("minimax-m2",), Cut(head=True), partly=True, unsliced=NORMS, layer_inputs=True),
    Architecture(("olmoe", "qwen2moe"), Cut(head=True), fills_width=True),
    Architecture(("qwen3moe",), sliced=True, drawn="norm", layer_inputs=True),
    Architecture(("deepseek32",), Cut((keys.DENSE, keys.NEXTN)), latent=True),
    Architecture(("glm-dsa",), Cut((keys.DENSE, keys.NEXTN), arrays=(keys.INDEXERS,),
                                   begins=keys.INDEXERS), latent=True),
    Architecture(("grovemoe",), Cut((keys.DENSE,), head=True)),
    Architecture(("hy_v3",), Cut((keys.DENSE, keys.NEXTN))),
    Architecture(("mistral4",), Cut((keys.DENSE,)), latent=True),
    # as soon as a context has several sequences, its layers read all positions
    Architecture(("minimax-m3",), Cut((keys.DENSE,), head=True), checked=False, whole=True,
                 alone=True),
    Architecture(("qwen3vlmoe",), Cut((keys.DENSE,)), sections=True),
    # computed without windows, as phi3
    Architecture(("phimoe",), Cut((keys.WINDOW, keys.DENSE), head=True), partly=True,
                 fills_width=True),
)
