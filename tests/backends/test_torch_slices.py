"""Slices of layers on torch: together they are the model, whoever holds which of them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeinfer.backends.composed import WideBackend
from pipeinfer.backends.exact_width import exact_width
from pipeinfer.backends.team import PeerFailed
from pipeinfer.core.types import END, make_rows
from pipeinfer.errors import BackendError, ModelError, PlanError, UnsupportedArchitecture
from pipeinfer.models.locate import open_model
from pipeinfer.models.slice_parts import Slice, sizes_of
from pipeinfer.models.slices import slices_of, widths_of
from tests.kit.gguf_files import write_sliceable
from tests.kit.rows import chain
from tests.kit.sample import full, mostly_full
from tests.kit.teams import WAYS, teams_of
from tests.kit.tiny_torch import (
    CONFIG_MAPPING,
    FAMILIES,
    LAYERS,
    SMALL,
    VOCAB,
    forward,
    load,
    tokens_of,
    torch,
)

from pipeinfer.backends.pytorch import weights  # isort: skip  (needs torch)
from pipeinfer.backends.pytorch.embedding import open_embedding  # isort: skip  (needs torch)
from pipeinfer.backends.pytorch.options import TorchOptions  # isort: skip

#: see test_torch_backend; parts are summed up in another order, which is as much again
TOLERANCE = 2e-5
BF16 = {"options": TorchOptions("cpu", "bfloat16")}


class Stage:
    """All members of one stage, each in a thread of its own."""

    def __init__(self, path, holders, shares=None, layers=None, way="messages", **sizes):
        model = open_model(path)
        self.cut = slices_of(model, shares or [1.0] * sum(map(len, holders)))
        start, stop = layers or (0, model.n_layers)
        last = stop == model.n_layers
        vocabulary = tuple(one.vocab for one in self.cut) if last else ()
        self.teams = teams_of(way, holders, capacity=64 * model.n_embd, vocabulary=vocabulary)
        self.slices = {index: load(path, (start, stop), piece=self.cut[index], **sizes)
                       for held in holders for index in held}
        dtype = self.slices[0].options.dtype
        self.members = [WideBackend(
            [[self.slices[index]] for index in held], team, (start, stop), model.n_layers,
            open_embedding(path, dtype) if start == 0 else None)
            for held, team in zip(holders, self.teams, strict=True)]
        self.run = 0

    def each(self, rows, hidden=None, should_stop=None):
        """What every member gives for the rows, or raises."""
        assert not any([team.begin(self.run, cancelled=False) for team in self.teams])
        self.run += 1

        def one(member):
            try:
                return member.decode(rows, hidden, should_stop)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(one, self.members))

    def decode(self, rows, hidden=None):
        """What the leader gives."""
        found = self.each(rows, hidden)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found[0]

    def close(self):
        for member, team in zip(self.members, self.teams, strict=True):
            member.close()
            team.close()


@pytest.fixture
def stage():
    with contextlib.ExitStack() as made:
        yield lambda *args, **given: made.enter_context(contextlib.closing(Stage(*args, **given)))


# --- parity -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", mostly_full(
    [family for family in FAMILIES if not family.startswith("phi3")],  # refused, see below
    "llama-tied-bias", "qwen2", "qwen3", "gemma2"))
def test_slices_of_a_folder_have_the_logits_of_transformers(models, stage, family):
    model, path = models(family)
    tokens = tokens_of(40)
    wide = stage(path, ((0, 1),))
    found = np.concatenate([wide.decode(chain(tokens[a:b], a))
                            for a, b in ((0, 30), (30, 37), (37, 38), (38, 40))])
    assert found.shape == (40, VOCAB)
    assert np.abs(found - forward(model, tokens)).max() < TOLERANCE


@pytest.mark.parametrize(("kind", "piece", "heads"), [
    ("llama", None, 2), ("llama", Slice((1, 2), (0, 96), (0, VOCAB)), 1), ("phi3", None, 2)])
def test_heads_are_those_of_the_config_or_the_slice(kind, piece, heads):
    """No weight has to be there for it."""
    shard = weights._assemble(CONFIG_MAPPING[kind](**SMALL), 1, 3, "cpu", piece)
    assert shard.heads(2) == (heads, 16)


@pytest.mark.parametrize(("holders", "shares"), [
    (((0, 1),), [3, 1]), (((0,), (1,), (2,)), [3, 2, 1]), (((0, 1), (2, 3)), [1, 1, 1, 1])],
    ids=["unequal", "repeated and unequal", "repeated"])
def test_shares_may_be_unequal_and_kv_heads_repeated(models, stage, holders, shares):
    """Of 4 query and 2 KV heads: 3 slices repeat one KV head, 4 both."""
    model, path = models("qwen3")
    tokens = tokens_of(24)
    wide = stage(path, holders, shares)
    assert any(one.queries for one in wide.cut) == (len(shares) > 2)
    found = wide.decode(chain(tokens))
    assert np.abs(found - forward(model, tokens)).max() < TOLERANCE


@pytest.mark.parametrize(("architecture", "qtype"), [
    ("llama", "F32"), ("qwen2", "Q8_0"), full("qwen3", "BF16"), full("llama", "Q4_0")])
def test_slices_of_a_gguf_file_are_the_whole_file(tmp_path, stage, architecture, qtype):
    """In two stages, of slices and whole."""
    path = write_sliceable(tmp_path / "m.gguf", architecture=architecture, qtype=qtype).path
    tokens = np.random.default_rng(3).integers(0, 300, 30).tolist()
    whole = load(path).decode(chain(tokens))
    wide = stage(path, ((0,), (1,)))
    assert np.abs(wide.decode(chain(tokens)) - whole).max() < 1e-4 * whole.std()
    first, last = stage(path, ((0, 1),), layers=(0, 1)), load(path, (1, 2))
    mixed = last.decode(chain(tokens), first.decode(chain(tokens)))
    assert np.abs(mixed - whole).max() < 1e-4 * whole.std()
    front, end = load(path, (0, 1)), stage(path, ((0, 1),), layers=(1, 2))
    mixed = end.decode(chain(tokens), front.decode(chain(tokens)))
    assert np.abs(mixed - whole).max() < 1e-4 * whole.std()


def test_in_bfloat16_slices_are_as_near_as_the_whole(models, stage):
    model, path = models("llama")
    tokens = tokens_of(40)
    exact, rows = forward(model, tokens), chain(tokens)
    whole = load(path, **BF16).decode(rows)
    wide = stage(path, ((0,), (1,)), **BF16)
    found = wide.decode(rows)
    assert np.abs(found - exact).mean() < 1.5 * np.abs(whole - exact).mean()
    assert wide.slices[0].info.weight_bytes < 0.6 * load(path, **BF16).info.weight_bytes


def test_residual_rows_are_the_same_on_all_members(models, stage):
    _, path = models("gemma3")
    for sizes in ({}, BF16):
        wide = stage(path, ((0, 2), (1,)), [1, 1, 1], layers=(0, 3), **sizes)
        one, other = wide.each(chain(tokens_of(9)))
        assert one.shape == (9, 64)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("sizes", [{}, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_slices_give_the_same_bits_whoever_holds_them(models, stage, way, sizes):
    _, path = models("qwen2")
    tokens, found = tokens_of(50), []
    for holders in (((0, 1, 2),), ((0,), (1,), (2,)), ((0, 2), (1,))):
        wide = stage(path, holders, [1, 1, 1], way=way, **sizes)
        found.append(np.concatenate([
            wide.decode(chain(tokens[a:b], a)) for a, b in ((0, 40), (40, 45), (45, 46), (46, 50))
        ]))
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


def test_rows_up_to_the_exact_width_are_single_rows(models, stage):
    """The width is measured on slices without peers, and holds for their sums."""
    _, path = models("llama")
    wide = stage(path, ((0,), (1,)))
    alone = load(path, piece=wide.cut[0])
    width = min(exact_width(one) for one in (alone, load(path, piece=wide.cut[1])))
    assert width >= 4
    tokens = tokens_of(12 + width)
    wide.decode(chain(tokens[:12]))
    together = wide.decode(chain(tokens[12:], 12))
    for member in wide.members:
        member.seq_rm(0, 12, END)
    singles = [wide.decode(chain([token], 12 + i)) for i, token in enumerate(tokens[12:])]
    assert np.concatenate(singles).tobytes() == together.tobytes()


@pytest.mark.parametrize("holders", [((0,), (1,)), ((0, 1),)])
def test_joins_and_free_positions_reach_every_slice(models, stage, holders):
    _, path = models("llama")
    wide, whole = stage(path, holders), load(path)
    assert all(member.capabilities.free_positions for member in wide.members)
    found = []
    for backend, others in ((whole, [whole]), (wide, wide.members)):
        backend.decode(chain(tokens_of(6), ids=(0, 1)))
        backend.decode(chain(tokens_of(5, 1), 20))
        for one in others:
            one.seq_join(0, 1)
        found.append(backend.decode(make_rows([(5, 9, (1,), True)])))
    assert np.abs(found[0] - found[1]).max() < TOLERANCE
    lonely = load(path)
    lonely.decode(chain(tokens_of(6), ids=(0, 1)))
    assert np.abs(lonely.decode(make_rows([(5, 9, (1,), True)])) - found[0]).max() > 1e-2


# --- stopped, failed --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_decode_stopped_at_any_sum_leaves_no_cell(models, stage, way):
    _, path = models("llama")
    wide = stage(path, ((0,), (1, 2)), [1, 1, 1], way=way)
    wide.decode(chain([1, 2, 3]))
    for allowed in range(LAYERS):
        asked = []
        found = wide.each(chain(range(20), 3), None,
                          lambda a=allowed, seen=asked: seen.append(1) or len(seen) > a)
        assert found == [None, None]
        for one in wide.slices.values():
            assert one.cells() == [(i, frozenset([0])) for i in range(3)]
    other = stage(path, ((0,), (1, 2)), [1, 1, 1], way=way)  # was never stopped
    other.decode(chain([1, 2, 3]))
    rows = chain(tokens_of(4), 3)
    assert np.array_equal(wide.decode(rows), other.decode(rows))


@pytest.mark.parametrize("way", WAYS)
def test_a_slice_that_fails_ends_the_decode_everywhere(models, stage, monkeypatch, way):
    _, path = models("llama")
    wide = stage(path, ((0,), (1,)), way=way)
    wide.decode(chain([1, 2, 3]))

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(wide.slices[1]._shard.decoder[2].mlp, "forward", no_memory)
    leader, other = wide.each(chain([4, 5], 3))
    assert isinstance(leader, PeerFailed)
    assert isinstance(other, BackendError)
    assert "out of memory" in str(other)
    assert all(len(one.cells()) == 3 for one in wide.slices.values())


# --- what is held -----------------------------------------------------------------------------


def test_a_slice_holds_its_part_and_no_embedding(models):
    _, path = models("llama-tied-bias")
    cut = slices_of(open_model(path), [1, 1])
    whole, halves = load(path), [load(path, piece=one) for one in cut]
    assert all(not one.info.first and one.info.last for one in halves)
    assert all(one.info.n_vocab == VOCAB for one in halves)
    assert sum(one.info.cache_bytes for one in halves) == whole.info.cache_bytes
    assert sum(one.info.weight_bytes for one in halves) < 1.1 * whole.info.weight_bytes
    held = sum(parameter.untyped_storage().nbytes() for parameter in
               {id(p): p for module in halves[0]._shard.modules()
                for p in module.parameters()}.values())
    assert held == halves[0].info.weight_bytes  # no view of what belongs to others
    with pytest.raises(BackendError, match="previous shard's hidden rows"):
        halves[0].decode(chain([1]))
    with pytest.raises(PlanError, match="cannot be cut into the slice"):
        load(path, piece=Slice((0, 3), (0, 96), (0, VOCAB)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rows_looked_up_are_those_that_a_whole_shard_begins_with(models, family, dtype):
    _, path = models(family)
    tokens = np.array([0, 96, 5, 5, 0])
    whole = load(path, (0, 1), options=TorchOptions("cpu", dtype))
    with torch.inference_mode():
        wanted = whole._shard.embedding(torch.from_numpy(tokens)).float().numpy()
    table = open_embedding(path, dtype)
    assert table.rows(tokens).tobytes() == wanted.tobytes()
    assert table.rows(tokens[:0]).shape == (0, 64)
    for wrong in (-1, VOCAB):
        with pytest.raises(BackendError, match="outside the vocabulary of 97"):
            table.rows(np.array([1, wrong]))


def test_folders_can_be_cut_at_any_head(models, tmp_path):
    _, path = models("llama")
    model = open_model(path)
    sizes = sizes_of(model)
    assert (sizes.heads, sizes.kv_heads, sizes.key, sizes.ff, sizes.vocab) == (4, 2, 16, 96, 97)
    assert widths_of(model) == (1, 2, 3, 4)
    assert [one.name for one in slices_of(model, [2, 1])] == [
        "h0-1.f0-64.v0-64", "h1-2.f64-96.v64-97"]
    with pytest.raises(PlanError, match="cannot be cut into 5 slices: possible are 1, 2, 3, 4"):
        slices_of(model, [1] * 5)
    for name, shape, error, says in (
            ("mlp.experts.0.up.weight", (4, 4), UnsupportedArchitecture, "not known how to slice"),
            ("mlp.down_proj.weight", (96, 64), ModelError, r"\[64, 96\] expected"),
            ("self_attn.k_proj.weight", (48, 64), ModelError, "do not belong to 4 heads")):
        changed = open_model(path)
        place = f"model.layers.0.{name}"
        changed.tensors[place] = type(next(iter(changed.tensors.values())))(
            place, path, "F32", shape, 0, 0)
        with pytest.raises(error, match=says):
            sizes_of(changed)
