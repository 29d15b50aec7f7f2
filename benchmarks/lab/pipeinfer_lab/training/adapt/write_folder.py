"""Writes a merged model as a Hugging Face folder. Knows files; no training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeinfer.errors import UnsupportedArchitecture, UsageError
from pipeinfer.models.hf_folder import ModelDir
from pipeinfer_lab.training.adapt.gguf_tokenizer import tokenizer_files
from pipeinfer_lab.training.adapt.lora import NewTokens, write_text
from pipeinfer_lab.training.adapt.merged import Merged

_KEPT = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
         "generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt", "LICENSE")
_LARGEST = 4 << 30  #: bytes of one weight file


def write_folder(out: Path, merged: Merged, dtype: Any = None) -> None:
    """Write a model folder; config.json comes last, so a folder that has one is complete.

    dtype: of the weights (None: the folder's own, float32 for what GGUF held). Raises
    UnsupportedArchitecture for a GGUF file that no folder can tell exactly.
    """
    if out.exists() and merged.path.resolve() == out.resolve():
        raise UsageError(f"--out {out} is the model itself: give another folder")
    config, files = _config(merged), _files(merged)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    _write_weights(out, merged, dtype)
    for name, content in files.items():
        (out / name).write_text(content, encoding="utf-8")
    if isinstance(merged.model, ModelDir):
        for name in _KEPT:
            if name not in files and (merged.path / name).is_file():
                shutil.copyfile(merged.path / name, out / name)
    write_text(out / "config.json", json.dumps(config, indent=1, ensure_ascii=False))


def _config(merged: Merged) -> dict[str, Any]:
    if isinstance(merged.model, ModelDir):
        config = dict(merged.model.config)
    else:
        if "rope_freqs.weight" in merged.model.tensors:
            raise UnsupportedArchitecture(f"{merged.path}: its rotations are scaled by frequency, "
                                          "which a folder says otherwise; give the original folder")
        config = merged.config.to_dict()
        config["architectures"] = [f"{type(merged.config).__name__.removesuffix('Config')}"
                                   "ForCausalLM"]
        for name in ("bos", "eos"):
            config[f"{name}_token_id"] = merged.model.get(f"tokenizer.ggml.{name}_token_id")
    config.pop("_attn_implementation", None)
    return config | {"vocab_size": merged.n_vocab, "tie_word_embeddings": merged.tied}


def _files(merged: Merged) -> dict[str, str]:
    """Texts of the tokenizer's files, as far as they are not just copied."""
    if not isinstance(merged.model, ModelDir):
        files = tokenizer_files(merged.path)
    elif merged.tokens is not None:
        files = {"tokenizer.json": (merged.path / "tokenizer.json").read_text(encoding="utf-8")}
    else:
        return {}
    if merged.tokens is not None:
        files["tokenizer.json"] = _grown(files["tokenizer.json"], merged.tokens)
    return files


def _grown(text: str, tokens: NewTokens) -> str:
    data = json.loads(text)
    data["added_tokens"] = [*(data.get("added_tokens") or ()), *(
        {"id": tokens.first + k, "content": tag, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": False}
        for k, tag in enumerate(tokens.texts))]
    return json.dumps(data, ensure_ascii=False)


def _write_weights(out: Path, merged: Merged, dtype: Any) -> None:
    """One file, or several with an index; what an earlier model left is taken away."""
    for old in (*out.glob("model*.safetensors"), out / "model.safetensors.index.json"):
        old.unlink(missing_ok=True)
    types = {"F16": torch.float16, "BF16": torch.bfloat16}
    held: dict[str, torch.Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        nonlocal held, size
        path = out / f"part-{len(files) + 1}.safetensors"
        save_file(held, path, {"format": "pt"})
        path.chmod(0o644)  # the library leaves files to their owner alone
        files.append((path, list(held)))
        held, size = {}, 0

    for name, tensor in merged.tensors():
        kind = dtype
        if kind is None and isinstance(merged.model, ModelDir):
            kind = types.get(merged.model.tensors[name].dtype)
        stored = tensor.to(kind or torch.float32).contiguous()
        if not bool(torch.isfinite(stored).all()):
            wider = "" if stored.dtype == torch.float32 else ": give --dtype float32"
            raise UsageError(f"{name} has values that {stored.dtype} cannot hold{wider}")
        if held and size + stored.nbytes > _LARGEST:
            flush()
        held[name] = stored
        size += stored.nbytes
        total += stored.nbytes
    flush()
    if len(files) == 1:
        files[0][0].rename(out / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (path, names) in enumerate(files, 1):
        named = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(out / named)
        where |= dict.fromkeys(names, named)
    write_text(out / "model.safetensors.index.json", json.dumps(
        {"metadata": {"total_size": total}, "weight_map": where}, indent=1))
