"""Grids of real stages and a real head in threads, over toy slices: the tokens of a plain loop."""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest

from pipeinfer.backends.composed import WideBackend
from pipeinfer.backends.team import Region, SharedTeam
from pipeinfer.core.grid import Grid, deal
from pipeinfer.core.messages import Cancel, Decode, LaneOpen, Part, RunCancelled, Tag, Verdict
from pipeinfer.core.policy import Ablation, CancelPath, Policy
from pipeinfer.core.sampling import choose
from pipeinfer.core.types import Request, SamplingParams, make_rows
from pipeinfer.errors import ProtocolError, TransportTimeout
from pipeinfer.runtime.drafts import DraftWorker
from pipeinfer.runtime.head import Head
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.runtime.stage import Stage
from pipeinfer.scheduler.events import Emit, Finish
from pipeinfer.scheduler.scheduler import Scheduler
from pipeinfer.scheduler.settings import Limits
from pipeinfer.strategies.proposers.draft_model import DraftModel
from pipeinfer.transport.inproc import local_ports
from pipeinfer_lab.faults.delaying import DelayingPort
from tests.kit.sample import matrix
from tests.kit.teams import WAYS
from tests.kit.toy import ToyBackend, ToySpec, draft_of
from tests.kit.toy_slices import ToyEmbedding, ToySlice, bounds, shape_of

SPEC = ToySpec(n_vocab=48, n_layers=4, n_embd=16)
PROMPT = tuple(range(3, 12))
N_TOKENS = 24
#: members of each stage, slices of each stage
GRIDS = {
    "1x2": ((2,), (2,)), "1x3": ((3,), (3,)), "2x2": ((2, 2), (2, 2)), "1x4": ((4,), (4,)),
    "two slices on one rank": ((1,), (2,)), "2,1": ((2, 1), (2, 2)), "1,3": ((1, 3), (1, 4)),
}
POLICIES = {
    "iterative": {"policy": Policy.ITERATIVE},
    "speculative": {"policy": Policy.SPECULATIVE, "draft_max": 3},
    "pipeinfer": {"policy": Policy.PIPEINFER, "draft_max": 2, "alternatives": 1, "credit": 6},
    "no cancel": {"policy": Policy.PIPEINFER, "draft_max": 2, "credit": 6,
                  "ablations": frozenset({Ablation.CANCEL})},
}
SAMPLERS = {"greedy": SamplingParams(),
            "sampled": SamplingParams(temperature=0.9, top_k=20, key=1234)}


def members_of(stage_layers, holders, team_of):
    """The backend of each member of a stage, and its team."""
    (start, stop), count = stage_layers, sum(map(len, holders))
    found = []
    for member, own in enumerate(holders):
        team = team_of(shape_of(SPEC, holders, member, last=stop == SPEC.n_layers), member)
        slices = [[ToySlice.of(SPEC, start, stop, index, count)] for index in own]
        found.append((WideBackend(slices, team, (start, stop), SPEC.n_layers,
                                  ToyEmbedding(SPEC) if start == 0 else None), team))
    return found


