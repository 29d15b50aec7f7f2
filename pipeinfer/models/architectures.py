"""Metadata for ranges of layers, by architecture, with which llama.cpp computes as in the whole
model.

llama.cpp numbers layers from 0 and derives some things from a layer's number, or from the number of
layers. Where metadata can state the same explicitly, it is written: patterns of sliding windows and
of rotations become one value per layer, leading dense layers are counted from the stage's first,
and a factor on embeddings is removed from all stages but the first. Models for which no metadata
can do this are refused. An entry here rests on tests/backends/test_split_parity.py, which cuts such
models at every layer, bit-equal.

Uses metadata; writes no file and does not plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from msgspec import Struct

from pipeinfer.core.types import Pooling
from pipeinfer.errors import ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models.gguf import ModelFile, Value
from pipeinfer.models.gguf_parts import bools_entry, float_entry, numbers_entry, uint_entry

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
_DENSE, _NEXTN = "leading_dense_block_count", "nextn_predict_layers"
_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  #: by llama.cpp's numbers
_EMBEDDING_SCALE, _RESIDUAL_SCALE = "embedding_scale", "residual_scale"
_WAY_OUT = "run it whole in one process (-np 1)"


class CutRule(Struct, frozen=True):
    """How an architecture is cut.

    traps: prefixes of metadata keys that would make a layer depend on its place, and that are
        handled here or do not matter
    period: every so-manyth layer has no sliding window, where the file does not list them; 0:
        layers have none
    plain: whether there are no windows if the file has no size for them; otherwise llama.cpp has a
        default size
    arrays: metadata with one value per layer
    step: a stage begins at a multiple of this many layers
    head: whether the file always has an output matrix of its own
    always: a matrix or norm that every layer has
    norm: the norm behind the last layer
    """

    traps: tuple[str, ...] = ()
    period: int = 0
    plain: bool = False
    arrays: tuple[str, ...] = ()
    step: int = 1
    head: bool = False
    always: str = "attn_norm"
    norm: str = "output_norm"


_WINDOWS = (_WINDOW,)  # also the beginning of the pattern's name
_SCALES = (_EMBEDDING_SCALE, _RESIDUAL_SCALE, "logit_scale", "attention.scale")
_INTERVAL, _RECURRENT = "full_attention_interval", "attention.recurrent_layers"
_MOE_STEP = "interleave_moe_layer_step"
_KV_HEADS, _FF = "attention.head_count_kv", "feed_forward_length"
_PARTED = ("nemotron_h", "nemotron_h_moe")  #: a layer is a state, attention or a feed forward alone
_IN_ONE = ("falcon-h1",)  #: every layer has a state and attention
_DELTA_NET = ("ssm.", _INTERVAL, _NEXTN)
#: every architecture that can be cut; Mistral and Mixtral are "llama"
ARCHITECTURES = {
    "arctic": CutRule(),
    "bailingmoe2": CutRule((_DENSE, _NEXTN), head=True),
    "cohere2": CutRule((*_WINDOWS, "logit_scale"), period=4, arrays=(_PATTERN,)),
    "deepseek2": CutRule((_DENSE, _NEXTN, "attention.temperature_scale")),
    "dots1": CutRule((_DENSE,), head=True),
    "ernie4_5": CutRule(),
    "ernie4_5-moe": CutRule((_DENSE, _MOE_STEP)),
    "exaone4": CutRule((*_WINDOWS, _NEXTN), always="attn_output"),
    "falcon": CutRule(),
    "falcon-h1": CutRule(("ssm.",)),
    "gemma2": CutRule(_WINDOWS, period=2, arrays=(_PATTERN,)),
    "gemma3": CutRule(_WINDOWS, period=6, plain=True, arrays=(_PATTERN,)),
    "gemma4": CutRule(_WINDOWS, period=1, arrays=(
        _PATTERN, _KV_HEADS, _FF)),
    "glm4": CutRule((_NEXTN,)),
    "glm4moe": CutRule((_DENSE, _NEXTN)),
    "gpt-oss": CutRule(_WINDOWS, period=2, arrays=(_PATTERN,), head=True),
    "granite": CutRule(_SCALES),
    "granitehybrid": CutRule((*_SCALES, "ssm."), arrays=(_KV_HEADS,)),
    "granitemoe": CutRule(_SCALES),
    "hunyuan-dense": CutRule(),
    "hunyuan-moe": CutRule(),
    "jamba": CutRule(("ssm.",), arrays=(_KV_HEADS,)),
    "lfm2": CutRule(arrays=(_KV_HEADS,), norm="token_embd_norm"),
    "lfm2moe": CutRule((_DENSE,), arrays=(_KV_HEADS,), norm="token_embd_norm"),
    "llama": CutRule(),
    "llama4": CutRule((*_WINDOWS, _MOE_STEP), period=4, arrays=(_PATTERN,),
                      step=4),
    "mamba": CutRule(("ssm.",)),
    "mamba2": CutRule(("ssm.",)),
    "minicpm": CutRule(_SCALES),
    "minimax-m2": CutRule(head=True),
    "mistral3": CutRule(("attention.temperature_scale",)),
    "nemotron_h": CutRule(("ssm.",), arrays=(_KV_HEADS, _FF)),
    "nemotron_h_moe": CutRule(("ssm.", _NEXTN), arrays=(
        _KV_HEADS, _FF, "expert_feed_forward_length", "expert_used_count")),
    "olmo2": CutRule(_WINDOWS, period=4, plain=True, arrays=(_PATTERN,), head=True,
                 always="attn_output"),
    "olmoe": CutRule(head=True),
    "phi3": CutRule(_WINDOWS),  # llama.cpp computes these without windows
    "qwen2": CutRule(),
    "qwen2moe": CutRule(head=True),
    "qwen3": CutRule(),
    "qwen35": CutRule(_DELTA_NET),
    "qwen35moe": CutRule(_DELTA_NET),
    "qwen3moe": CutRule(),
    "qwen3next": CutRule(_DELTA_NET),
    "seed_oss": CutRule(),
    "smollm3": CutRule(step=4),  # every fourth layer does not rotate
}
#: numbers of layers at which llama.cpp scales queries in another way
_SCALED_OTHERWISE = {"gemma2": 46, "gemma3": 62}
_WITH_WINDOWS = 64  #: number of layers from which llama.cpp knows an exaone4 with windows
#: architectures whose graphs have inputs that only layers of one kind read: llama.cpp ends the
#: process where a graph reads them nowhere. With their period
_BOTH_KINDS = {"cohere2": 4, "llama4": 4}
_LITE = (26, 27)  #: numbers of layers at which llama.cpp assumes uncompressed queries in deepseek2


def keeps_state(model: ModelFile) -> bool:
    """Return whether layers have a state of the text so far, of which no part can be taken back.

    Those of recurrent models and of hybrids have.
    """
    if not isinstance(model, ModelFile):
        return False
    arch = model.architecture
    return arch.startswith(("rwkv", "arwkv")) or any(
        key.startswith((f"{arch}.ssm.", f"{arch}.wkv.", f"{arch}.shortconv.", f"{arch}.kda."))
        for key in model.meta_keys())


class LayerKind(StrEnum):
    """What a layer keeps of the text."""

    STATE = "state"
    CACHE = "cache"  #: keys and values, for attention
    BOTH = "both"
    NOTHING = "nothing"


def layer_kinds(model: ModelFile) -> list[LayerKind]:
    """Return what each layer keeps of the text."""
    n, arch = model.n_layers, model.architecture
    if not keeps_state(model):
        return [LayerKind.CACHE] * n
    if arch in _IN_ONE:
        return [LayerKind.BOTH] * n
    if model.is_array(f"{arch}.{_RECURRENT}"):
        states = [bool(value) for value in values_of(model, _RECURRENT)][:n]
    elif model.is_array(f"{arch}.{_KV_HEADS}"):
        heads, wide = values_of(model, _KV_HEADS), [0] * n
        if arch in _PARTED and model.is_array(f"{arch}.{_FF}"):
            wide = values_of(model, _FF)
        return [LayerKind.NOTHING if wide[i] else LayerKind.CACHE if heads[i] else LayerKind.STATE
                for i in range(n)]
    else:
        interval = _number(model, _INTERVAL, 4 if arch.startswith("qwen3") else 0)
        states = [not interval or (layer + 1) % interval > 0 for layer in range(n)]
    return [LayerKind.STATE if one else LayerKind.CACHE for one in states]


def step_of(model: ModelFile) -> int:
    """Return the number of layers at whose multiples stages of the model begin."""
    cut = ARCHITECTURES.get(model.architecture)
    if cut is None or cut.step == 1:
        return 1
    return int(np.lcm(cut.step, max(1, _number(model, _MOE_STEP))))


def refusal(model: ModelFile) -> str:
    """Return why this model cannot be cut although its architecture can; empty if it can."""
    arch, n = model.architecture, model.n_layers
    if n == _SCALED_OTHERWISE.get(arch):
        return (f"llama.cpp tells by its {n} layers how to scale queries, and a part of it has "
                "fewer")
    if arch == "exaone4" and n == _WITH_WINDOWS:
        return (f"llama.cpp tells by its {n} layers that most of them have a sliding window, and a "
                "part of it has fewer")
    if arch == "ernie4_5-moe" and _number(model, _MOE_STEP, 1) != 1:
        return "llama.cpp tells by a layer's number whether it has experts"
    if arch == "gemma4" and (_number(model, "attention.shared_kv_layers")
                             or _number(model, "embedding_length_per_layer_input")):
        return "its last layers read the cache of others, or every layer reads the token itself"
    if arch == "gemma4" and len({_number(model, f"attention.key_length{kind}") % 64 == 0
                                 for kind in ("", "_swa")}) > 1:
        return "llama.cpp tells by the size of heads of its first layer how to keep keys"
    if arch == "llama4" and model.arch_get(_WINDOW) == 0:
        return "without chunked attention llama.cpp treats the last layer it has as another kind"
    if arch == "gemma4" and not model.is_array(f"{arch}.{_PATTERN}"):
        return f"it does not say which layers have a sliding window ({arch}.{_PATTERN})"
    return ""


def check_range(model: ModelFile, start: int, stop: int) -> None:
    """Raise PlanError or UnsupportedArchitecture if layers `[start, stop)` cannot be a stage."""
    step = step_of(model)
    if start % step:
        raise PlanError(
            f"{model.path.name}: a stage cannot begin at layer {start}: every {step}th layer of a "
            f"{model.architecture} is of another kind, so stages begin at multiples of {step}; "
            "give such counts to --layers, or none")
    if model.architecture in _BOTH_KINDS:
        kinds = windows_of(model, _BOTH_KINDS[model.architecture])[start:stop]
        # so no part of a stage that a rank loads later, in addition to its own, has one kind only
        if not kinds[0] or (model.architecture == "llama4" and all(kinds)):
            raise PlanError(
                f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot "
                "be a stage: llama.cpp needs one with a window first, and in a llama4 one without; "
                "give other counts to --layers, or none")
    _check_kinds(model, start, stop)
    if model.architecture == "deepseek2" and not _lite(model) and (
            stop - start in _LITE or (stop - start, model.n_vocab) == (48, 128256)):
        raise UnsupportedArchitecture(
            f"{model.path.name}: a stage of {stop - start} layers of a deepseek2 would be taken "
            "for a model of another kind; give other counts to --layers")


def _check_kinds(model: ModelFile, start: int, stop: int) -> None:
    """Raise PlanError where a stage would have layers with a state only, or with attention only,
    though the model has both: llama.cpp would end the process.

    Stages begin behind a layer with attention, so that whatever lies between two beginnings has
    both: a rank may load a part of a stage in addition to its own layers.
    """
    kinds = layer_kinds(model)
    if len(set(kinds) - {LayerKind.NOTHING}) == 1:
        return
    begins = [i for i in range(1, len(kinds)) if kinds[i - 1] is LayerKind.CACHE
              and len(set(kinds[i:]) - {LayerKind.NOTHING}) == 2]
    if (start and start not in begins) or len(set(kinds[start:stop]) - {LayerKind.NOTHING}) < 2:
        raise PlanError(
            f"{model.path.name}: layers {start} to {stop - 1} of a {model.architecture} cannot be "
            "a stage: each needs layers with a state and with attention, so stages begin at layers "
            f"0, {', '.join(map(str, begins))}; give such counts to --layers, or none")


def barred(model: ModelFile) -> tuple[frozenset[tuple[int, int]], str]:
    """Return the ranges of layers that cannot be a stage, and the reason for the first of them."""
    found: dict[tuple[int, int], str] = {}
    if isinstance(model, ModelFile) and model.architecture in ARCHITECTURES:
        for start in range(model.n_layers):
            for stop in range(start + 1, model.n_layers + 1):
                if (start, stop) == (0, model.n_layers):
                    continue
                try:
                    check_range(model, start, stop)
                except (PlanError, UnsupportedArchitecture) as error:
                    found[start, stop] = str(error)
    return frozenset(found), next(iter(found.values()), "")


def smallest_stage(model: ModelFile, last: int) -> tuple[int, int]:
    """Return the fewest layers that can be a stage and end with layer `last`.

    Where no such stage ends there, it contains that layer. Used to measure a model by a part of it.
    """
    n, (bars, _) = model.n_layers, barred(model)
    for stop in range(last + 1, n + 1):
        for start in range(last, -1, -1):
            if (start, stop) not in bars:
                return start, stop
    return 0, n


def entries(model: ModelFile, start: int, stop: int, *, takes_tokens: bool | None = None,
            given: Mapping[str, Sequence[int]] | None = None) -> dict[str, bytes]:
    """Return the metadata in which a shard's header differs from the model's.

    start, stop: the layers `[start, stop)` of the shard
    takes_tokens: whether the shard looks tokens up itself; None: if it has the first layer
    given: values of all layers in place of the model's, by key
    Returns entries by key; an empty entry removes the key. The number of layers is among them.
    Where no layer has a sliding window although llama.cpp requires one, or there are too few layers
    for it, one more layer is announced as one for multi-token prediction, which needs no weights
    and no cache.
    """
    arch, cut = model.architecture, ARCHITECTURES.get(model.architecture, CutRule())
    own, windows = _Header(arch), None
    if cut.period and (_number(model, _WINDOW) or not cut.plain):
        windows = windows_of(model, cut.period)[start:stop]
    ghost = (windows is not None and not any(windows)) or (
        arch == "gemma4" and stop - start == 1)
    own.uint("block_count", stop - start + ghost)
    if ghost:
        own.uint(_NEXTN, 1)
    else:
        own.drop(_NEXTN)
    if windows is not None:
        own.bools(_PATTERN, [*windows, True] if ghost else windows)
    for key in cut.arrays:
        if key != _PATTERN and model.is_array(f"{model.architecture}.{key}"):
            values = [*((given or {}).get(key) or values_of(model, key))][start:stop]
            own.numbers(key, [*values, values[-1]] if ghost else values)
    if (dense := _number(model, _DENSE)) and _DENSE in cut.traps:
        own.uint(_DENSE, max(0, dense - start))
    if _EMBEDDING_SCALE in cut.traps and not (start == 0 if takes_tokens is None else takes_tokens):
        own.float(_EMBEDDING_SCALE, 0.0)
    if arch == "minicpm" and model.arch_get(_RESIDUAL_SCALE) is None:
        own.float(_RESIDUAL_SCALE, float(
            np.float32(1.4) / np.sqrt(np.float32(model.n_layers), dtype=np.float32)))
    if arch == "deepseek2":
        _deepseek2(model, own)
    if _INTERVAL in cut.traps:
        own.bools(_RECURRENT, [kind is LayerKind.STATE for kind in layer_kinds(model)[start:stop]])
        own.drop(_INTERVAL)
    return own.entries


def embedding_factor(model: ModelFile) -> float:
    """Return the float32 by which llama.cpp multiplies a token's embedding row before the first
    layer.
    """
    if model.architecture in ("gemma2", "gemma3", "gemma4"):
        return float(np.sqrt(np.float32(model.n_embd)))
    if _EMBEDDING_SCALE in ARCHITECTURES.get(model.architecture, CutRule()).traps:
        value = model.arch_get(_EMBEDDING_SCALE, 12.0 if model.architecture == "minicpm" else 0)
        return float(value) if isinstance(value, int | float) and value else 1.0
    return 1.0


def has_windows(model: ModelFile) -> bool:
    """Return whether llama.cpp has a cache of its own for layers with a sliding window."""
    cut = ARCHITECTURES.get(model.architecture)
    given = isinstance(model, ModelFile) and bool(_number(model, _WINDOW))
    return given if cut is None else bool(cut.period) and (given or not cut.plain)


def windows_of(model: ModelFile, period: int) -> list[bool]:
    """Return for each layer whether it has a sliding window; period: as in `CutRule`."""
    key = f"{model.architecture}.{_PATTERN}"
    if model.is_array(key):
        return [bool(value) for value in values_of(model, _PATTERN)][:model.n_layers]
    period = _number(model, _PATTERN, period)
    return [period == 0 or i % period < period - 1 for i in range(model.n_layers)]


def kind_of_place(model: ModelFile, layer: int) -> list[int]:
    """Return what a layer computes because of its place in the model: equal lists, equal ways."""
    cut, arch = ARCHITECTURES[model.architecture], model.architecture
    found = [layer % step_of(model)]
    if cut.period and (_number(model, _WINDOW) or not cut.plain):
        found.append(windows_of(model, cut.period)[layer])
    return found + [values_of(model, key)[layer] for key in cut.arrays
                    if key != _PATTERN and model.is_array(f"{arch}.{key}")]


def unused(model: ModelFile, start: int, stop: int) -> tuple[str, ...]:
    """Return tensors outside layers that these layers do not read; llama.cpp refuses such."""
    if model.architecture == "gemma4" and all(windows_of(model, 0)[start:stop]):
        return ("rope_freqs.weight",)
    return ()


class _Header:
    """Entries of a new header under the architecture's prefix. A removed one is empty."""

    def __init__(self, arch: str) -> None:
        self._prefix = arch + "."
        self.entries: dict[str, bytes] = {}

    def uint(self, key: str, value: int) -> None:
        self.entries[self._prefix + key] = uint_entry(self._prefix + key, value)

    def float(self, key: str, value: float) -> None:
        self.entries[self._prefix + key] = float_entry(self._prefix + key, value)

    def numbers(self, key: str, values: Sequence[int]) -> None:
        self.entries[self._prefix + key] = numbers_entry(self._prefix + key, values)

    def bools(self, key: str, values: Sequence[bool]) -> None:
        self.entries[self._prefix + key] = bools_entry(self._prefix + key, values)

    def drop(self, key: str) -> None:
        self.entries[self._prefix + key] = b""


