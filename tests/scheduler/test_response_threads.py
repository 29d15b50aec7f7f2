"""Responses in threads: every interleaving gives the tokens of a reference without a pipeline."""

from __future__ import annotations

import functools

import pytest
from msgspec import structs

from pipeinfer.core.policy import Ablation, Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.scheduler.events import Enqueue
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.decomposers.apar import Apar
from pipeinfer.strategies.decomposers.pasta import Pasta
from pipeinfer.strategies.decomposers.pdos import Pdos
from pipeinfer.strategies.decomposers.skeleton import Prompts, Skeleton
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.kit.sample import fewer, matrix, mostly_full
from tests.kit.threaded import EOS, ThreadedPipeline, Words, reference
from tests.scheduler.test_lanes import check_at_rest

N_CTX, MOST = 400, 90
#: special tokens first, then plain words; the weights make tags frequent
PASTA = Words(
    [b"", b'<promise topic="a b" tokens=1/>', b'<promise topic="c" tokens=', b"2", b"/>",
     b"<async>", b"</async>", b"<sync/>", b"a", b"b ", b" <", b"sync", b"/> c", b"0", b"\xc3",
     b"\xa4", b"12"],
    [2, 6, 5, 6, 6, 3, 8, 6, 9, 9, 4, 4, 4, 4, 3, 3, 3])
PDOS = Words([b"", b"####", b"%%%%", b"......", b"...", b"\n\n", b":", b":\n", b"a", b"b", b"c"],
             [1, 12, 10, 2, 2, 2, 12, 3, 9, 9, 9])
APAR = Words([b"", b"[Fork]", b"[Child]", b"a", b"b", b"c", b"\n"], [2, 6, 4, 9, 9, 9, 3])
SOT = Words([b"", b"1", b"2", b"3", b".", b" ", b"\n", b"a", b"b"], [2, 6, 6, 5, 12, 7, 7, 9, 9])


def pasta(words, prompt):
    return Pasta(words.vocabulary(), start=len(prompt), room=N_CTX)


def pdos(words, prompt):
    return Pdos(words.vocabulary(), n_prompt=len(prompt))


def apar(words, prompt):
    return Apar(words.vocabulary(), n_prompt=len(prompt))


def skeleton(words, prompt):
    def point(outline, number, text):
        return (*prompt, *words.encode(text), 1 + number % 3)

    prompts = Prompts((*prompt, 7), point, lambda number, text: f"{number}. ")
    return Skeleton(words.vocabulary(), prompts)


def ordered(words, prompt):
    return Pasta(words.vocabulary(), start=len(prompt), room=N_CTX, overlap=False)


METHODS = {"pasta": (PASTA, pasta), "pasta-ordered": (PASTA, ordered), "pdos": (PDOS, pdos),
           "apar": (APAR, apar), "skeleton": (SOT, skeleton)}
LIMITS = {
    "iterative": Limits(n_ctx=N_CTX, policy=Policy.ITERATIVE, exact_width=4, credit=4, threads=5),
    "pipeinfer": Limits(n_ctx=N_CTX, exact_width=4, credit=5, threads=5),
    "wide": Limits(n_ctx=N_CTX, exact_width=16, credit=9, threads=7, draft_max=2, parallel=2,
                   alternatives=3, alone=True, partitions=20, kept=2),
    "speculative": Limits(n_ctx=N_CTX, policy=Policy.SPECULATIVE, exact_width=8, branches=2,
                          threads=4),
    "joined": Limits(n_ctx=N_CTX, exact_width=8, join_tip=True, threads=4),
    "no async": Limits(n_ctx=N_CTX, exact_width=8, threads=4,
                       ablations=frozenset({Ablation.ASYNC})),
    "no cancel": Limits(n_ctx=N_CTX, exact_width=4, credit=6, threads=6,
                        ablations=frozenset({Ablation.CANCEL})),
    "single id": Limits(n_ctx=N_CTX, exact_width=4, credit=6, threads=4,
                        ablations=frozenset({Ablation.ALTERNATIVES})),
    "published": Limits(n_ctx=N_CTX, policy=Policy.PUBLISHED, exact_width=4, credit=6, threads=4,
                        branches=3, path_min=0.0),
    "no buffers": Limits(n_ctx=N_CTX, policy=Policy.PUBLISHED, exact_width=8, credit=6, threads=4,
                         path_min=0.0, ablations=frozenset({Ablation.MULTIBUFFER})),
}


