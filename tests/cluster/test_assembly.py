"""What rank 0 does when stages are lost, over a port that answers for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeinfer.cluster.assembly import Assembly, greet
from pipeinfer.config import JobConfig
from pipeinfer.core.control import (
    PortName,
    Progress,
    Ready,
    Receive,
    Received,
    Rehearse,
    RollCall,
    Setup,
    Standing,
)
from pipeinfer.core.grid import Grid, parse_widths
from pipeinfer.core.messages import Tag
from pipeinfer.core.messages import WorkerFailed as Message
from pipeinfer.core.types import CURVE_ROWS
from pipeinfer.errors import ClusterError, LinkCut, RankLost, StageFailed, TransportTimeout
from pipeinfer.nodes import NodeSettings, RankInfo
from pipeinfer.planning.partition import Load, Member, measure
from pipeinfer.planning.planner import Plan
from pipeinfer.planning.wide import teams_of
from pipeinfer.runtime.head import take_result
from pipeinfer.transport.base import Envelope

CUT = ("h0-1.f0-32.v0-8", "h1-2.f32-64.v8-16")


def answer(rank, message):
    """What a stage, or a spare that only receives, says when it has done what it was told."""
    if isinstance(message, Receive):
        return Received(message.port, rank)
    return Ready(message.port, rank, f"host{rank}", (message.start, message.stop), "toy", 8, 0.5,
                 (1.0,) * len(CURVE_ROWS), 0, 0, 1, 0, ())


class Port:
    """Every stage is ready at once; `dies` are ranks that are lost when they get their setup. cut:
    two ranks one after the other that do not hear each other. silent: ranks that do not answer."""

    node = 0

    def __init__(self, dies=(), fails=None, cut=(), silent=()):
        self.gone, self.epochs, self.orders = set(), [], []
        self.layout = (0, 1, 2, 3)
        self.setups, self.rehearsed, self.ahead = {}, set(), {}
        self._dies, self._fails, self._fresh, self._mail = list(dies), fails, set(), []
        self._cut, self._silent = cut, silent
        self.on_receive = lambda rank, message: None

    def rank_of(self, node):
        return self.layout[node]

    def send(self, node, tag, message):
        if isinstance(message, RollCall):
            self._stand(None if tag is Tag.TRANSACTION else node, message.number)
            return
        assert tag is Tag.TRANSACTION
        rank = self.layout[node]
        if isinstance(message, Receive):
            self.rehearsed.add(rank)
            self.on_receive(rank, message)
        if rank in self._dies:
            self._dies.remove(rank)
            self.gone.add(rank)
            self._fresh.add(rank)
            return
        widths = message.widths if isinstance(message, Setup) else ()
        assert message.port == (Grid(widths).name(node) if widths else PortName(node))
        self.setups[rank] = message
        if rank not in self._silent:
            self._mail.append(answer(rank, message))

    def _stand(self, only, number):
        received = 1
        grid = Grid(next(iter(self.setups.values())).widths)
        for node, rank in enumerate(self.layout[1:], 1):
            received *= self._cut != (self.layout[node - 1], rank)
            if only in (None, node):
                self._mail.append(Standing(grid.name(node), number, received, 99.0))

    def take(self, tag):
        if tag is Tag.ERROR and self._fails is not None:
            message, self._fails = self._fails, None
            return Envelope(1, message, 0)
        return Envelope(1, self._mail.pop(0), 0) if tag is Tag.RESULT and self._mail else None

    def new_losses(self):
        fresh, self._fresh = self._fresh, set()
        return fresh

    def regroup(self, layout, given_up):
        self.gone |= set(given_up)
        self.layout = layout.rank_of
        self.epochs.append(layout.epoch)
        self.setups, self._mail = {}, []

    def order(self, rank, order):
        self.orders.append((rank, type(order)))
        if isinstance(order, Rehearse):
            self.ahead[rank] = [(one.start, one.stop) for one in order.setups]

    def wait(self, timeout, *, live=True):
        pass


def assembly(port, *, memory=100.0, spares=0, survives=True, role="", distribute=False,
             asked=0, timeout=300.0, one_host=False, grid="", gpus=False):
    load = Load((1.0,) * 6, (1.0,) * 6)
    widths = parse_widths(grid) if grid else (1, 1, 1)
    members = {rank: Member(f"rank {rank}", 1.0, memory=memory, room=gpus * f"GPU {rank}")
               for rank in range(1, 1 + sum(widths) + spares)}
    if grid:
        port.layout = (0, *list(members)[:sum(widths)])
        teams = teams_of(grid, "2", list(members))
        counts = [6 // len(widths)] * len(widths)
        split = measure(load, [members[rank] for rank in teams.leaders], counts)
        plan = Plan(teams.leaders, split, split, {}, timed=False, teams=teams,
                    cuts=(CUT,) * len(widths))
    else:
        counts = [2, 2, 2, *[0] * spares]
        split = measure(load, list(members.values()), counts)
        plan = Plan(tuple(members), split, split, {}, timed=False)
    hosts = [RankInfo(rank, "host" if one_host else f"host{rank}",
                      settings=NodeSettings(role=role if rank > 3 else "auto"))
             for rank in range(len(members) + 1)]
    config = JobConfig.of(distribute=distribute, spares=asked, timeout=timeout)
    return Assembly(config, port, plan, load, members, hosts,
                    lambda holding: Setup(
                        PortName(0), (), "m.gguf", "x", 6, holding.start, holding.stop, n_ctx=1,
                        n_seq_max=1, n_batch=1, prompt_id=0, gaps=False, settings={}),
                    lambda start, stop: None, None, survives=survives)


def started(port=None, **options):
    """An assembly that has started, and its port."""
    port = port or Port()
    found = assembly(port, **options)
    found.start()
    return found, port


def ranges(found):
    return [(h.rank, h.start, h.stop) for h in found.held]


def test_survivors_take_over_lost_layers_and_keep_their_exact_width():
    found, port = started()
    found.recover(RankLost(2, "is dead"))
    assert ranges(found) == [(1, 0, 3), (3, 3, 6)]
    assert port.epochs == [1]
    assert {rank: setup.exact for rank, setup in port.setups.items()} == {1: 8, 3: 8}
    (change,) = found.changes
    assert (change.lost, change.moved, change.epoch) == ((2,), 2, 1)
    assert "rank 2 is dead" in str(change)


def test_layers_move_to_gpus_of_the_same_host():
    """Each has memory of its own, though the host's would be full."""
    found, _ = started(memory=3.0, one_host=True)
    with pytest.raises(ClusterError):
        found.recover(RankLost(2, "is dead"))
    found, _ = started(memory=3.0, one_host=True, gpus=True)
    found.recover(RankLost(2, "is dead"))
    assert ranges(found) == [(1, 0, 3), (3, 3, 6)]


