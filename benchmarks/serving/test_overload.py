"""Many more clients than a server takes, some of which never read."""

from __future__ import annotations

import pytest

from benchmarks.serving import overload
from tests.rig.served import serve
from tests.support.sample import full

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize("rounds", [1, full(2)])
def test_200_clients_at_once_are_served_or_sent_away_and_leave_no_trace(rounds):
    clients, deaf, room = 200, 3, 4 + 12
    with serve(4, "-c", "512", "--parallel", "4", "--queue", "12") as server:
        server.wait_until_ready()
        found = overload.run(server, clients, deaf, rounds=rounds, count=6)
    assert found["errors"] == []
    assert set(found["statuses"]) == {200, 429}
    assert sum(found["statuses"].values()) == rounds * clients
    assert found["statuses"][200] >= rounds * (room - deaf)
    assert found["without_retry_after"] == found["wrong_texts"] == 0
    assert max(found["growth_mib"].values()) < 30
    assert found["idle_afterwards"]
    assert found["good_afterwards"]