def prompt_of(seed):
    return tuple(7 + (seed * 7 + k * k) % 2 for k in range(3 + seed % 9))


@functools.cache
def expected(method, seed):
    words, make = METHODS[method]
    prompt = prompt_of(seed)
    return reference(words, prompt, make(words, prompt), MOST, N_CTX)


def ask(pipeline, number, method, seed):
    """Submit a request whose answer has threads."""
    words, make = METHODS[method]
    prompt = prompt_of(seed)
    pipeline.output[number] = []
    pipeline.feed(Enqueue(Request(number, prompt, MOST, eos_ids=frozenset({EOS})),
                         decompose=functools.partial(make, words, prompt)))


def run(method, limits, seeds, order=0, **options):
    pipeline = ThreadedPipeline(limits, METHODS[method][0], seed=order, **options)
    for k, seed in enumerate(seeds):
        ask(pipeline, k, method, seed)
    pipeline.drain()
    return pipeline


def text_of(pipeline, request):
    return b"".join(e.text for e in pipeline.emitted if e.request_id == request)


@pytest.mark.parametrize(("method", "limits"), matrix(METHODS, LIMITS))
def test_every_interleaving_gives_the_reference(method, limits):
    for seed in range(24):
        pipeline = run(method, LIMITS[limits], [seed], order=seed, n_stages=1 + seed % 4)
        chosen, text, _ = expected(method, seed)
        assert text_of(pipeline, 0) == text, seed
        by_thread = {}
        for emit in pipeline.emitted:
            by_thread.setdefault(emit.thread, []).append(emit.choice.token)
        for thread, tokens in by_thread.items():
            assert tokens == chosen[thread][: len(tokens)]
        assert pipeline.finished[0] in ("stop", "length")
        check_at_rest(pipeline)


@pytest.mark.parametrize("method", mostly_full(METHODS, "pasta", "apar"))
def test_lookahead_works_inside_threads(method):
    issued = 0
    for seed in range(12):
        limits = structs.replace(LIMITS["speculative" if seed % 3 else "pipeinfer"],
                                     partitions=30)
        pipeline = run(method, limits, [seed], order=seed, n_stages=1 + seed % 4,
                       rows=Lookahead(3, 3, 2), drafts=bool(seed % 2))
        assert text_of(pipeline, 0) == expected(method, seed)[1]
        issued += pipeline.stats().issued_speculative
        check_at_rest(pipeline)
    assert issued


@pytest.mark.parametrize("method", METHODS)
def test_the_random_programs_have_threads_and_joins(method):
    """Enough threads, joins and malformed tags among the random programs."""
    forks = [len(expected(method, seed)[0]) - 1 for seed in range(24)]
    assert sum(forks) > 15
    assert max(forks) > 2
    if "pasta" in method:
        joined = [f for f in range(24) if b"<" in expected(method, f)[1]]
        assert joined  # something that looks like a tag stayed text