class Loading(Port):
    """Stages answer nothing until every one has its setup; then those that are not `stuck`."""

    def __init__(self, stuck=()):
        super().__init__()
        self.stuck, self.asked = stuck, []

    def send(self, node, tag, message):
        before = len(self._mail)
        super().send(node, tag, message)
        if isinstance(message, Setup):
            self.asked.append(self._mail.pop())
            self._mail += [Progress(message.port, "loading", 5, 9)]
        if len(self.asked) == 3 and len(self._mail) > before:
            self._mail += [one for one in self.asked if one.rank not in self.stuck]


def test_all_stages_load_at_the_same_time():
    """No stage waits for another one's Ready, whatever cores they use."""
    port = Loading()
    found = assembly(port, one_host=True)
    found.threads = {1: 8, 2: 8, 3: 8}
    found.start()
    assert [one.rank for one in port.asked] == [1, 2, 3]
    assert [setup.cores for setup in port.setups.values()] == [8, 8, 8]


def test_a_stage_that_sends_nothing_is_named_with_its_phase():
    """Though others send all the time."""
    port = Loading(stuck=(2,))
    found = assembly(port, timeout=0.2)
    with pytest.raises(TransportTimeout, match=r"rank 2 is loading since 0 s") as said:
        found.start()
    assert said.value.peer == 2