class Cluster:
    """A head and the members of a grid, each with a thread of its own."""

    def __init__(self, grid, way, limits, *, late=None, cancel_path=CancelPath.DIRECT, dealt=deal):
        widths, slices = GRIDS[grid]
        self.grid = Grid(widths)
        ports = local_ports(self.grid.n_nodes + 1)
        if late is not None:
            ports[1:] = [late(port) for port in ports[1:]]
        self.cuts = list(zip(bounds(SPEC.n_layers, len(widths)), slices, strict=True))
        self.stages, self.teams, self.errors = [], [], []
        for stage, (layers, count) in enumerate(self.cuts, 1):
            nodes = self.grid.members(stage)
            holders = dealt(count, len(nodes))
            region = Region.private(shape_of(SPEC, holders, 0)) if way == "memory" else None

            def team_of(shape, member, nodes=nodes, region=region):
                def watch(_index):
                    ports[nodes[member]].take(Tag.ERROR)

                if region is not None:
                    return SharedTeam(shape, region, watch)
                return PortTeam(shape, ports[nodes[member]], nodes, watch)

            for node, (backend, team) in zip(nodes, members_of(layers, holders, team_of),
                                             strict=True):
                self.teams.append(team)
                self.stages.append(Stage(ports[node], self.grid, backend, team=team,
                                         cancel_path=cancel_path, timeout=30))
        self.threads = [threading.Thread(target=self._serve, args=(stage,), daemon=True)
                        for stage in self.stages]
        for thread in self.threads:
            thread.start()
        worker = None
        if limits.policy is not Policy.ITERATIVE:
            draft = DraftModel(ToyBackend.load(draft_of(SPEC, 0.7)), SPEC.n_vocab, paths=4)
            worker = DraftWorker(draft, ports[0].wake)
        self.head = Head(ports[0], self.grid,
                         Scheduler(limits, drafts=worker is not None, validate=True), worker,
                         cancel_path=cancel_path, timeout=30)

    def _serve(self, stage):
        try:
            stage.serve()
        except Exception as error:
            self.errors.append(error)
            raise

    def generate(self, params, known=(), until=N_TOKENS):
        """The tokens, of which `known` came from another cluster; so many of them, or all."""
        self.head.submit(Request(0, PROMPT, N_TOKENS, params, ignore_eos=True), output=known)
        tokens = list(known)
        while not self.errors:
            match self.head.next_news(30):
                case Emit(_, choice):
                    tokens.append(choice.token)
                    if len(tokens) == until < N_TOKENS:
                        self.head.abort(0, "moved")
                case Finish():
                    return tokens
        raise self.errors[0]

    def close(self):
        if self.head.draft is not None:
            self.head.draft.close(10)
        self.head.drain(30)
        reports = self.head.shutdown(10)
        assert sorted(reports) == list(range(1, self.grid.n_nodes + 1))
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        return reports


def plain_loop(grid, params):
    """The same slices one row at a time, all in this thread's own process."""
    _, slices = GRIDS[grid]
    backends = []
    for layers, count in zip(bounds(SPEC.n_layers, len(slices)), slices, strict=True):
        port = local_ports(2)[1]
        (backend, team), = members_of(
            layers, deal(count, 1), lambda shape, member, port=port: PortTeam(
                shape, port, (1,), lambda index: None))
        backends.append((backend, team))
    path, run_id = list(PROMPT), 0
    for at in range(len(PROMPT) + N_TOKENS - 1):
        values = None
        for backend, team in backends:
            assert not team.begin(run_id, cancelled=False)
            values = backend.decode(make_rows([(path[at], at, (0,), True)]), values)
        run_id += 1
        if at >= len(PROMPT) - 1:
            path.append(choose(values[0], params, np.array(path, np.int32), at).token)
    return path[len(PROMPT):]


@pytest.fixture(scope="module")
def expected():
    known = {}

    def tokens(grid, sampler):
        if (grid, sampler) not in known:
            known[grid, sampler] = plain_loop(grid, SAMPLERS[sampler])
        return known[grid, sampler]

    return tokens


@pytest.mark.parametrize(("policy", "grid", "how"), matrix(
    POLICIES, GRIDS, itertools.product(WAYS, SAMPLERS)))
def test_a_grid_gives_the_tokens_of_a_plain_loop_over_its_slices(expected, policy, grid, how):
    way, sampler = how
    limits = Limits(n_ctx=128, exact_width=4, **POLICIES[policy])
    cluster = Cluster(grid, way, limits)
    assert cluster.generate(SAMPLERS[sampler]) == expected(grid, sampler)
    cluster.close()


@pytest.mark.parametrize(("grid", "how", "seed"), matrix(
    ["2x2", "1,3", "1x3"], itertools.product(WAYS, CancelPath), range(4)))
def test_no_interleaving_of_late_and_lost_messages_changes_a_token(expected, grid, how, seed):
    """Every message of a member comes when it likes, and some cancellations never."""
    way, path = how
    rng = random.Random(seed)

    def late(port):
        def due(tag, envelope, now):
            if tag is Tag.CANCEL and rng.random() < 0.3:
                return None
            return now + rng.choice((0.0, 0.0, 1e-4, 2e-3))

        return DelayingPort(port, due)

    limits = Limits(n_ctx=128, exact_width=4, **POLICIES["pipeinfer"])
    cluster = Cluster(grid, way, limits, late=late, cancel_path=path)
    assert cluster.generate(SAMPLERS["greedy"]) == expected(grid, "greedy")
    reports = cluster.close()
    fates = [reports[node]["runs"] for node in cluster.grid.members(1)]
    assert sum(fate["skipped"] + fate["stopped"] for fate in fates) >= 0
    computed = {fate["computed"] for fate in fates}
    assert len(computed) == 1  # all members of a stage have gone the same way


