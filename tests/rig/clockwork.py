"""A model whose every token has one successor, with a head that is right if its rows are.

All matrices that would add to a token's embedding are zero, and the output matrix names each
token's successor. The head looks at nothing but its hidden row, which it turns into that of the
successor. So each of its proposals is right exactly if it was given the row of the token before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.lab.random_model import tiny, write_random_model
from pipeinfer.models.gguf import ModelFile

VOCAB = 300
_WIDTH = 512  #: no less than tokens, so that their rows are orthogonal
_ADDS = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight",
         "ssm_out.weight")


def successors(seed: int = 0) -> list[int]:
    """Return each token's successor: one circle through all tokens that are bytes or plain."""
    order = np.random.default_rng(seed).permutation(VOCAB)
    found = np.empty(VOCAB, int)
    found[order] = np.roll(order, -1)
    return [int(one) for one in found]


def write_clockwork(path: Path, name: str) -> Path:
    """Write a model of this recipe of `random_model`, which has a head."""
    write_random_model(path, tiny(name, qtype="F32", n_ff=256, n_vocab=VOCAB, n_embd=_WIDTH))
    model, after = ModelFile(path), successors()
    rng = np.random.default_rng(1)
    width = model.n_embd
    rows = np.linalg.qr(rng.standard_normal((width, width)))[0][:VOCAB].astype(np.float32)
    named = np.zeros_like(rows)
    for token, following in enumerate(after):
        named[following] = rows[token]
    turn = sum(np.outer(rows[after[token]], rows[token]) for token in range(VOCAB))
    head = f"blk.{model.n_layers}."
    patches: dict[str, FloatArray] = {
        "token_embd.weight": rows, "output.weight": 8 * named,
        "output_norm.weight": np.ones(width, np.float32),
        f"{head}nextn.hnorm.weight": np.ones(width, np.float32),
        f"{head}nextn.shared_head_norm.weight": np.ones(width, np.float32),
        f"{head}nextn.eh_proj.weight": np.concatenate(
            [np.zeros((width, width)), turn], axis=1).astype(np.float32)}
    data = np.memmap(path, np.uint8, "r+")
    for tensor in model.tensors.values():
        place = data[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.name in patches:
            place[:] = np.frombuffer(patches[tensor.name].astype(np.float32).tobytes(), np.uint8)
        elif tensor.name.endswith(_ADDS):
            place[:] = 0
    data.flush()
    return path
