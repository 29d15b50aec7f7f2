"""llama.cpp backends as tests load them: small, in one thread, of a file or a shard."""

from __future__ import annotations

import os
from typing import Any

from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.backends.llamacpp.context import LlamaOptions
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.shard import ShardSource
from tests.kit.checked import CheckedLlama

_SIZES: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 4, "n_batch": 64, "n_threads": 1}


def load(source: str | os.PathLike[str] | ShardSource, layers: tuple[int, int] | None = None,
         total: int = 0, *, kind: type[LlamaCppBackend] = CheckedLlama, **given: Any) -> Any:
    """Return a backend over layers of a model.

    source: the file with these layers
    layers: None for all of a whole file
    total: of the model; 0: the last one of these is the model's
    given: sizes and other arguments of `kind.load`; what else there is are fields of `LlamaOptions`
    """
    start, stop = layers or (0, ModelFile(source).n_layers)
    total = total or stop
    own = {"first": start == 0, "last": stop == total, **_SIZES}
    own |= {name: given.pop(name) for name in (*own, "options", "progress") if name in given}
    own.setdefault("options", LlamaOptions(**given))
    return kind.load(source, layers=(start, stop), n_layers_total=total, **own)
