"""Lookahead parallelism (arXiv 2402.02057, section 3.4) over ranks that each hold the whole model.

    mpirun -np 4 python -m benchmarks.methods.replicas --texts 3 -n 96 -w 15 -g 15

Each rank verifies a share of the candidates and continues a share of the window's columns. Only
token ids travel, once per step: those that a rank accepted, and its columns' new tokens. A rank
computes accepted tokens that another one had verified with its next step. Pool and window are equal
everywhere, so tokens, steps and windows do not depend on the number of ranks.

The seconds are virtual: an A100 with the 13.5 GB of a 7 B model at 16 bits, at 0.8 of its bandwidth
and half of its arithmetic, as in `lookahead-sizes`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
from mpi4py import MPI

from benchmarks.methods.heldout import prompts
from pipeinfer.backends.base import Backend
from pipeinfer.backends.llamacpp.backend import LlamaCppBackend
from pipeinfer.core.sampling import choose, noise_key
from pipeinfer.core.types import SamplingParams, make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.locate import EMBEDDED, open_tokenizer
from pipeinfer.strategies.proposers.base import Anchor
from pipeinfer.strategies.proposers.lookahead import Pool, Window, trie

_IDS, _END = 200, 1 << 30
EXCHANGE = 20e-6  #: seconds of a step's exchange, assumed


def seconds_of(rows: int) -> float:
    """Return the virtual time of a step: weights from memory, or the arithmetic of all rows."""
    return 400e-6 + max(13.48e9 / (0.8 * 2039e9), rows * 2 * 6.74e9 / (0.5 * 312e12))


class Replica:
    """One rank's side of a request; `part` of `parts`. width: rows of an exact run."""

    def __init__(self, backend: Backend, part: tuple[int, int], window: Window, pool: Pool,
                 params: SamplingParams, width: int) -> None:
        self._backend, self._part, self._window, self._pool = backend, part, window, pool
        self._params, self._width, self.cached = params, width, 0

    def evaluate(self, nodes: Sequence[tuple[int, int]], first: int) -> list[int]:
        """Return the choice after each node (parent, token) of a tree below the cached tokens.

        Each leaf has a sequence id, and a node those of all leaves below it.
        """
        places, below = [], [set[int]() for _ in nodes]
        leaves = sorted(set(range(len(nodes))) - {parent for parent, _ in nodes})
        for parent, _ in nodes:
            places.append(first if parent < 0 else places[parent] + 1)
        for number, leaf in enumerate(leaves, 1):
            self._backend.seq_cp(0, number, 0, first)
            while leaf >= 0:
                below[leaf].add(number)
                leaf = nodes[leaf][0]
        rows = [(token, places[k], tuple(sorted(below[k])), True)
                for k, (_, token) in enumerate(nodes)]
        logits = np.concatenate([np.array(self._backend.decode(make_rows(
            rows[start : start + self._width]))) for start in range(0, len(rows), self._width)])
        self._ids = [min(one) for one in below]
        return [choose(row, self._params, np.zeros(0, np.int32), places[k]).token
                for k, row in enumerate(logits)]

    def step(self, tokens: Sequence[int], comm: MPI.Comm) -> tuple[list[int], int]:
        """Return the next accepted tokens, and the most rows that a rank had."""
        (rank, parts), first = self._part, self.cached
        late = [(k - 1, token) for k, token in enumerate(tokens[first:])]
        tip, count = len(late) - 1, self._window.columns
        own = trie(self._pool.of(tokens[-1])[rank::parts], _END)
        anchors = [Anchor(-1, tokens[-1]), *(Anchor(one.parent + 1, one.token) for one in own)]
        columns = range(count * rank // parts, count * (rank + 1) // parts)
        hints, tops = self._window.rows(anchors, columns) if columns else ([], [])
        nodes = late + [(one.parent + tip, one.token) for one in (*anchors[1:], *hints)]
        chosen = self.evaluate(nodes, first)
        children = {(one.parent, one.token): k for k, one in enumerate(anchors) if k}
        path, node = [], 0
        while node is not None:
            path.append(chosen[tip + node])
            node = children.get((node, path[-1]))
        mine = [len(nodes), len(path), *path, len(tops), *(chosen[tip + top] for top in tops)]
        shared = np.zeros((parts, 3 + self._pool.size + count), np.int32)
        comm.Allgather(np.resize(mine + [0] * shared.shape[1], shared.shape[1]).astype(np.int32),
                       shared)
        paths = [one[2 : 2 + one[1]] for one in shared.tolist()]
        new = [token for one in shared.tolist() for token in one[3 + one[1] :][: one[2 + one[1]]]]
        for ngram in self._window.step(tokens[-1], new):
            self._pool.add(ngram, made=True)
        self._keep(nodes, tip, max(paths, key=len), first)
        return max(paths, key=len), int(shared[:, 0].max())

    def _keep(self, nodes: Sequence[tuple[int, int]], tip: int, accepted: Sequence[int],
              first: int) -> None:
        """Leave the cells of accepted tokens that were evaluated here, under id 0 alone."""
        last = tip
        for token in accepted[:-1]:  # the last one begins the next step
            found = [k for k, one in enumerate(nodes) if one == (last, token)]
            if not found:
                break
            last, tip = found[0], tip + 1
        self.cached = first + tip + 1
        self._backend.seq_cp(self._ids[last], 0, first, self.cached)
        for number in range(1, _IDS):
            self._backend.seq_rm(number, 0, _END)


def decode(backend: Backend, comm: MPI.Comm, prompt: Sequence[int], count: int,
           sizes: Sequence[int], params: SamplingParams, width: int) -> dict[str, Any]:
    """Return `count` tokens after a prompt, with steps, rows and virtual seconds."""
    columns, size, most = sizes
    pool, tokens = Pool(size, most), list(prompt)
    backend.seq_rm(0, 0, _END)
    pool.add_all(tokens)
    one = Replica(backend, (comm.rank, comm.size), Window.start(columns, size, tokens), pool,
                  params, width)
    for start in range(0, len(prompt) - 1, 64):  # the last token begins the first step
        chunk = prompt[start : min(start + 64, len(prompt) - 1)]
        backend.decode(make_rows([(t, start + k, (0,), False) for k, t in enumerate(chunk)]))
    one.cached = len(prompt) - 1
    steps, rows, seconds = 0, 0, 0.0
    while len(tokens) < len(prompt) + count:
        accepted, most_rows = one.step(tokens, comm)
        start, steps, rows = len(tokens), steps + 1, rows + most_rows
        tokens += accepted
        pool.add_all(tokens, start)
        seconds += seconds_of(most_rows) + EXCHANGE * (comm.size > 1)
    return {"tokens": tokens[len(prompt) :], "steps": steps, "rows": rows, "seconds": seconds}


@click.command()
@click.option("-m", "--model", default=str(EMBEDDED / "target.gguf"))
@click.option("--texts", default=1, help="Held-out files, of which 200 tokens are the prompt.")
@click.option("-n", "--count", default=64)
@click.option("-w", "--window", default=15)
@click.option("--ngram", default=5)
@click.option("-g", "--candidates", default=15)
@click.option("--temp", default=0.0)
@click.option("--seed", default=1)
@click.option("--width", default=16, help="Rows of a run with the bits of single rows (R).")
def main(model: str, texts: int, count: int, window: int, ngram: int, candidates: int, temp: float,
         seed: int, width: int) -> None:
    """Go on with texts over all ranks; rank 0 prints JSON, speeds in tokens/s of virtual time."""
    layers, comm = ModelFile(model).n_layers, MPI.COMM_WORLD
    backend = LlamaCppBackend.load(
        model, layers=(0, layers), n_layers_total=layers, first=True, last=True, n_ctx=4096,
        n_seq_max=_IDS, n_batch=64, n_threads=1)
    found = [decode(backend, comm, prompt, count, (window, ngram, candidates),
                    SamplingParams(temp, key=noise_key(seed)), width)
             for prompt in prompts(open_tokenizer(model), texts, 200)]
    made, steps, rows, seconds = (sum(one) for one in zip(*(
        (len(one["tokens"]), one["steps"], one["rows"], one["seconds"]) for one in found),
        strict=True))
    if not comm.rank:
        print(json.dumps({"tokens": [one["tokens"] for one in found], "ranks": comm.size,
                          "per_step": made / steps, "rows": rows / steps, "steps": steps,
                          "speed": made / seconds, "plain": 1 / seconds_of(1)}))


if __name__ == "__main__":
    main()
