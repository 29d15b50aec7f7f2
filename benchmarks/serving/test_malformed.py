"""Requests that schemathesis makes, and worse ones, against the HTTP process."""

from __future__ import annotations

import pytest

from benchmarks.serving import malformed
from pipeinfer.experiments.rig.server_peer import front
from pipeinfer.models.locate import EMBEDDED
from pipeinfer.server.frames import Refused

pytestmark = pytest.mark.slow
CASES = 300


def test_no_malformed_request_brings_a_500_or_an_undescribed_answer():
    with front(EMBEDDED / "target.gguf", queue=200) as server:
        tally = malformed.run(server.url, CASES)
    assert tally.failures == []
    assert tally.cases >= CASES
    assert set(tally.kinds) == {"by hand", "positive", "negative"}
    assert tally.statuses[200] > 20
    assert tally.statuses[400] > 100


def test_what_is_wrong_would_be_noticed():
    with front(EMBEDDED / "target.gguf") as server:
        server.peer.answer = lambda frame: [Refused(frame.id, "no such kind", "a bug")]
        tally = malformed.Tally()
        malformed.from_description(server.url, 60, 1, tally)
    assert any("500" in wrong or "Server error" in wrong for _, wrong in tally.failures)
