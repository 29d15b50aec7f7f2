"""Requests that schemathesis makes, and worse ones, against the HTTP process."""

from __future__ import annotations

from types import ModuleType

import pytest

from pipeinfer.models.locate import EMBEDDED
from pipeinfer.server.frames import Refused
from tests.kit.sample import full
from tests.kit.server_peer import front

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def malformed() -> ModuleType:
    """Imported when it is needed: every process that collects tests would pay for schemathesis."""
    from benchmarks.serving import malformed as found
    return found


@pytest.mark.parametrize("cases", [60, full(300)])
def test_no_malformed_request_brings_a_500_or_an_undescribed_answer(malformed, cases):
    with front(EMBEDDED / "target.gguf", queue=200) as server:
        tally = malformed.run(server.url, cases)
    assert tally.failures == []
    assert tally.cases >= cases
    assert set(tally.kinds) == {"by hand", "positive", "negative"}
    assert tally.statuses[200] > cases // 15
    assert tally.statuses[400] > cases // 3


def test_what_is_wrong_would_be_noticed(malformed):
    with front(EMBEDDED / "target.gguf") as server:
        server.peer.answer = lambda frame: [Refused(frame.id, "no such kind", "a bug")]
        tally = malformed.Tally()
        malformed.from_description(server.url, 60, 1, tally)
    assert any("500" in wrong or "Server error" in wrong for _, wrong in tally.failures)