def test_a_spare_replaces_a_lost_stage_and_gets_its_layers():
    found, port = started(spares=1)
    assert (4, Rehearse) in port.orders
    assert found.spares == (4,)
    found.recover(RankLost(3, "is dead"))
    assert ranges(found) == [(1, 0, 2), (2, 2, 4), (4, 4, 6)]
    assert found.spares == ()


@pytest.mark.parametrize(("memory", "ahead"), [(100.0, [(0, 2), (2, 4), (4, 6)]), (7.0, [])])
def test_a_spare_loads_no_shard_that_its_host_has_no_room_for(memory, ahead):
    """Six bytes of layers are on that host already."""
    port = Port()
    assembly(port, spares=1, memory=memory, one_host=True).start()
    assert port.ahead == {4: ahead}


def test_of_two_stages_with_a_cut_link_the_waiting_one_is_excluded():
    found, _ = started(spares=2)
    found.recover(LinkCut(1, 2, 4.0))
    assert ranges(found) == [(1, 0, 2), (4, 2, 4), (3, 4, 6)]
    assert "what rank 1 sends has not got to rank 2 for 4.0 s" in str(found.changes[-1])
    found.recover(LinkCut(4, 3, 4.0))
    assert ranges(found) == [(1, 0, 2), (4, 2, 4), (5, 4, 6)]
    assert "what rank 4 sends has not got to rank 3" in str(found.changes[-1])
    found.recover(LinkCut(1, 4, 4.0))  # rank 1 for the second time
    assert found.lost == {1, 2, 3}


def test_a_loss_is_raised_where_mpi_does_not_survive_it():
    found = assembly(Port(), survives=False)
    with pytest.raises(LinkCut, match=r"what rank 3 sends has not got to rank 2 for 4\.0 s"):
        found.recover(LinkCut(3, 2, 4.0))


def test_errors_name_ranks_though_messages_name_nodes():
    port = Port(fails=Message(1, "host3", 7, "ValueError: x", "Traceback", 3))
    port.layout = (0, 3, 2, 1)
    with pytest.raises(StageFailed, match="rank 3 on host3 failed in run 7: ValueError") as failed:
        take_result(port)
    assert (failed.value.rank, failed.value.exit_code) == (3, 3)
    port._cut = (3, 2)
    port.setups = {3: SimpleNamespace(widths=(1, 1, 1))}
    with pytest.raises(LinkCut, match="what rank 3 sends has not got to rank 2"):
        greet(port, Grid((1, 1, 1)), 1.0)


@pytest.mark.parametrize(("cut", "left"), [((1, 2), [1, 3]), ((2, 3), [1, 2])])
def test_a_link_that_is_cut_from_the_start_is_found_before_there_are_requests(cut, left):
    found, _ = started(Port(cut=cut), timeout=0.4)
    assert [rank for rank, *_ in ranges(found)] == left
    assert [change.lost for change in found.changes] == [cut[1:]]


def test_spares_without_the_model_get_every_range_before_the_start_is_over():
    found, port = started(spares=2, distribute=True, asked=2)
    assert port.epochs == [1, 2]
    assert port.rehearsed == {4, 5}
    assert port.orders == []
    assert ranges(found) == [(1, 0, 2), (2, 2, 4), (3, 4, 6)]
    assert port.setups.keys() == {1, 2, 3}
    assert found.changes == []
    found.recover(RankLost(3, "is dead"))
    assert port.epochs == [1, 2, 3]


