"""How often a draft is evaluated per token that it names, token by token and by lookahead.

    python -m benchmarks.methods.draft_lookahead --draft MODEL --prompt TEXT --raw FILE

The draft continues a text by chains of eight tokens, as if the target agreed. Tokens of runs wider
than 16 rows may leave those of narrow ones in near-ties; proposals need not be exact.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import raw_files
from pipeinfer.backends.base import Backend
from pipeinfer.cluster.draft_ranks import cache_sizes, load_draft
from pipeinfer.core.drafting import Prefix, StartDraft
from pipeinfer.core.types import SamplingParams
from pipeinfer.host import Place
from pipeinfer.llama.library import ensure_llama
from pipeinfer.models.locate import find, open_model, open_tokenizer
from pipeinfer.strategies import registry
from pipeinfer.strategies.proposers.draft_lookahead import SPEC, DraftLookahead
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.strategies.proposers.lookahead import Lookahead

SIZES: Mapping[str, tuple[int, int, int] | None] = {
    "token by token": None, "W 0, N 5, G 2": (0, 5, 2), "W 2, N 5, G 2": (2, 5, 2),
    "W 5, N 5, G 3": (5, 5, 3)}
TOKENS, CHAIN = 160, 8


def follow(draft: DraftModel, tokens: Sequence[int]) -> dict[str, float]:
    """Name `TOKENS` tokens; counts and seconds per token, without the prompt's."""
    accepted, count, named, began = list(tokens), 0, -CHAIN, 0.0
    while named < TOKENS:
        steps = draft.steps(StartDraft(1, 0, Prefix(accepted), len(accepted), (), SamplingParams(),
                                       CHAIN, CHAIN, 1, 0.0, 1.0, frozenset()))
        while True:
            try:
                next(steps)
                count += 1
            except StopIteration as end:
                accepted += [one.token for one in end.value]
                named += len(end.value)
                break
        if not began:
            began, count, draft.rows_evaluated = time.perf_counter(), 0, 0
    return {"evaluations": count / named, "rows": draft.rows_evaluated / named,
            "ms": 1e3 * (time.perf_counter() - began) / named}


def rows_of(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """A row for each size, with three columns for each draft."""
    return [[size, *(text for sizes in found.values() for text in (
        f"{sizes[size]['evaluations']:.2f}", f"{sizes[size]['rows']:.1f}",
        f"{sizes[size]['ms']:.2f}"))] for size in SIZES]


def main() -> None:
    """Add a draft's figures to the raw file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--raw", type=Path, required=True)
    given = parser.parse_args()
    path = find(given.draft, offline=True).path
    config = registry.job_config(model=str(path), lookahead_window=5, lookahead_candidates=3)
    ensure_llama("")
    model, tokenizer = open_model(path), open_tokenizer(path)
    tokens = tokenizer.encode(given.prompt)
    tokenizer.close()
    found: dict[str, Any] = {}
    for size, sizes in SIZES.items():
        backend: Backend = load_draft(config, Place(0, 1, None, 2, 0, 1), path, (0, model.n_layers),
                                      cache_sizes(config, 2048, model, SPEC))[0]
        draft = DraftModel(backend, paths=8) if sizes is None else DraftLookahead(
            backend, Lookahead(*sizes), paths=8)
        found[size] = follow(draft, tokens)
        draft.close()
    raw = raw_files.read(given.raw) if given.raw.exists() else {}
    raw[given.name] = found
    raw_files.write(given.raw, raw)
    for row in rows_of(raw):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
