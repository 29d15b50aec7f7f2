"""How the members of a wide stage find each other, whatever comes first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.backends.team import PeerSilent, available
from pipeinfer.cluster.parts import sum_seconds, team_of
from pipeinfer.config import ClusterConfig
from pipeinfer.core.control import PortName, Setup, SumRegion
from pipeinfer.core.messages import Cancel, Part, Tag, Verdict
from pipeinfer.errors import BackendError, ProtocolError, TransportTimeout
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.transport.inproc import local_ports

CUT = ("h0-1.f0-32.v0-8", "h1-2.f32-64.v8-16", "h2-3.f64-96.v16-24")
N_EMBD = 16


def setup(member):
    return Setup(PortName(1, member), (3,), "m.gguf", "x", 4, 0, 4, n_ctx=256, n_seq_max=2,
                 n_batch=8, prompt_id=1, gaps=False, settings={}, cut=CUT,
                 holders=((0,), (1,), (2,)), near=True)


@pytest.mark.parametrize("late", range(3))
@pytest.mark.parametrize("way", ["auto", "messages"])
def test_members_meet_whoever_is_last(way, late):
    """The leader's word and others' parts may come before the head's Setup does."""
    if way == "auto" and not available():
        pytest.skip("sums.c was not compiled here")
    ports, seconds = local_ports(4), {}
    gate = threading.Event()

    def join(member):
        port = ports[1 + member]
        if member == late:
            gate.wait(20)
            ports[0].send(1 + member, Tag.TRANSACTION, setup(member))
        else:
            ports[0].send(1 + member, Tag.TRANSACTION, setup(member))
        while (envelope := port.take(Tag.TRANSACTION)) is None:
            port.wait(0.1)
        team = team_of(ClusterConfig(sum_path=way, timeout=20.0), envelope.message, N_EMBD, port,
                       Pulse())
        seconds[member] = sum_seconds(team, N_EMBD)
        team.close()

    threads = [threading.Thread(target=join, args=(member,)) for member in range(3)]
    for thread in threads:
        thread.start()
    if late:
        while not any(ports[1 + late]._own.has(tag) for tag in Tag):
            threads[0].join(0.01)  # what the others send is there before the Setup
    gate.set()
    for thread in threads:
        thread.join(20)
    assert sorted(seconds) == [0, 1, 2]
    assert all(0 < found < 20 for found in seconds.values())


@pytest.mark.parametrize("way", ["auto", "messages"])
def test_a_member_of_two_slices_waits_for_another_no_longer_than_it_may(way):
    """Its threads all stop: when a second member died, a job never took over the first."""
    if way == "auto" and not available():
        pytest.skip("sums.c was not compiled here")
    port = local_ports(3)[1]
    port.rank_of = int
    two = structs.replace(setup(0), widths=(2,), holders=((0, 1), (2,)))
    team = team_of(ClusterConfig(sum_path=way, timeout=0.5), two, N_EMBD, port, Pulse())

    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(sum_seconds, team, N_EMBD)
        ended = wait([measured], 20).done
        team._error = BackendError("or a thread that hangs never ends")
    assert [type(one.exception()) for one in ended] == [PeerSilent]


def test_a_leader_that_says_nothing_is_named():
    port = local_ports(4)[2]
    port.rank_of = int  # each node on a rank of its own
    with pytest.raises(TransportTimeout, match=r"rank 2 waited .* for SumRegion from rank 1"):
        team_of(ClusterConfig(timeout=0.1), setup(1), N_EMBD, port, Pulse())


def test_what_is_neither_region_nor_part_is_refused():
    ports = local_ports(4)
    part = Part(2, 1, -1, 0, Verdict.GO, np.zeros(N_EMBD, np.float32))
    for message in (part, Cancel((1,))):
        ports[3].send(2, Tag.SUM, message)
    with pytest.raises(ProtocolError, match="Cancel as a part of a sum"):
        team_of(ClusterConfig(timeout=1.0), setup(1), N_EMBD, ports[2], Pulse())
    ports[1].send(2, Tag.SUM, SumRegion("pipeinfer-sums-/wrong"))
    with pytest.raises(ProtocolError, match="no name"):
        team_of(ClusterConfig(timeout=1.0), setup(1), N_EMBD, ports[2], Pulse())