@pytest.mark.parametrize(("asked", "role", "sent"), [
    (0, "", set()), (1, "", {5}), (0, "spare", {4, 5}),
])
def test_a_rank_that_was_left_out_is_sent_nothing(asked, role, sent):
    found, port = started(spares=2, distribute=True, asked=asked, role=role)
    assert port.rehearsed == sent
    assert found.spares == (4, 5)


def test_a_rank_that_drafts_is_not_counted_as_a_spare():
    port = Port()
    found = assembly(port, spares=2, distribute=True, asked=1)
    found._hosts[5] = RankInfo(5, "host5", settings=NodeSettings(proposer="prompt-lookup"))
    found.start()
    assert port.rehearsed == {4}


def test_what_each_spare_rehearses_is_what_the_stages_hold():
    port, told = Port(), {}
    found = assembly(port, spares=1, distribute=True, asked=1)
    port.on_receive = told.setdefault
    found.start()
    assert [(setup.start, setup.stop, setup.exact) for setup in told[4].setups] == [
        (0, 2, 8), (2, 4, 8), (4, 6, 8)]


@pytest.mark.parametrize(("dead", "left"), [
    (4, [(1, 0, 2), (2, 2, 4), (3, 4, 6)]),  # the spare itself
    (2, [(1, 0, 2), (4, 2, 4), (3, 4, 6)]),
])
def test_a_death_while_a_spare_receives_is_survived(dead, left):
    port = Port()
    found = assembly(port, spares=1, distribute=True, asked=1)

    def dying(rank, _):
        port._dies = [rank] if dead == 4 else []
        if dead != 4:
            port.gone.add(dead)
            port._fresh.add(dead)

    port.on_receive = dying
    found.start()
    assert ranges(found) == left
    assert found.changes[0].lost == (dead,)


def test_a_spare_that_does_not_answer_is_given_up():
    found, port = started(Port(silent=(4,)), spares=2, distribute=True, asked=2, timeout=0.2)
    assert found.lost == {4}
    assert "rank 4 did not receive its layers in time" in str(found.changes[0])
    assert ranges(found) == [(1, 0, 2), (2, 2, 4), (3, 4, 6)]
    assert port.epochs[-1] == 4  # the other spare alone, and the stages again


def test_spares_of_one_host_receive_one_after_the_other():
    port = Port()
    found = assembly(port, spares=2, distribute=True, asked=2, one_host=True)
    layouts, regroup = [], port.regroup
    port.regroup = lambda layout, lost: (layouts.append(layout.rank_of), regroup(layout, lost))
    found.start()
    assert layouts == [(0, 4), (0, 1, 2, 3), (0, 5), (0, 1, 2, 3)]


def test_a_spare_that_fails_while_it_receives_is_not_taken_for_a_stage():
    port = Port()
    found = assembly(port, spares=1, distribute=True, asked=1)

    def failing(*_):
        port._fails = Message(1, "host4", -1, "MemoryError", "", 6)

    port.on_receive = failing
    found.start()
    assert found.changes[0].lost == (4,)
    assert ranges(found) == [(1, 0, 2), (2, 2, 4), (3, 4, 6)]


def test_a_rank_that_is_for_the_draft_is_no_spare():
    found = assembly(Port(), spares=1, role="draft")
    assert found.spares == ()


def test_a_loss_in_the_middle_of_a_recovery_begins_it_again():
    found, port = started()
    port._dies = [3]
    found.recover(RankLost(2, "is dead"))
    assert ranges(found) == [(1, 0, 6)]
    assert port.epochs == [1, 2]
    assert found.changes[0].lost == (2, 3)


def test_a_death_while_the_job_starts_is_survived():
    found, _ = started(Port(dies=[1]))
    assert ranges(found) == [(2, 0, 4), (3, 4, 6)]


