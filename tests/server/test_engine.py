"""The engine without ranks: what it hands to the head, and what comes back to clients."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

from pipeinfer.config import JobConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.scheduler import events
from pipeinfer.server.engine import Engine
from pipeinfer.server.frames import Ended, Submit, Token
from pipeinfer.strategies.proposers.lookahead import Lookahead
from tests.scheduler.test_replicas import LIMITS, Replicas
from tests.support.simulated import plain


class Head(Replicas):
    """Simulated replicas behind what the engine asks of a head."""

    def __init__(self):
        super().__init__(LIMITS, Lookahead(3, 4, 2), 2, n_vocab=11)
        self.news = deque()
        handle = self.scheduler.handle

        def noted(event):
            out = handle(event)
            self.news += [i for i in out if isinstance(i, events.Emit | events.Finish)]
            return out

        self.scheduler.handle = noted

    def wake(self):
        pass

    def submit(self, request, decompose=None, output=()):
        self.output[request.request_id] = []
        self.feed(events.Submit(request, output, decompose))
        self.drain()

    def next_news(self, timeout):
        return self.news.popleft() if self.news else None


def test_replicas_go_on_behind_what_an_earlier_job_has_brought():
    """Also where that is not what this job would say: its slices may add up in another order."""
    head, sent = Head(), []
    session = SimpleNamespace(
        head=head, tokenizer=SimpleNamespace(eog_ids=()), on_change=None,
        config=JobConfig().replace(layout="replicate"))
    link = SimpleNamespace(on_frame=None, send=lambda frame: sent.extend(frame.items))
    engine = Engine(session, link, 1.0)
    prompt, known = (1, 2, 3), (9, 9, 4)
    assert list(known) != plain(prompt, 3, 11)
    engine._handle(Submit(7, prompt, 20, SamplingParams(), ignore_eos=True, output=known))
    engine._news(head.next_news(0.0))
    assert [one.token for one in sent if isinstance(one, Token)] == plain((*prompt, *known), 17, 11)
    assert isinstance(sent[-1], Ended)
    assert sent[-1].reason == "length"
