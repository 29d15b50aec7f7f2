"""The embedded pair's tokenizer: byte-level BPE with GPT-2's regular expression.

That choice makes the file self-contained in GGUF (``tokenizer.ggml.model = gpt2``, ``pre =
gpt-2``): llama.cpp splits and merges exactly as the ``tokenizers`` package does.

Does not know: models or GGUF. Token ids: 0 ends (and begins) a document, 1 and 2 frame a chat
message, 3 pads; bytes and merges follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeinfer.lab.training.pair.corpus import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

    from pipeinfer.lab.training.pair.corpus import Document

PAD = "<|pad|>"
#: Control tokens, in id order from 0.
SPECIALS = (END_OF_TEXT, IM_START, IM_END, PAD)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID, PAD_ID = range(4)

#: ChatML, the one template that every client knows.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of exactly ``vocab_size`` entries, control tokens included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        message = f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}"
        raise ValueError(f"{message}: lower vocab_size or give more text")
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def encode_documents(tokenizer: Tokenizer, documents: Iterable[Document]) -> np.ndarray:
    """One stream of ids (uint16), each document led by the end-of-text token."""
    import numpy as np

    pieces: list[np.ndarray] = [np.zeros(0, dtype=np.uint16)]
    texts = [document.text for document in documents]
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            pieces.append(np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.uint16))
    return np.concatenate(pieces)
