"""What a head does when another scheduler takes over, and who looks on."""

from __future__ import annotations

import pytest

from pipeinfer.core.grid import Grid
from pipeinfer.core.messages import CacheOps, Decode, RunFinished, Tag
from pipeinfer.core.policy import Policy
from pipeinfer.core.types import Choice, Request
from pipeinfer.runtime.head import Head
from pipeinfer.scheduler.events import Emit, Finish
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.transport.inproc import local_ports

LIMITS = Limits(n_ctx=64, policy=Policy.ITERATIVE)


def sent_to(port):
    found = []
    while (envelope := port.take(Tag.TRANSACTION)) is not None:
        found.append(envelope.message)
    return found


def answer(port, message, token):
    port.send(0, Tag.RESULT, RunFinished(message.run_id, tuple(
        Choice(token) for wanted in message.rows.outputs if wanted)))


def test_another_scheduler_takes_over_with_an_empty_cache():
    ports = local_ports(3)
    head = Head(ports[0], Grid.plain(2), Scheduler(LIMITS), None, timeout=5.0)
    head.scheduler.next_run = 7
    other = Scheduler(LIMITS)
    head.replace(other, None, None)
    assert head.scheduler is other
    assert other.next_run == 7
    assert [type(message) for message in sent_to(ports[1])] == [CacheOps]


@pytest.mark.parametrize("trace", [False, True])
def test_an_observer_sees_every_run_and_changes_nothing(trace):
    head_port, stage = local_ports(2)
    head = Head(head_port, Grid.plain(1), Scheduler(LIMITS, validate=True), None, trace=trace,
                timeout=5.0)
    head.observe(True)
    head.submit(Request(0, (5, 6, 7), 3))
    news = []
    for token in (1, 2, 3):
        runs = [m for m in sent_to(stage) if isinstance(m, Decode)]
        assert len(runs) == 1
        answer(stage, runs[0], token)
        news.append(head.next_news(1.0))
    news.append(head.next_news(1.0))
    assert [n.choice.token for n in news if isinstance(n, Emit)] == [1, 2, 3]
    assert isinstance(news[-1], Finish)
    seen = head.take_runs()
    assert [item["id"] for item in seen if "issued" in item] == [0, 1, 2]
    assert {item["id"] for item in seen if "done" in item} == {0, 1, 2}
    if trace:
        assert [issue[0] for issue in head.trace.issues] == [0, 1, 2]
        assert [result[0] for result in head.trace.results] == [0, 1, 2]
        assert set(head.trace.fates()) == {0, 1, 2}
    else:
        assert head.trace is None
    head.observe(False)
    assert head.take_runs() == []
