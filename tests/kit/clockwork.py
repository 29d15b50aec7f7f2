"""A model whose every token has one successor, with a head that is right if its rows are.

All matrices that would add to a token's embedding are zero, and the output matrix names each
token's successor. The head looks at nothing but its hidden row, which it turns into that of the
successor. So each of its proposals is right exactly if it was given the row of the token before.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import all_of, blocks_of, header_of
from tests.kit.random_model import finish, tiny, write_random_model

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


def text_behind(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    after, text = successors(), prompt[-1:]
    for _ in range(count):
        text.append(after[text[-1]])
    return text[1:]


def write_clockwork(path: Path, name: str, qtype: str = "Q8_0", **sizes: int) -> Path:
    """Write a model of this recipe of `random_model`, which has a head.

    qtype: of its matrices; of F32 only single rows are exact without the C part
    sizes: other ones
    """
    write_random_model(path, tiny(name, qtype=qtype, n_ff=256, n_vocab=VOCAB, n_embd=_WIDTH,
                                  **sizes))
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
            place[:] = np.frombuffer(gguf.quants.quantize(
                patches[tensor.name].astype(np.float32), tensor.type).tobytes(), np.uint8)
        elif tensor.name.endswith(_ADDS):
            place[:] = 0
    data.flush()
    return path


def write_eagle(path: Path, target: Path, taps: tuple[int, ...], seed: int = 0, *,
                own: bool = False, heads: int = 4, ff: int = 64) -> Path:
    """Write a random EAGLE-3 head for a target.

    own: with an embedding and an output matrix of its own, for half of the vocabulary
    """
    model = ModelFile(target)
    width = model.n_embd
    size, rng = width // heads, np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, value in {
            "context_length": 4096, "embedding_length": width, "block_count": 1,
            "feed_forward_length": ff, "attention.head_count": heads,
            "attention.head_count_kv": heads, "rope.dimension_count": size,
            "target_hidden_size": width, "vocab_size": model.n_vocab}.items():
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("eagle3.rope.freq_base", 10000.0)
    writer.add_array("eagle3.target_layers", list(taps))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, 3 * width), "output_norm": (width,), "blk.0.attn_norm": (width,),
        "blk.0.attn_norm_2": (width,), "blk.0.ffn_norm": (width,),
        "blk.0.attn_q": (width, 2 * width), "blk.0.attn_k": (width, 2 * width),
        "blk.0.attn_v": (width, 2 * width), "blk.0.attn_output": (width, width),
        "blk.0.ffn_gate": (ff, width), "blk.0.ffn_up": (ff, width), "blk.0.ffn_down": (width, ff)}
    if own:
        shapes |= {"token_embd": (model.n_vocab, width), "output": (model.n_vocab // 2, width)}
        writer.add_tensor("d2t", np.arange(0, model.n_vocab // 2 * 2, 2, dtype=np.int64))
    for name, shape in shapes.items():
        data = np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[1] ** -0.5, shape)
        writer.add_tensor(f"{name}.weight", data.astype(np.float32))
    finish(writer)
    return path


def write_apart(model: ModelFile, trunk: Path, head: Path) -> None:
    """Write a model's layers and its head as two files, as some publishers do."""
    entries = [model.raw_entry(key) for key in model.meta_keys()]
    parts = [all_of(one, name) for name, one in model.tensors.items()
             if one.layer is None or one.layer < model.n_layers]
    trunk.write_bytes(b"".join(blocks_of(model, header_of(entries, parts), parts)))
    parts = [all_of(one, name) for name, one in model.tensors.items()
             if one.layer is None or one.layer >= model.n_layers]
    head.write_bytes(b"".join(blocks_of(model, header_of(entries, parts), parts)))
