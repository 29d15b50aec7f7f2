"""Under a grammar every policy gives the tokens of a plain loop with a fresh matcher per token.

Real head, real stages and a real draft thread over toy models: what is cancelled when differs from
run to run, the tokens must not.
"""

from __future__ import annotations

import functools
import json
import threading

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import LaneOpen
from pipeinfer.core.policy import CancelPath, Policy
from pipeinfer.core.sampling import choose, noise_key
from pipeinfer.core.types import NO_TOKEN, Request, SamplingParams, make_rows
from pipeinfer.errors import UsageError
from pipeinfer.models.text.grammar import compile_grammar
from pipeinfer.models.text.vocabulary import Vocabulary
from pipeinfer.runtime.drafts import DraftWorker
from pipeinfer.runtime.head import Head
from pipeinfer.runtime.stage import Stage
from pipeinfer.scheduler.events import Emit, Finish
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.transport.inproc import local_ports
from tests.kit.sample import matrix
from tests.kit.toy import ToyBackend, ToySpec, draft_of

pytestmark = pytest.mark.slow
TEXTS = ['{', '}', '[', ']', '"', ':', ',', ' ', '"a":', '"b":', 'true', 'false', 'tr', 'ue', '1',
         '2', '30', '-', 'x', 'y', 'xy', '\n', '{"a"', '":', '0', '],', '"}', 'a', 'b']
