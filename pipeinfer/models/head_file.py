"""The file of a model's own head for further tokens (MTP), cut out of the model's file.

A head is the layers behind those that choose tokens, with the embedding, the last norm and the
output matrix. llama.cpp loads a file of these alone. Some publishers provide it as a file beside
the model, `mtp-*.gguf`. Reads headers; runs nothing.
"""

from __future__ import annotations

from pathlib import Path

from pipeinfer.errors import ModelError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.gguf_parts import all_of, header_of, text_entry, total_bytes, uint_entry
from pipeinfer.models.hub_files import EAGLE_FILE, MTP_FILE
from pipeinfer.models.shard import ShardSource

#: architectures whose head was shown to give llama.cpp's own proposals
WITH_HEAD = ("deepseek2", "glm4moe", "qwen35", "qwen35moe")
_ASSISTANT = "gemma4-assistant"
_PROJECTION = "nextn.eh_proj.weight"


def has_head(model: ModelFile) -> bool:
    """Return whether a file has a head for further tokens, alone or behind its layers."""
    return any(f"blk.{layer}.{_PROJECTION}" in model.tensors
               for layer in range(model.n_layers, model.n_layers_all))


def check_whole(model: ModelFile) -> None:
    """Raise ModelError for a file that has a head and no layers that choose tokens."""
    if model.architecture == _ASSISTANT:
        raise ModelError(f"{model.path}: this assistant reads the KV cache of Gemma 4's last "
                         "layers, which a rank that drafts does not have: leave it out; prompt "
                         "lookup or a draft model guesses instead")
    if has_head(model) and not any(one.layer == 0 for one in model.tensors.values()):
        raise ModelError(f"{model.path}: has only a prediction head (MTP): give the model that it "
                         "belongs to, and leave this file beside it")


def head_of(model: ModelFile) -> ModelFile | None:
    """Return the file that has a model's head: its own, or one beside it; None without one.

    Only heads of known architectures with one layer are returned.
    """
    if not isinstance(model, ModelFile) or model.architecture not in WITH_HEAD:
        return None
    beside = () if has_head(model) else sorted(
        model.path.parent.glob(f"{MTP_FILE}*.gguf"))
    for one in (model, *map(_opened, beside)):
        if one is not None and has_head(one) and _belongs(one, model) \
                and one.n_layers_all - one.n_layers == 1:
            return one
    return None


def wanted_beside(path: Path) -> tuple[str, ...]:
    """Return how the names of heads start that a model's file lacks and can be used with."""
    model = _opened(path)
    if model is None or has_head(model):
        return ()
    return (MTP_FILE, EAGLE_FILE) if model.architecture in WITH_HEAD else (EAGLE_FILE,)


def _opened(path: Path) -> ModelFile | None:
    try:
        return ModelFile(path)
    except ModelError:
        return None


def _belongs(head: ModelFile, model: ModelFile) -> bool:
    """Whether a head has the sizes of a model. One of another training only guesses badly."""
    return (head.architecture, head.n_layers, head.n_embd, head.n_vocab) == (
        model.architecture, model.n_layers, model.n_embd, model.n_vocab)


class HeadSource(ShardSource):
    """The bytes of a head's file. Raises ModelError for a file without a head."""

    def __init__(self, model: ModelFile) -> None:
        if not has_head(model):
            raise ModelError(f"{model.path}: has no head for further tokens (no {_PROJECTION})")
        parts = [all_of(tensor, name) for name, tensor in model.tensors.items()
                 if tensor.layer is None or tensor.layer >= model.n_layers]
        kept = [model.raw_entry(key) for key in model.meta_keys()
                if not key.startswith(("tokenizer.", "split.", "general.alignment"))
                and key != f"{model.architecture}.vocab_size"]
        self.header = header_of([
            *kept, uint_entry(f"{model.architecture}.vocab_size", model.n_vocab),
            text_entry("tokenizer.ggml.model", "none")], parts)
        self.model, self.layers = model, (0, model.n_layers)
        self._parts = parts
        self.total = total_bytes(self.header, parts)
        self.name = f"{model.fingerprint[:32]}-head.gguf"
