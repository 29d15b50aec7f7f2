"""Threads on the torch backend: tokens of a real model, against the whole graph recomputed.

The reference decodes thread after thread and runs transformers' own forward pass over all rows with
the mask written out, for every single token.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from pipeinfer.backends.base import apply
from pipeinfer.core.messages import CacheOps, Decode
from pipeinfer.core.policy import Policy
from pipeinfer.core.sampling import candidates, thread_key
from pipeinfer.core.types import Choice, Request, SamplingParams
from pipeinfer.scheduler.events import Enqueue, RunDone
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.pasta import Pasta, Positions, Spacing
from pipeinfer.strategies.decomposers.pdos import Pdos
from tests.kit.sample import matrix
from tests.kit.threaded import EOS, ThreadedPipeline, Words, reference
from tests.kit.tiny_torch import LAYERS, VOCAB, load, masked_forward, save
from tests.kit.tiny_torch import reference as tiny_model
from tests.scheduler.test_lanes import check_at_rest
from tests.scheduler.test_response_threads import APAR, PASTA, PDOS

N_CTX, MOST = 300, 48
METHODS = {
    "pasta": (PASTA, lambda v, n: Pasta(v, start=n, room=N_CTX)),
    "pasta-fixed": (PASTA, lambda v, n: Pasta(v, start=n, room=N_CTX,
                                              spacing=Spacing(Positions.FIXED, 3))),
    "pdos": (PDOS, lambda v, n: Pdos(v, n_prompt=n)),
    "apar": (APAR, lambda v, n: Apar(v, n_prompt=n)),
}


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    made = tiny_model(request.param)
    return made, save(made, tmp_path_factory.mktemp("threads") / "m")


def words_of(words):
    """The vocabulary padded to the model's."""
    return Words([*words.texts, *(b"~" for _ in range(VOCAB - len(words.texts)))], [])


def params_of(words, seed):
    """Sampling that makes tags frequent and never leaves the vocabulary."""
    texts = words.texts
    bias = [(t, 3.0 * np.log(w)) for t, w in enumerate(words.weights)]
    return SamplingParams(temperature=2.0, key=seed,
                          logit_bias=(*bias, *((t, -1e9) for t in range(len(texts), VOCAB))))


class TorchPipeline(ThreadedPipeline):
    """Stages that hold layers of a real model, one step at a time in any order."""

    def __init__(self, limits, words, path, cuts, **options):
        super().__init__(limits, words, n_stages=len(cuts) - 1, **options)
        self.backends = [load(path, (a, b), n_ctx=512, n_seq_max=limits.n_ids)
                         for a, b in itertools.pairwise(cuts)]
        self.hidden = {}

    def _run_stage(self, index):
        stage, backend = self.stages[index], self.backends[index]
        item, skipped = stage.queue.popleft()
        last = index == len(self.stages) - 1
        if isinstance(item, CacheOps | Decode):
            for op in item.ops:
                apply(backend, op)
        choices = []
        if isinstance(item, Decode):
            skipped = skipped or item.run_id in stage.cancelled or item.parent_id in stage.skipped
            if skipped:
                stage.skipped.add(item.run_id)
            else:
                result = backend.decode(item.rows, self.hidden.pop(item.run_id, None))
                if last:
                    choices = self._choose(item, result)
                else:
                    self.hidden[item.run_id] = result
        if not last:
            self.stages[index + 1].queue.append((item, skipped))
        elif isinstance(item, Decode):
            self.results.append(RunDone(item.run_id, None if skipped else tuple(choices)))

    def _choose(self, item, logits):
        rows = np.flatnonzero(item.rows.outputs)
        return [Choice(choice(values, self.params[item.lanes[row]], int(item.rows.tokens[row]),
                              int(item.rows.positions[row])))
                for row, values in zip(rows, logits, strict=True)]


def choice(logits, params, last, pos):
    return candidates(logits, params, np.array([last]), pos).best()


@pytest.mark.parametrize(("model", "method"), matrix(["llama", "qwen3", "gemma"], METHODS),
                         indirect=["model"])
def test_threads_of_a_real_model_equal_the_masked_reference(model, method):
    tiny, path = model
    words, make = METHODS[method]
    padded, forks = words_of(words), 0
    cuts = [[0, LAYERS], [0, 1, LAYERS], [0, 1, 3, LAYERS], [0, 1, 2, 3, LAYERS]]
    for seed in range(4):
        prompt = tuple(8 + (seed * 5 + k * k) % 3 for k in range(4 + seed))
        params = params_of(words, 1000 + seed)

        def by_model(graph, row, thread, bans, params=params):
            n = row + 1
            seen = np.zeros((n, n), bool)
            for i, cells in enumerate(graph.seen[:n]):
                seen[i, cells] = True
            logits = masked_forward(tiny, graph.tokens[:n], graph.positions[:n], seen)[-1]
            own = SamplingParams(temperature=params.temperature, logit_bias=params.logit_bias,
                                 key=thread_key(params.key, thread), bans=bans)
            return choice(logits, own, graph.tokens[row], graph.positions[row])

        decomposer = functools.partial(make, padded.vocabulary(), len(prompt))
        chosen, text, _ = reference(padded, prompt, decomposer(), MOST, N_CTX, by_model)
        forks += len(chosen) - 1
        limits = Limits(n_ctx=N_CTX, exact_width=8, credit=5, threads=4, partitions=8,
                        policy=Policy.PIPEINFER if seed % 2 else Policy.ITERATIVE)
        pipeline = TorchPipeline(limits, padded, path, cuts[seed], seed=seed, accuracy=0.5)
        pipeline.output[0] = []
        pipeline.feed(Enqueue(Request(0, prompt, MOST, params, eos_ids=frozenset({EOS})),
                             decompose=decomposer))
        pipeline.drain()
        assert pipeline.text == text
        for emit in pipeline.emitted:
            assert emit.choice.token in chosen[emit.thread]
        check_at_rest(pipeline)
        assert not any(backend.cells() for backend in pipeline.backends)
    assert forks