VOCABULARY = Vocabulary([b"\xff<eos>", b"\xff<eot>", *(t.encode() for t in TEXTS)], [0, 1])
SPEC = ToySpec(n_vocab=len(VOCABULARY) + 3, n_layers=3, n_embd=16, seed=8)  # three ids are padding
SCHEMA = {"type": "object", "required": ["a", "b"], "additionalProperties": False, "properties": {
    "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    "b": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 9}]}}}
LIST = 'root ::= "[" item ("," item){3,30} "]"\nitem ::= ("xy" | "x" "y"* | [1-3]+ "0")'
PROMPT = (5, 9, 20, 4, 11)
COUNT = 48
POLICIES = {
    "iterative": {"policy": Policy.ITERATIVE},
    "speculative": {"policy": Policy.SPECULATIVE, "branches": 3, "p_split": 0.05},
    "pipeinfer": {"policy": Policy.PIPEINFER, "path_min": 0.0, "draft_max": 2, "credit": 6},
}


@pytest.fixture(scope="module")
def compiled():
    yield [compile_grammar("json_schema", SCHEMA, VOCABULARY),
           compile_grammar("gbnf", LIST, VOCABULARY)]
    VOCABULARY.compiler.close()


@functools.cache  # what every policy has to write, for each of them the same
def plain(params, count=COUNT):
    """One row at a time, and a matcher of its own for every token."""
    backend = ToyBackend.load(SPEC)
    path = list(PROMPT)
    logits = backend.decode(make_rows(
        [(t, i, (0,), i == len(path) - 1) for i, t in enumerate(path)]))
    fresh = VOCABULARY.matcher(params.grammar)
    while len(path) < len(PROMPT) + count:
        matcher = fresh.deep_copy()
        assert matcher.try_consume_tokens(path[len(PROMPT):]) == len(path) - len(PROMPT)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), matcher.get_error()
        mask = bits[: len(VOCABULARY)].astype(bool)
        token = choose(logits[0], params, np.array(path, np.int32), len(path) - 1, mask).token
        if token in VOCABULARY.end_ids:
            break
        path.append(token)
        logits = backend.decode(make_rows([(token, len(path) - 1, (0,), True)]))
    return path[len(PROMPT):]


class Pipeline:
    """A head and stages in threads."""

    def __init__(self, n_stages, limits, vocabulary=VOCABULARY):
        ports = local_ports(n_stages + 1)
        bounds = np.linspace(0, SPEC.n_layers, n_stages + 1).astype(int).tolist()
        self.stages = [
            Stage(ports[k], Grid.plain(n_stages), ToyBackend.load(SPEC, bounds[k - 1], bounds[k]),
                  cancel_path=CancelPath.DIRECT, timeout=60, vocabulary=vocabulary)
            for k in range(1, n_stages + 1)]
        self.threads = [threading.Thread(target=stage.serve, daemon=True) for stage in self.stages]
        for thread in self.threads:
            thread.start()
        draft = DraftModel(ToyBackend.load(draft_of(SPEC, 0.75)), len(VOCABULARY), paths=4,
                           vocabulary=vocabulary)
        self.worker = DraftWorker(draft, ports[0].wake)
        self.head = Head(ports[0], Grid.plain(n_stages), Scheduler(limits), self.worker, timeout=60)

    def generate(self, requests):
        """The tokens of each request, all at the same time, and all counters added up."""
        tokens = {request.request_id: [] for request in requests}
        for request in requests:
            self.head.submit(request)
        left, accepted, cancelled = len(requests), 0, 0
        while left:
            match self.head.next_news(60):
                case Emit(request_id, choice, _):
                    tokens[request_id].append(choice.token)
                case Finish(_, _, stats):
                    left -= 1
                    accepted += stats.accepted_speculative
                    cancelled += stats.cancelled_runs
                case other:
                    raise AssertionError(other)
        return tokens, accepted, cancelled

    def close(self):
        self.worker.close(10)
        self.head.drain(60)
        self.head.shutdown(10)
        for thread in self.threads:
            thread.join(10)


@pytest.mark.parametrize(("policy", "n_stages"), matrix(POLICIES, [1, 3]))
def test_tokens_under_a_grammar_are_those_of_a_plain_loop(compiled, policy, n_stages):
    limits = Limits(n_ctx=128, exact_width=4, parallel=2, **POLICIES[policy])
    pipeline = Pipeline(n_stages, limits)
    accepted = cancelled = number = 0
    for text in compiled:
        for temperature in (0.0, 0.8):
            for seed in range(3):
                params = [SamplingParams(
                    temperature, top_k=0 if seed else 7, min_p=0.05, key=noise_key(seed, k),
                    repeat_penalty=1.2 if seed == 2 else 1.0, grammar=text,
                    grammar_start=len(PROMPT)) for k in range(2)]
                requests = [Request(number + k, PROMPT, COUNT, one, frozenset(VOCABULARY.end_ids))
                            for k, one in enumerate(params)]
                number += 2
                got, good, dead = pipeline.generate(requests)
                accepted, cancelled = accepted + good, cancelled + dead
                for request in requests:
                    assert got[request.request_id] == plain(request.params), request.params
    pipeline.close()
    assert (accepted > 20) == (policy != "iterative")
    if policy == "pipeinfer":
        assert cancelled > 5


def test_what_ends_is_valid(compiled):
    params = SamplingParams(1.0, key=noise_key(1), grammar=compiled[0], grammar_start=len(PROMPT))
    ended = 0
    for seed in range(12):
        tokens = plain(structs.replace(params, key=noise_key(seed)))
        text = b"".join(VOCABULARY.tokens[t] for t in tokens).decode()
        if len(tokens) < COUNT:
            ended += 1
            data = json.loads(text)
            assert set(data) == {"a", "b"}
            assert all(isinstance(i, int) for i in data["a"])
    assert ended > 2


def test_a_lane_with_a_grammar_needs_a_vocabulary(compiled):
    ports = local_ports(2)
    stage = Stage(ports[1], Grid.plain(1), ToyBackend.load(SPEC))
    params = SamplingParams(grammar=compiled[0])
    with pytest.raises(UsageError, match="vocabulary"):
        stage._handle(LaneOpen(3, params))


def test_a_parser_that_gives_up_ends_its_own_request_only(compiled, monkeypatch):
    import llguidance

    from pipeinfer.models.text import vocabulary
    from pipeinfer.scheduler.events import Refuse

    wide = compile_grammar("gbnf", "root ::= " + '"x"? ' * 300, VOCABULARY)
    tight = llguidance.LLParserLimits(step_max_items=150, verbose_errors=False)
    monkeypatch.setattr(vocabulary, "_limits", lambda: tight)
    pipeline = Pipeline(1, Limits(n_ctx=128, exact_width=4, parallel=2, **POLICIES["pipeinfer"]))
    good = SamplingParams(grammar=compiled[1], grammar_start=len(PROMPT))
    pipeline.head.submit(Request(1, PROMPT, 20, structs.replace(good, grammar=wide)))
    pipeline.head.submit(Request(2, PROMPT, 20, good, frozenset(VOCABULARY.end_ids)))
    ends, tokens = {}, []
    while len(ends) < 2:
        match pipeline.head.next_news(60):
            case Emit(request_id, choice, _):
                assert request_id == 2
                assert choice.token != NO_TOKEN
                tokens.append(choice.token)
            case Finish() | Refuse() as end:
                ends[end.request_id] = end
            case other:
                raise AssertionError(other)
    pipeline.close()
    assert isinstance(ends[1], Refuse)
    assert isinstance(ends[2], Finish)
    monkeypatch.undo()
    assert tokens == plain(good, 20)
