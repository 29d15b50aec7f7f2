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
    """How an architecture is cut into ranges of layers."""

    #: every so-manyth layer has no sliding window, where the file does not list them; 0: layers
    #: have none. Negative: the first of so many has none, and a stage has to begin with such a one
    period: int = 0
    #: there are no windows if the file has no size for them; otherwise llama.cpp has a default size
    plain: bool = False
    #: layers are computed alike although the file may have a size for windows
    no_windows: bool = False
    step: int = 1  #: a stage begins at a multiple of this many layers
    begins: str = ""  #: metadata with one value per layer; a stage begins where it is not 0
    #: metadata with one value per layer, and a value: a stage has a layer with it, and begins
    #: behind such a one. llama.cpp ends the process for a cache without layers
    ends: tuple[str, int] = ("", 0)
    head: bool = False  #: the file always has an output matrix of its own
    always: str = "attn_norm"  #: a matrix or norm that every layer has
    norm: str = "output_norm"  #: the norm behind the last layer
    least: int = 1  #: layers that a header has to announce at least
    #: a stage has to begin with a layer with a window, and to have layers with and without
    #: (both_kinds). llama.cpp ends the process where a graph reads an input nowhere
    window_first: bool = False
    both_kinds: bool = False
    far_only: tuple[str, ...] = ()  #: tensors outside layers that only layers without windows read
    #: why this model cannot be cut although its architecture can; "" if it can
    refuses: Callable[[ModelFile], str] = lambda _: ""
    #: whether llama.cpp would take so many of its layers for a model of another kind
    mistaken: Callable[[ModelFile, int], bool] = lambda _, __: False
    #: further metadata of every part, which llama.cpp would derive from the whole model
    writes: Callable[[ModelFile], Mapping[str, int | float]] = lambda _: {}


class Torch(Struct, frozen=True):
    """How the torch backend takes an architecture."""

    #: model types of Hugging Face folders that tests compare with transformers' own pass
    types: tuple[str, ...]
    gguf: bool = True  #: GGUF files of the architecture can be read, too
    norm_offset: float = 0.0  #: what the converter has added to weights of norms
    #: parts of a layer whose names in a GGUF file differ from the usual ones
    names: Mapping[str, str] = {}
    #: further arguments for transformers' config, by the model and a function that returns a number
    #: of its metadata (key, default)
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
    """The declaration of an architecture, or of several that differ in nothing here."""

    names: tuple[str, ...]  #: as in `general.architecture`
    cut: Cut = Cut()
    splits: bool = True  #: it can be cut, which tests/backends/test_split_parity.py shows
    unsplit: str = ""  #: why it cannot, where that is known

    # --- layers
    #: one of so many has attention and the others a state, where the file does not list them
    interval: int = 0
    state_and_cache: bool = False  #: every layer has a state and attention
    parted: bool = False  #: a layer is a state, attention or a feed forward alone
    state_bytes: Callable[[Any], float] = scan_bytes  #: of a layer's state of one sequence
    latent: bool = False  #: all heads read one compressed cache
    copied_whole: bool = False  #: llama.cpp copies its sequences as a whole alone
    #: it computes the tokens of plain decoding only while there is one sequence
    one_sequence: bool = False
    #: bytes of a layer's cache of one sequence, where each has one for itself, by the model, the
    #: layer, the cells and the bytes of an element
    cell_bytes: Callable[[Any, int, int, int], float] | None = None
    #: layers with a sliding window have other heads than the rest, and the last ones may read the
    #: cache of others
    varied_heads: bool = False
    scaled: bool = False  #: tokens' rows are multiplied by the root of their size
    embedding_scale: float = 0.0  #: or by this, where the file has no factor

    # --- checks before loading (`llama_rules`)
    checked: bool = True  #: they cover the graph wholly
    partly_rotated: bool = False  #: heads may be rotated in part
    unequal_heads: bool = False  #: heads of values may have another size than those of keys
    fills_width: bool = False  #: heads have to add up to the model's width
    chunked: bool = False  #: a window of 0 ends the process
    headless: bool = False  #: there are no attention heads

    # --- slices
    sliced: bool = False  #: layers can be sliced
    unsliced: str = ""  #: why not
    #: the architecture of slices where llama.cpp requires a model's heads to add up to its width:
    #: one whose graph is the same (tests/models/test_slices.py shows equal bits) and whose heads
    #: may have any size
    slices_as: str = ""
    renamed: Mapping[str, str] = {}  #: new names of tensors there
    two_in_one: bool = False  #: ffn_up has the rows of the gate before its own
    #: the part of a layer with a state that can be sliced: a delta net (grouped: with the value
    #: heads of a key head one after another), or a scan
    state: Literal["", "delta", "grouped", "scan"] = ""
    shared_tied: bool = False  #: the shared expert has so many columns for each of an expert's
    #: the end of the name of the tensor with the weights of drawn experts, where these are the
    #: softmax of their products alone: "norm" where llama.cpp divides by their sum, "softmax" where
    #: it computes it last
    drawn: Literal["", "norm", "softmax"] = ""

    # --- llama.cpp's graph
    layer_inputs: bool = False  #: it names the inputs of layers; for others it ends the process
    final_rows: bool = False  #: it names what the output matrix reads; likewise
    #: where hidden rows are put into graphs that do not take them as embedding rows: glm4's end the
    #: process, gemma2's scale them as they scale tokens
    entry: str = ""
    output: str = "l_out-%d"  #: the name of the last layer's output, with "%d" for its number
    older_output: str = ""  #: in the library that --native compiles
    #: the node behind which nodes read the entry as the embeddings of tokens, which cross a cut
    #: beside the hidden rows then
    reads_again: str = ""
    sections: bool = False  #: positions have four sections
    #: how many rows of the model's width cross a cut for each token, by a function that returns
    #: metadata
    row_parts: Callable[[Callable[[str], Any]], int] = lambda _: 1

    mtp: bool = False  #: its prediction head was shown to give llama.cpp's own proposals
    assistant: bool = False  #: it reads the caches of another model
    paired: bool = False  #: rotated elements are neighbours in the file
    with_gaps: str = ""  #: what its layers are written as where positions have gaps (`gaps`)
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
