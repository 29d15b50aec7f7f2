"""What pipeinfer has to know of an architecture: the fields of a declaration, and their defaults.

The defaults are those of a plain transformer like llama that can be cut between any two layers and
that were not tried in slices. Reads metadata; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile, Value

_WIDTH = "llama.cpp wants its heads to add up to its width"


class Cut(Struct, frozen=True):
    """How an architecture is cut into ranges of layers.

    traps: prefixes of metadata keys that would make a layer depend on its place, and that are
        handled here or do not matter
    period: every so-manyth layer has no sliding window, where the file does not list them; 0:
        layers have none. A size and a pattern of windows in the metadata are handled then.
        Negative: the first of so many has none, and a stage has to begin with such a one
    plain: whether there are no windows if the file has no size for them; otherwise llama.cpp has a
        default size
    arrays: further metadata with one value per layer; its key may lack the architecture's name
    step: a stage begins at a multiple of this many layers
    begins: metadata with one value per layer; a stage begins where it is not 0
    ends: metadata with one value per layer, and a value: a stage has a layer with it, and begins
        behind such a one. llama.cpp ends the process for a cache without layers
    head: whether the file always has an output matrix of its own
    always: a matrix or norm that every layer has
    norm: the norm behind the last layer
    least: layers that a header has to announce at least
    near_first, far: whether a stage has to begin with a layer with a window, and to have layers
        with and without. llama.cpp ends the process where a graph reads an input nowhere
    far_only: tensors outside layers that only layers without a window read
    refuses: why this model cannot be cut although its architecture can; "" if it can
    mistaken: whether llama.cpp would take so many of its layers for a model of another kind
    writes: further metadata of every part, which llama.cpp would derive from the whole model
    """

    traps: tuple[str, ...] = ()
    period: int = 0
    plain: bool = False
    arrays: tuple[str, ...] = ()
    step: int = 1
    begins: str = ""
    ends: tuple[str, int] = ("", 0)
    head: bool = False
    always: str = "attn_norm"
    norm: str = "output_norm"
    least: int = 1
    near_first: bool = False
    far: bool = False
    far_only: tuple[str, ...] = ()
    refuses: Callable[[ModelFile], str] = lambda _: ""
    mistaken: Callable[[ModelFile, int], bool] = lambda _, __: False
    writes: Callable[[ModelFile], Mapping[str, int | float]] = lambda _: {}


class Torch(Struct, frozen=True):
    """How the torch backend takes an architecture.

    types: model types of Hugging Face folders that tests compare with transformers' own pass
    gguf: whether GGUF files of the architecture can be read, too
    norm_offset: what the converter has added to weights of norms
    names: parts of a layer whose names in a GGUF file differ from the usual ones
    config: further arguments for transformers' config, by the model and a function that returns a
        number of its metadata (key, default)
    """

    types: tuple[str, ...]
    gguf: bool = True
    norm_offset: float = 0.0
    names: Mapping[str, str] = {}
    config: Callable[[ModelFile, Callable[..., Any]], dict[str, Any]] = lambda _, __: {}


def scan_bytes(model: Any) -> float:
    """Return the bytes of a layer's state of one sequence: that of its scan, and the last inputs of
    its convolution. Other kinds of states count as nothing.
    """
    def size(key: str) -> int:
        return int(model.arch_get(key) or 0)

    inner, state = size("ssm.inner_size"), size("ssm.state_size")
    channels = inner + 2 * max(1, size("ssm.group_count")) * state
    heads, head = int(model.arch_get("attention.head_count") or 0), size("kda.head_dim")
    if head:
        inner, state, channels = heads * head, head, 3 * heads * head
    return 4.0 * (inner * state + max(0, size("ssm.conv_kernel") - 1) * channels
                  + max(0, size("shortconv.l_cache") - 1) * int(model.n_embd))


class Architecture(Struct, frozen=True):
    """The declaration of an architecture, or of several that differ in nothing here.

    names: as in `general.architecture`
    cut: how it is cut; splits: whether it can be, which tests/backends/test_split_parity.py shows;
    unsplit: why it cannot, where that is known

    Layers. interval: one of so many has attention and the others a state, where the file does not
    list them. both: every layer has a state and attention. parted: a layer is a state, attention or
    a feed forward alone. state_bytes: of a layer's state of one sequence. latent: all heads
    read one compressed cache. whole: llama.cpp copies its sequences as
    a whole alone. alone: it computes the tokens of plain decoding only while there is one sequence.
    cell_bytes: of a layer's cache of one sequence, where each has one for itself, by the model, the
    layer, the cells and the bytes of an element.
    varied: layers with a sliding window have other heads than the rest,
    and the last ones may read the cache of others. scaled: tokens' rows are multiplied by the root
    of their size; embedding_scale: or by this, where the file has no factor.

    Checks before loading (`llama_rules`). checked: whether they cover the graph wholly. partly:
    heads may be rotated in part. unequal: heads of values may have another size than those of keys.
    fills_width: heads have to add up to the model's width. chunked: a window of 0 ends the process.
    headless:
    there are none.

    Slices. sliced: whether layers can be sliced; unsliced: why not. slices_as: the architecture of
    slices where llama.cpp requires a model's heads to add up to its width: one whose graph is the
    same (tests/models/test_slices.py shows equal bits) and whose heads may have any size. renamed:
    new names of tensors there. two_in_one: ffn_up has the rows of the gate before its own. state:
    the part of a layer with a state that can be sliced: a delta net (grouped: with the value heads
    of a key head one after another), or a scan. shared_tied: the shared expert has so many columns
    for each column of an expert. drawn: the end of the name of the tensor with the weights of drawn
    experts, where these are the softmax of their products alone: "norm" where llama.cpp divides by
    their sum, "softmax" where it computes it last.

    The graph of llama.cpp. layer_inputs, final_rows: whether it names the inputs of layers, and
    what the output matrix reads; for others llama.cpp ends the process. entry: where hidden rows
    are put into graphs that do not take them as embedding rows: glm4's end the process, gemma2's
    scale them as they scale tokens. output: the name of the last layer's output, with "%d" for its
    number; older_output: in the library that --native compiles. again: the node behind which nodes
    read the entry as the embeddings of tokens, which cross a cut beside the hidden rows then.
    sections: whether positions have four sections.
    row_parts: how many rows of the model's width cross a cut for each token, by a function that
    returns metadata.

    mtp: whether its prediction head was shown to give llama.cpp's own proposals. assistant: whether
    it reads the caches of another model. paired: rotated elements are neighbours in the file.
    with_gaps: the architecture that its layers are written as where positions have gaps (`gaps`).
    torch: how the torch backend takes it.
    """

    names: tuple[str, ...]
    cut: Cut = Cut()
    splits: bool = True
    unsplit: str = ""
    interval: int = 0
    both: bool = False
    parted: bool = False
    state_bytes: Callable[[Any], float] = scan_bytes
    latent: bool = False
    whole: bool = False
    alone: bool = False
    cell_bytes: Callable[[Any, int, int, int], float] | None = None
    varied: bool = False
    scaled: bool = False
    embedding_scale: float = 0.0
    checked: bool = True
    partly: bool = False
    unequal: bool = False
    fills_width: bool = False
    chunked: bool = False
    headless: bool = False
    sliced: bool = False
    unsliced: str = ""
    slices_as: str = ""
    renamed: Mapping[str, str] = {}
    two_in_one: bool = False
    state: Literal["", "delta", "grouped", "scan"] = ""
    shared_tied: bool = False
    drawn: Literal["", "norm", "softmax"] = ""
    layer_inputs: bool = False
    final_rows: bool = False
    entry: str = ""
    output: str = "l_out-%d"
    older_output: str = ""
    again: str = ""
    sections: bool = False
    row_parts: Callable[[Callable[[str], Any]], int] = lambda _: 1
    mtp: bool = False
    assistant: bool = False
    paired: bool = False
    with_gaps: str = ""
    torch: Torch = Torch((), gguf=False)

    @property
    def why_not_sliced(self) -> str:
        """Why its layers are not sliced; empty where they are."""
        if self.sliced or self.unsliced:
            return self.unsliced
        if not self.splits:
            return "it is not known how its layers could be"
        return _WIDTH if self.fills_width else "not tried"


def number(model: ModelFile, key: str, default: int = 0) -> int:
    """Return a number of the architecture's metadata that is 0 or more, else the default."""
    value: Value | None = model.arch_get(key)
    return int(value) if isinstance(value, int) and value >= 0 else default


def by_layer(model: ModelFile, key: str) -> str:
    """Return the whole key of metadata with one value per layer; empty if the file has none."""
    keys = f"{model.architecture}.{key}", key
    return next((one for one in keys if model.is_array(one)), "")


def values_of(model: ModelFile, key: str) -> list[Any]:
    """Return metadata with one value per layer: booleans, integers or floats. Raises ModelError if
    it is damaged.
    """
    values = model.get(by_layer(model, key))
    if not isinstance(values, list) or len(values) < model.n_layers or not all(
            isinstance(value, int | float) for value in values):
        raise ModelError(f"{model.path}: {model.architecture}.{key} has not a number for each of "
                         f"{model.n_layers} layers; the file is damaged, fetch it again")
    return values
