"""`pipeinfer doctor --exact`: R of a model on this host, over all layers and over its excerpt."""

from __future__ import annotations

import os
import time
from contextlib import closing

from pipeinfer.backends.exact_width import MOST_CELLS, MOST_ROWS, exact_width
from pipeinfer.backends.factory import EXACT_LIMIT, llama_options
from pipeinfer.cli.findings import Finding
from pipeinfer.config import JobConfig
from pipeinfer.errors import PipeinferError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import model_paths


def check_exact(config: JobConfig) -> list[Finding]:
    """Search R in the whole model, which takes minutes for a large one, and in its excerpt.

    A start trusts the excerpt, so one that allows more rows than the whole model is an error.
    """
    from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
    from pipeinfer.backends.llamacpp.excerpt import LoadedExcerpt

    try:
        path, _ = model_paths(config)
        model, threads = ModelFile(path), config.model.threads or len(os.sched_getaffinity(0))
        with closing(LlamaCppBackend.load(
                path, layers=(0, model.n_layers), n_layers_total=model.n_layers, first=True,
                last=True, n_ctx=MOST_CELLS, n_seq_max=3, n_batch=MOST_ROWS, n_threads=threads,
                options=llama_options(config.model))) as backend:
            begun = time.monotonic()
            whole = exact_width(backend, EXACT_LIMIT)
            took = time.monotonic() - begun
            text = f"R = {whole} over all {model.n_layers} layers ({took:.1f} s)"
            with LoadedExcerpt.opened(path, backend) as excerpt:
                if excerpt is None:
                    return [Finding("ok", "exact", f"{text}; a start of this architecture measures "
                                    "all layers, too")]
                begun = time.monotonic()
                found = excerpt.width(EXACT_LIMIT, None)
                text += f", {found} over the excerpt ({time.monotonic() - begun:.1f} s)"
    except PipeinferError as error:
        return [Finding("fail", "exact", str(error))]
    if found <= whole:
        return [Finding("ok", "exact", text)]
    return [Finding("fail", "exact", text, "report this model and processor; until then start with "
                    "--policy iterative, or --exact off for tokens up to near-ties")]