def _deepseek2(model: ModelFile, own: _Header) -> None:
    """Write what llama.cpp would otherwise derive from the number of layers or tokens."""
    if _lite(model):
        own.uint("attention.q_lora_rank", 0)
    if not _number(model, "expert_gating_func"):
        sigmoid = model.n_layers in (47, 48) and model.n_vocab == 154880
        own.uint("expert_gating_func", 2 if sigmoid else 1)


def _lite(model: ModelFile) -> bool:
    return "blk.0.attn_q.weight" in model.tensors


def values_of(model: ModelFile, key: str) -> list[int]:
    """Return metadata with one value per layer. Raises ModelError if it is damaged."""
    values = model.arch_get(key)
    if not isinstance(values, list) or len(values) < model.n_layers or not all(
            isinstance(value, int) for value in values):
        raise ModelError(f"{model.path}: {model.architecture}.{key} has not a number for each of "
                         f"{model.n_layers} layers; the file is damaged, fetch it again")
    return [int(value) for value in values if isinstance(value, int)]


def _number(model: ModelFile, key: str, default: int = 0) -> int:
    value: Value | None = model.arch_get(key)
    return int(value) if isinstance(value, int) and value >= 0 else default


def no_embeddings(model: ModelFile) -> str:
    """Return why a model's prompts cannot be embedded, "" if they can."""
    kind = model.arch_get("pooling_type")
    if not isinstance(kind, int) or kind <= 0:
        return ("the file of this model names no pooling of rows, so it is made to generate text: "
                "serve an embedding model, such as Qwen3-Embedding")
    if kind not in _POOLINGS:
        return (f"the pooling of this model has the number {kind}, as of models that rank texts: "
                "the mean, the first token and the last one work here")
    if model.arch_get("attention.causal", default=True) is False:
        return "tokens of this model attend to later ones, which prompts in chunks cannot"
    return ""


def pooling_of(model: ModelFile) -> Pooling:
    """Return which rows of a prompt are its embedding, by the model's file."""
    kind = model.arch_get("pooling_type")
    return _POOLINGS.get(kind, "last") if isinstance(kind, int) else "last"