@pytest.mark.parametrize(("grid", "way"), matrix(["1,3", "2,1", "1x3"], WAYS))
def test_tokens_are_the_same_while_slices_move_between_members(expected, grid, way):
    """As after rebalances: any member may hold any slices, the leader the first, and what had come
    by then is replayed; every message comes when it likes."""
    rng = random.Random(grid)

    def dealt(count, width):
        while True:
            owners = [0, *rng.choices(range(width), k=count - 1)]
            if set(owners) == set(range(width)):
                held = [tuple(i for i, own in enumerate(owners) if own == k) for k in range(width)]
                return tuple(sorted(held))

    def late(port):
        return DelayingPort(port, lambda tag, envelope, now: now + rng.choice((0.0, 0.0, 1e-3)))

    limits = Limits(n_ctx=128, exact_width=4, **POLICIES["pipeinfer"])
    tokens = []
    for until in (rng.randrange(1, 8), rng.randrange(9, 18), N_TOKENS):
        cluster = Cluster(grid, way, limits, dealt=dealt, late=late)
        tokens = cluster.generate(SAMPLERS["sampled"], tuple(tokens), until)
        cluster.close()
    assert tokens == expected(grid, "sampled")


def test_a_cancellation_stops_the_members_within_a_run():
    """The leader hears of it between two layers: nobody computes the rest."""
    ports = local_ports(3)
    holders = ((0,), (1,))
    teams, stages, seen = [], [], []

    def team_of(shape, member):
        teams.append(PortTeam(shape, ports[1 + member], (1, 2), lambda index: None))
        return teams[-1]

    for node, (backend, team) in enumerate(members_of((0, SPEC.n_layers), holders, team_of), 1):
        stages.append(Stage(ports[node], Grid((2,)), backend, team=team, timeout=20))
    for node in (1, 2):
        ports[0].send(node, Tag.TRANSACTION, LaneOpen(0, SamplingParams()))
        ports[0].send(node, Tag.TRANSACTION, Decode(
            0, -1, make_rows([(3, 0, (0,), True)]), (0,), speculative=True))
    slow = stages[1]._backend._slices[0][0]
    inner = slow._summed

    def summed(part, layer, *, feed_forward):
        if layer == 1 and not feed_forward:
            ports[0].send(1, Tag.CANCEL, Cancel((0,)))
            time.sleep(0.01)
        seen.append((layer, feed_forward))
        return inner(part, layer, feed_forward=feed_forward)

    slow._summed = summed
    threads = [threading.Thread(target=lambda one=one: [one._handle(one._receive())
                                                        for _ in range(2)]) for one in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(ports[0].take(Tag.RESULT).message, RunCancelled)
    assert max(seen)[0] < SPEC.n_layers - 1
    for stage in stages:
        assert stage.stats.runs["stopped"] == 1
        assert all(shard.used_cells() == 0 for shard in stage._backend._parts)


@pytest.mark.parametrize("part", [
    Part(5, 1, 0, 0, Verdict.GO, np.zeros(1, np.float32)),
    Part(1, 1, 0, 7, Verdict.GO, np.zeros(16, np.float32)),
    Part(1, 1, 9, 0, Verdict.GO, np.zeros(16, np.float32)),
    Part(1, 1, 0, 0, Verdict.GO, np.zeros(3, np.float32)),
    Cancel((1,)),
], ids=["no such member", "another sum", "another run", "too short", "no part"])
def test_partial_results_that_fit_no_sum_are_refused(part):
    ports = local_ports(3)
    shape = shape_of(SPEC, ((0,), (1,)), 0)

    def watch(_index):
        raise TransportTimeout(rank=1, peer=2, tag="SUM", run_id=0, seconds=1.0)

    team = PortTeam(shape, ports[1], (1, 2), watch)
    team.begin(0, cancelled=False)
    team.arm(None)
    ports[2].send(1, Tag.SUM, part)
    assert not team.part(0).add(np.zeros(16, np.float32), 0)
    with pytest.raises(ProtocolError, match="sum"):
        team.check()
