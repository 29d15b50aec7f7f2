"""Answers of forty items by every method: nothing is lost, however few threads are at work."""

from __future__ import annotations

import functools

import pytest

from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import Enqueue
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.base import MAIN
from pipeinfer.strategies.decomposers.pasta import Pasta
from pipeinfer.strategies.decomposers.pdos import Pdos
from pipeinfer.strategies.decomposers.skeleton import Prompts, Skeleton
from tests.kit.threaded import EOS, ThreadedPipeline, Words, reference
from tests.scheduler.test_lanes import check_at_rest

COUNT, MOST, N_CTX = 40, 3000, 4000
PROMPT = (5, 6, 5)
#: the main thread's marks have no weight: it writes them by a script, and nobody else does
PASTA = Words([b"", b'<promise topic="p" tokens=1/>', b"<sync/>", b"<async>", b"</async>", b"a",
               b"b", b"c"], [1, 0, 0, 0, 3, 4, 4, 4])
PDOS = Words([b"", b"####", b"%%%%", b"......", b"...", b"a", b"b", b"\n\n", b":", b":\n",
              *(b"t%d" % k for k in range(COUNT))], [2, 0, 0, 0, 0, 5, 5, *[0] * (3 + COUNT)])
APAR = Words([b"", b"[Fork]", b"[Child]", b"c", b"\n", b"a", b"b"], [3, 0, 0, 4, 0, 5, 5])
SOT = Words([b"", *(b"%d. p\n" % k for k in range(1, COUNT + 1)), b"d", b"e"],
            [3, *[0] * COUNT, 6, 6])
SCRIPTS = {
    "pasta": [1] * COUNT + [2],
    "pasta-ordered": [1] * COUNT + [2],
    "pasta-endless": [1] * COUNT + [2, EOS],
    "pasta-twice": [1, 1, 1, 2, *[1] * (COUNT - 3), 2],
    "pdos": [1, *(token for k in range(COUNT) for token in (10 + k, 8)), 2],
    "apar": [4, 1] * COUNT,
    "skeleton": [*range(1, COUNT + 1), EOS],
}
#: nothing but the interpreter ends its blocks
ENDLESS = Words(PASTA.texts, [0, 0, 0, 0, 0, 4, 4, 4])
WORDS = {"pasta-endless": ENDLESS, "pdos": PDOS, "apar": APAR, "skeleton": SOT}


def make(method):
    words = WORDS.get(method, PASTA)
    vocabulary = words.vocabulary()
    match method:
        case "pdos":
            return Pdos(vocabulary, n_prompt=len(PROMPT))
        case "apar":
            return Apar(vocabulary, n_prompt=len(PROMPT))
        case "skeleton":
            return Skeleton(vocabulary, Prompts(
                PROMPT, lambda outline, number, text: (*PROMPT, number), lambda number, _: "|"))
    return Pasta(vocabulary, start=len(PROMPT), room=N_CTX, overlap=method != "pasta-ordered")


@functools.cache
def expected(method):
    """Tokens by thread and the text, one thread after the other."""
    words, script, at = WORDS.get(method, PASTA), SCRIPTS[method], iter(SCRIPTS[method])

    def choose(graph, row, thread, bans):
        said = next(at, None) if thread == MAIN else None
        return said if said is not None else words.choose(
            graph.pairs(row), graph.tokens[row], graph.positions[row], bans)

    chosen, text, _ = reference(words, PROMPT, make(method), MOST, N_CTX, choose)
    assert len(chosen) == 1 + COUNT, script
    return chosen, text


class Forty(ThreadedPipeline):
    """The main thread writes its script; all else is a hash of what it sees."""

    def __init__(self, method, threads, **options):
        limits = Limits(n_ctx=N_CTX, policy=Policy.ITERATIVE, exact_width=4, credit=5,
                        threads=threads)
        super().__init__(limits, WORDS.get(method, PASTA), **options)
        self.script, self.widest, self.chosen = SCRIPTS[method], 0, {}
        self.output[0] = []
        self.feed(Enqueue(Request(0, PROMPT, MOST, eos_ids=frozenset({EOS})),
                         decompose=functools.partial(make, method)))
        self.drain()

    def feed(self, event):
        super().feed(event)
        lanes = self.scheduler.lanes.values()
        self.widest = max(self.widest, sum(not lane.closing for lane in lanes))
        for response in self.scheduler.threads.responses.values():
            self.chosen = response.chosen

    def _evaluate(self, stage, item):
        choices = iter(super()._evaluate(stage, item))
        out = []
        for row, lane_id in enumerate(item.lanes):
            if item.rows.outputs[row]:
                choice, lane = next(choices), self.scheduler.lanes.get(lane_id)
                if lane is not None and lane.thread == MAIN:
                    at = len(self.chosen.get(MAIN, ()))
                    choice = Choice(self.script[at]) if at < len(self.script) else choice
                out.append(choice)
        return out


@pytest.mark.parametrize("threads", [1, 2, 8, COUNT])
@pytest.mark.parametrize("method", SCRIPTS)
def test_forty_items_are_all_there(method, threads):
    chosen, text = expected(method)
    pipeline = Forty(method, threads, n_stages=1 + threads % 4, seed=threads)
    assert pipeline.text == text
    assert b"<" not in text
    assert pipeline.finished[0] == "stop"
    found = {k: [choice.token for choice, _ in tokens] for k, tokens in pipeline.chosen.items()}
    assert found == {k: tokens for k, tokens in chosen.items() if tokens}
    assert pipeline.widest <= 1 + threads
    check_at_rest(pipeline)


def test_blocks_without_end_take_fewer_steps_than_what_they_promise():
    stats = {method: Forty(method, 8).stats() for method in ("pasta-endless", "pdos")}
    assert stats["pasta-endless"].gave_up == COUNT
    assert stats["pasta-endless"].steps < 10 * COUNT
    assert stats["pdos"].gave_up == 0