def test_a_stage_that_has_not_the_model_ends_the_start():
    found = assembly(Port(fails=Message(2, "host2", -1, "no such file", "", 3)))
    with pytest.raises(StageFailed, match="no such file"):
        found.start()


def test_a_stage_without_memory_is_left_out_at_the_start():
    found, _ = started(Port(fails=Message(2, "host2", -1, "MemoryError", "", 6)))
    assert ranges(found) == [(1, 0, 3), (3, 3, 6)]


def test_too_few_ranks_name_the_missing_memory():
    found, _ = started(memory=2.5)
    with pytest.raises(ClusterError, match=r"rank 2 is dead; .*it needs .* missing"):
        found.recover(RankLost(2, "is dead"))


@pytest.mark.parametrize(("survives", "rank"), [(False, 2), (True, 0)])
def test_what_cannot_be_survived_is_raised(survives, rank):
    found, _ = started(survives=survives)
    with pytest.raises(RankLost):
        found.recover(RankLost(rank, "is dead"))


def test_with_no_stage_left_the_last_loss_is_raised():
    found, _ = started()
    for rank in (1, 2):
        found.recover(RankLost(rank, "is dead"))
    with pytest.raises(RankLost, match="rank 3"):
        found.recover(RankLost(3, "is dead"))


# --- wide stages ------------------------------------------------------------------------------


def slices(found):
    return [(h.rank, h.start, h.stop, h.slices) for h in found.held]


@pytest.mark.parametrize(("rank", "left", "holders"), [
    (1, [(2, 0, 3, (0, 1)), (3, 3, 6, (0,)), (4, 3, 6, (1,))], ((0, 1),)),
    (2, [(1, 0, 3, (0, 1)), (3, 3, 6, (0,)), (4, 3, 6, (1,))], ((0, 1),)),
])
def test_a_lost_member_is_a_lost_slice_that_another_member_takes(rank, left, holders):
    found, port = started(grid="2x2")
    assert slices(found) == [(1, 0, 3, (0,)), (2, 0, 3, (1,)), (3, 3, 6, (0,)), (4, 3, 6, (1,))]
    found.recover(RankLost(rank, "is dead"))
    assert slices(found) == left
    assert found.grid == Grid((1, 2))
    first = port.setups[left[0][0]]
    assert (first.holders, first.cut, first.widths) == (holders, CUT, (1, 2))
    assert found.changes[0].moved == 3


def test_a_spare_takes_the_slices_of_a_leader_and_leads():
    found, port = started(grid="2x2", spares=1)
    assert (5, Rehearse) in port.orders
    found.recover(RankLost(3, "is dead"))
    assert slices(found) == [(1, 0, 3, (0,)), (2, 0, 3, (1,)), (5, 3, 6, (0,)), (4, 3, 6, (1,))]
    assert port.setups[5].port == PortName(2, 0)
    assert port.setups[5].holders == ((0,), (1,))


def test_a_stage_without_members_merges_with_the_one_before():
    found, port = started(grid="2x2")
    port._dies = [4]
    found.recover(RankLost(3, "is dead"))  # 4 dies with both slices on it
    assert slices(found) == [(1, 0, 6, (0,)), (2, 0, 6, (1,))]
    assert found.grid == Grid((2,))
    assert found.changes[0].lost == (3, 4)
    assert "rank 3 is dead; rank 4 is dead" in str(found.changes[0])


def test_a_member_that_reports_a_failure_is_excluded_by_its_rank():
    found, _ = started(grid="2x2", spares=1)
    found.recover(RankLost(1, "is dead"))
    found.recover(StageFailed(
        rank=5, host="host5", run_id=None, summary="waited 8.0 s for SUM from rank 2",
        remote_traceback=""))
    assert found.lost == {1, 5}  # node 1 is the spare's by now
    assert slices(found)[0] == (2, 0, 3, (0, 1))
    assert "rank 5 on host5 failed: waited 8.0 s for SUM" in str(found.changes[-1])
