"""A prediction head in slices proposes what the whole one does; jobs over ports."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from msgspec import structs

from pipeinfer.backends.llamacpp.head import LlamaHead
from pipeinfer.backends.team import PeerSilent, TeamShape
from pipeinfer.core.control import DraftReady, DraftSetup
from pipeinfer.core.drafting import FeedDraft
from pipeinfer.core.messages import Decode, Tag
from pipeinfer.core.sampling import log_total
from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import PlanError
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.heads import CompletedHead, HeadSource, SmallVocabulary
from pipeinfer.models.slices import slices_of
from pipeinfer.runtime.drafts import DraftPosts, SlicedDraft
from pipeinfer.runtime.port_team import PortTeam
from pipeinfer.runtime.pulse import Pulse
from pipeinfer.runtime.sliced_head import HeadMember, HeadSlices, joined, packed
from pipeinfer.strategies.proposers.target_head import TargetHead
from pipeinfer.transport.inproc import local_ports
from tests.backends.test_heads import OPTIONS, SIZES, TEXT, parts, tapped, written
from tests.kit.clockwork import write_eagle
from tests.kit.drafting import job
from tests.kit.random_model import RandomSpec, write_random_model
from tests.kit.sample import full

SAMPLED = SamplingParams(temperature=0.8, key=5)
SECONDS = 20.0
KINDS = ("glm4moe", "small", "eagle-own", *map(full, (
    "eagle", "deepseek2-mtp", "qwen35-mtp", "qwen35moe-mtp")))


class Files:
    """A target's rows, and a loader of its head: whole, or slice `start` of a setup."""

    def __init__(self, kind, folder):
        self.eagle, self.small, self.opened = kind.startswith("eagle"), None, []
        if self.eagle:
            self.target = ModelFile(write_random_model(folder / "m.gguf", RandomSpec(
                architecture="llama", n_layer=6, qtype="Q8_0", n_vocab=512)))
            self.file = ModelFile(write_eagle(folder / "head.gguf", self.target.path, (1, 3, 5),
                                              own=kind == "eagle-own"))
            taps = (1, 3, 5)
        else:
            self.target = self.file = written(folder, "glm4moe" if kind == "small" else kind)
            taps = (self.target.n_layers,)
        if kind == "small":
            self.small = SmallVocabulary((*range(60), 97, 98), 66)
        self.rows, _ = tapped(parts(self.target, (), folder), taps, [8] * 5)
        self.folder, self.cut = folder, slices_of(self.target, (1, 1))

    def open(self, cut=(), index=0):
        if self.eagle:
            source = CompletedHead(self.file, self.target, pieces=cut, index=index)
            path = self.folder / source.name
            path.write_bytes(b"".join(source.blocks()))
            assert path.stat().st_size == source.total
            return LlamaHead.open(path, 1, SIZES, 1, structs.replace(
                OPTIONS, head="eagle3", flash_attn="on"))
        source = HeadSource(self.file, self.small, self.target, cut[index] if cut else None)
        return LlamaHead.open(source, self.target.n_layers, SIZES, 1, structs.replace(
            OPTIONS, repack="off"))

    def backend(self, setup):
        self.opened.append(setup.index)
        return self.open(self.cut, setup.index), 1

    def proposer(self, setup, backend):
        return TargetHead(backend, setup.n_vocab, paths=setup.paths)


class Members:
    """Rank 0's end, and members 1, 2, ..., each of which has a thread."""

    def __init__(self, files, holders, timeout=SECONDS):
        self.ports = local_ports(len(holders) + 1)
        nodes = range(1, len(holders) + 1)
        shapes = [TeamShape(holders, k, "f32", 0) for k in range(len(holders))]
        self.members = [HeadMember(
            port, nodes, PortTeam(shape, port, nodes, lambda _: None),
            HeadSlices(port.node, files), timeout, Pulse())
            for shape, port in zip(shapes, self.ports[1:], strict=True)]
        setups = {node: DraftSetup("mtp", "m", "f", 256, 4, 64, 2, files.target.n_vocab, {}, {},
                                   target="m") for node in nodes}
        self.draft = SlicedDraft(DraftPosts(self.ports[0]), lambda: setups, "the head")
        self.errors, self.running = [], True
        self.threads = [threading.Thread(target=self.work, args=one, daemon=True)
                        for one in zip(self.members, self.ports[1:], strict=True)]

    def work(self, member, port):
        try:
            while self.running:
                if (envelope := port.take(Tag.TRANSACTION)) is not None:
                    member.handle(envelope.message)
                else:
                    port.wait(0.01)
        except Exception as error:
            self.errors.append(error)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.running = False
        for thread in self.threads:
            thread.join(SECONDS)

    def answer(self):
        for _ in range(int(SECONDS / 0.01)):
            if (found := self.draft.take()) is not None:
                return found
            self.ports[0].wait(0.01)
        raise AssertionError("no answer")


