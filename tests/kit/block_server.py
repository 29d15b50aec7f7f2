"""llama.cpp's own driver of drafts of blocks, for comparison: xllamacpp.Server in a process.

`python -m tests.kit.block_server MODEL DRAFT KIND PLACES P_MIN` completes a prompt and logs all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PROMPT, COUNT = tuple(range(20, 45)), 24  #: its tokens, and how many follow
_CANDIDATE = re.compile(r"draft candidate\s+0, pos\s+\d+:\s+(\d+)")
_ROUND = re.compile(r"generate_draft: id=(\d+), #tokens=\d+, #draft=(\d+), pos_next=(\d+)")


class Round(NamedTuple):
    """One draft: behind which token and position; how many tokens were used, and all that the log
    names (DFlash2's are not in it)."""

    token: int
    position: int
    count: int
    tokens: list[int]


def rounds_of(model: Path, draft: Path, kind: str, places: int, p_min: float = 0.0) -> list[Round]:
    """Return the server's drafts. places: of a block that predict. p_min: least confidence."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.block_server", model, draft, kind, str(places),
         str(p_min)], capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found, tokens = [], []
    for line in (done.stdout + done.stderr).splitlines():
        if one := _CANDIDATE.search(line):
            tokens.append(int(one[1]))
        elif one := _ROUND.search(line):
            found.append(Round(int(one[1]), int(one[3]), int(one[2]), tokens))
            tokens = []
    return found


def _serve(model: str, draft: str, kind: str, places: str, p_min: str) -> None:
    import xllamacpp

    types = xllamacpp.common_speculative_type
    params = xllamacpp.CommonParams()
    params.model.path, params.speculative.draft.mparams.path = model, draft
    params.speculative.types = [types.COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK if kind == "dspark"
                                else types.COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH]
    params.speculative.draft.n_max, params.speculative.draft.p_min = int(places), float(p_min)
    params.speculative.draft.n_gpu_layers = params.n_gpu_layers = 0
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = 512, 64, 64, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = params.fit_params = False
    params.no_extra_bufts, params.verbosity, params.cache_ram_mib = True, 99, 0
    xllamacpp.Server(params).handle_completions({
        "prompt": list(PROMPT), "n_predict": COUNT, "temperature": 0,
        "cache_prompt": False, "ignore_eos": True})


if __name__ == "__main__":
    _serve(*sys.argv[1:])