@pytest.mark.parametrize("method", mostly_full(METHODS, "pdos", "skeleton"))
def test_several_responses_share_the_pipeline_and_a_cache_that_is_too_small(method):
    longest = 0
    for order in range(fewer(6, 3)):
        limits = Limits(n_ctx=N_CTX, exact_width=4, credit=6, parallel=3, threads=4,
                        cells=80 if "pasta" in method else 120, kept=2, chunk=8)
        seeds = [order, order + 1, order + 2, order + 3]
        pipeline = run(method, limits, seeds, order=order, n_stages=3)
        preempted = 0
        for k, seed in enumerate(seeds):
            preempted += pipeline.stats(k).preempted
            if pipeline.finished[k] != "context":
                assert text_of(pipeline, k) == expected(method, seed)[1]
        longest = max(longest, preempted)
        check_at_rest(pipeline)
    assert longest


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_leaves_takes_all_threads_along(method):
    for order in range(12):
        pipeline = ThreadedPipeline(LIMITS["pipeinfer"], METHODS[method][0], seed=order)
        ask(pipeline, 0, method, order)
        for _ in range(20 + 11 * order):
            pipeline.step()
        pipeline.abort(0)
        pipeline.drain()
        assert 0 in pipeline.finished
        chosen, _, _ = expected(method, order)
        for thread in {emit.thread for emit in pipeline.emitted}:
            tokens = [e.choice.token for e in pipeline.emitted if e.thread == thread]
            assert tokens == chosen[thread][: len(tokens)]  # what there is, is right
        check_at_rest(pipeline)


class Scripted(ThreadedPipeline):
    """Each thread writes its script, a token for every row that is asked, and then ends."""

    def __init__(self, scripts, words, make, prompt, **options):
        super().__init__(LIMITS["iterative"], words, n_stages=1, **options)
        self.scripts, self.done = scripts, {}
        self.output[0] = []
        self.feed(Enqueue(Request(0, prompt, MOST, eos_ids=frozenset({EOS})), decompose=make))
        self.drain()

    def _evaluate(self, stage, item):
        super()._evaluate(stage, item)
        out = []
        for row, lane in enumerate(item.lanes):
            if item.rows.outputs[row]:
                found = self.scheduler.lanes.get(lane)
                script = self.scripts.get(found.thread, []) if found else []
                at = self.done[lane] = self.done.get(lane, -1) + 1
                out.append(Choice(script[at] if at < len(script) else EOS))
        return out


class Mute(Words):
    """A vocabulary whose model has nothing to say of its own."""

    def choose(self, pairs, last, pos, bans):
        return EOS


def test_steps_are_counted_as_the_paper_does():
    """docs/algorithms.md 7.5: P1 in step 1; P2 and x in 2; sync, the end of block 1 and y in 3;
    the end of block 2 in 4; z in 5. Plain decoding takes one step per token."""
    words = Mute([b"", b'<promise topic="p" tokens=1/>', b"<async>", b"</async>", b"<sync/>",
                  b"x", b"y", b"z", b"u"], [])
    pipeline = Scripted({0: [1, 1, 4, 7, 0], 1: [5, 3], 2: [6, 3]}, words,
                        lambda: Pasta(words.vocabulary(), start=1, room=N_CTX), (8,))
    assert pipeline.text == b"xyz"
    assert (pipeline.stats().steps, pipeline.stats().accepted) == (5, 8)


def test_pdos_takes_no_more_memory_than_plain_decoding_of_its_text():
    """Nothing is copied: at no time more cells than the final sequence has (docs/algorithms.md 8.4:
    100 + 16, and what follows), and steps as many as the longest branch, not as all of them."""
    words = Mute(PDOS.texts, [])
    step, end, colon, a, b = 1, 2, 6, 8, 9
    # the last row of each feed is asked as well: after `:` and what is forced comes the next title
    main = [step, a, colon, a, b, colon, end, a, 0]
    pipeline = Scripted({0: main, 1: [a] * 5 + [step], 2: [b] * 2 + [step]}, words,
                        lambda: Pdos(words.vocabulary(), n_prompt=100), (b,) * 100)
    assert pipeline.text == b"\n\n####a:aaaaa\n\n####ab:bba"
    final = 100 + (1 + 3 + 5) + (1 + 4 + 2) + 1
    assert pipeline.max_cells <= final
    assert pipeline.scheduler.most_cells == final  # the last token, too, which is not computed
    # skeleton: 7 chosen tokens one after the other; 6 for the longer branch; the last one
    assert pipeline.stats().steps == 7 + 6 + 1