def same(found, expected):
    assert found
    assert [(one.parent, one.token, one.depth) for one in found] == [
        (one.parent, one.token, one.depth) for one in expected]
    assert [one.confidence for one in found] == pytest.approx(
        [one.confidence for one in expected], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("holders", [((0,), (1,)), full(((0, 1),))])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_propose_what_the_whole_head_does(kind, holders, tmp_path):
    files = Files(kind, tmp_path)
    whole = TargetHead(files.open(), files.target.n_vocab, paths=2)
    with Members(files, holders) as members:
        members.draft.await_ready(SECONDS)
        for number, (upto, params) in enumerate(itertools.product(
                range(20, 32, 4), (SamplingParams(), SAMPLED)), 1):
            lane = params.temperature > 0
            fed = FeedDraft(lane, 0, files.rows[:upto - 1])
            wanted = job(TEXT[:upto], job_id=number, lane=lane, params=params, max_tokens=6,
                         max_depth=4, branches=2, p_split=0.01)
            for one in (whole, members.draft):
                one.feed(fed)
            members.draft.start(wanted)
            found = members.answer()
            assert found.job_id == number
            same(found.proposals, whole.propose(wanted, lambda: False))
    assert not members.errors


def test_another_epoch_and_a_stopped_job_leave_the_head_able_to_draft(tmp_path):
    files = Files("glm4moe", tmp_path)
    wanted = job(TEXT[:20], max_tokens=6)
    with Members(files, ((0,), (1,))) as members:
        members.draft.start(wanted)  # before the members have loaded
        assert members.answer().proposals == ()
        members.draft.await_ready(SECONDS)
        members.draft.move()
        members.draft.await_ready(SECONDS)
        members.draft.feed(FeedDraft(0, 0, files.rows[:19]))
        members.draft.start(structs.replace(wanted, job_id=2))
        members.draft.stop(2)
        members.draft.start(structs.replace(wanted, job_id=3))
        found = members.answer()
        if found.job_id == 2:  # it had ended before
            found = members.answer()
        assert found.job_id == 3
        assert found.proposals
    assert not members.errors
    assert sorted(files.opened) == [0, 1]


def test_an_error_at_one_member_ends_the_draft_and_names_its_rank(tmp_path):
    files = Files("glm4moe", tmp_path)
    files.backend = lambda setup: (_ for _ in ()).throw(PlanError("no such slice"))
    with Members(files, ((0,), (1,))) as members:
        while not members.draft.lost:
            assert not members.draft.has_news
            members.ports[0].wait(0.01)
    assert "cannot draft: no such slice" in members.draft.lost


def test_a_member_that_does_not_answer_ends_the_wait(tmp_path):
    files = Files("glm4moe", tmp_path)
    with Members(files, ((0,), (1,)), timeout=0.3) as members:
        members.draft.await_ready(SECONDS)
        members.ports[0].send(2, Tag.TRANSACTION, job(TEXT[:20]))
        members.threads[1].join(SECONDS)
    assert [type(one) for one in members.errors] == [PeerSilent]


def test_a_member_sends_its_best_logits_and_the_sum_of_the_others():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 1000)).astype(np.float32) * 4
    own, *others = ((np.arange(k, 1000, 3), logits[:, k::3]) for k in range(3))
    whole = joined(1000, own, [packed(*one, few=False) for one in others])
    assert whole.tobytes() == logits.tobytes()
    few = [packed(*one, few=True) for one in others]
    assert len(few[0]) == 2 * (2 * 64 + 1)
    found = joined(1000, own, few)
    for row, expected in zip(found, logits, strict=True):
        best = np.argsort(-expected)[:20]
        assert (np.argsort(-row)[:20] == best).all()
        assert row[best].tobytes() == expected[best].tobytes()
        assert log_total(row) == pytest.approx(log_total(expected), abs=1e-3)


def test_what_the_members_send_survives_the_codec():
    from pipeinfer.core.codec import decode, encode
    from pipeinfer.core.messages import Part, Verdict
    from pipeinfer.core.types import make_rows
    setup = DraftSetup("mtp", "m", "f", 64, 4, 64, 1, 8, {}, {}, target="m",
                       cut=("h0-1.f0-64.v0-160", "h1-2.f64-128.v160-320"), index=1)
    logits = packed(np.arange(5), np.eye(2, 5, dtype=np.float32), few=True)
    part = Part(1, 0, 7, 2, Verdict.GO, logits)
    step = Decode(7, -1, make_rows([(3, 4, (0,), True)]), (0,), (), speculative=True,
                  hidden=np.ones((1, 8), np.float32))
    for message in (setup, part, step, DraftReady(1, "h", 1, 2, 3)):
        assert decode(encode(message)) == message
