"""How a DFlash, DFlash2 or DSpark draft is evaluated and read: a block of tokens at once.

All three are files of the architecture `dflash`; `eagle_head` completes them. A block is one token
of the text and masks, and its places attend to each other. In DFlash each place predicts by itself.
DSpark biases it by the likeliest token of the place before, and estimates how often it is right.
DFlash2 names a few candidates of each place, with scores by the candidate before them. Reads
headers; runs nothing.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from pipeinfer.errors import ModelError
from pipeinfer.models.eagle_head import BLOCKS
from pipeinfer.models.gguf import ModelFile

MOST = 64  #: places of a block
_MASK = "tokenizer.ggml.mask_token_id"


class BlockShape(Struct, frozen=True):
    """How a block is evaluated and read.

    size: its places
    mask: id of the mask's token
    first: the first place that predicts: 0 where the token of the text does, else 1
    candidates: of each place, in a lattice (DFlash2); 0: there is none
    confident: whether places estimate how often they are right (DSpark)
    chained: whether a place's result follows the likeliest token of the place before
    causal: whether places attend to those before them alone
    """

    size: int
    mask: int
    first: int = 1
    candidates: int = 0
    confident: bool = False
    chained: bool = False
    causal: bool = False

    @classmethod
    def of(cls, draft: ModelFile, target: ModelFile) -> BlockShape:
        """Return the shape of a draft's blocks, for a target.

        Raises ModelError for values with which llama.cpp would end the process, and for kinds that
        are not supported.
        """
        if draft.arch_get("hyper_connection.count"):
            raise ModelError(f"{draft.path}: a DSpark draft with DeepSeek V4's layers is not "
                             "supported: leave it out")
        size, mask = draft.arch_get("block_size"), draft.get(_MASK, target.get(_MASK))
        if not isinstance(size, int) or not 2 <= size <= MOST:
            raise _bad(draft, f"{BLOCKS}.block_size")
        if not isinstance(mask, int) or not 0 <= mask < target.n_vocab:
            raise _bad(draft, _MASK)
        markov, lattice = (f"{name}.weight" in draft.tensors
                           for name in ("markov_w1", "selector_hidden"))
        top: Any = draft.arch_get("selector_top_k") if lattice else 0
        if lattice and (not isinstance(top, int) or not 0 < top * (top + 1) <= draft.n_embd):
            raise _bad(draft, f"{BLOCKS}.selector_top_k")
        anchored = markov and draft.arch_get("sample_from_anchor", True) is True
        return cls(size, mask, int(not anchored), top,
                   markov and "conf_proj.weight" in draft.tensors, markov or lattice,
                   draft.arch_get("attention.causal") is True)


def _bad(draft: ModelFile, key: str) -> ModelError:
    return ModelError(f"{draft.path}: has no usable {key}: convert the draft again")
