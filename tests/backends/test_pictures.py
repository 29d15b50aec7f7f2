"""Pictures and sound through stages: the bits of mtmd's own helper in one context, for every family
whose projector was tried, at every cut that is allowed.

All projectors are random, as are all text models but SmolLM2 (see tests/kit/random_projectors.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.backends.llamacpp.places import Places
from pipeinfer.core.types import END, Media, make_rows
from pipeinfer.models.gguf import ModelFile
from pipeinfer.models.layers import barred
from pipeinfer.models.shard import extract_shard, stage_layers
from tests.kit.llama import load
from tests.kit.picture_oracle import MARK, reference
from tests.kit.random_projectors import FAMILIES, medium, write_family
from tests.kit.sample import examples, fewer

N = 12


def _cuts(model):
    """The whole, at every layer, and into three, where stage 1 can add what pictures need."""
    n, (bars, _) = model.n_layers, barred(model)
    deep = model.arch_get("n_deepstack_layers") or 0
    step = 1 if n < 13 else 9
    cuts = [[(0, n)], *([(0, k), (k, n)] for k in range(1, n, step)), stage_layers(n, 3)]
    return [cut for cut in cuts if bars.isdisjoint(cut) and cut[0][1] > deep]


def _pieces(prompt, media):
    """Runs of text and of whole pictures."""
    place, last = 0, len(prompt) - 1
    for one in (*media, None):
        stop = len(prompt) if one is None else one.start
        if stop > place:
            yield make_rows([(prompt[i], i, (0,), i == last) for i in range(place, stop)]), None
        if one is not None:
            place = one.stop
            part = one.part(0, len(one.rows))
            yield make_rows([(-1, one.start + k, (0,), one.start + k == last)
                             for k in range(len(one.rows))], media=part), one.rows


def _through(shards, rows, hidden):
    for shard in shards:
        hidden = shard.decode(rows, hidden)
    return hidden


def _generated(shards, prompt, media):
    for rows, given_rows in _pieces(prompt, media):
        hidden = _through(shards, rows, given_rows)
    out, place = [hidden[-1].copy()], len(prompt)
    for k in range(N):
        rows = make_rows([(int(out[-1].argmax()), place + k, (0,), True)])
        out.append(_through(shards, rows, None)[-1].copy())
    return out


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_gives_the_bits_of_mtmds_helper(family, tmp_path):
    path, mmproj = write_family(family, tmp_path)
    model = ModelFile(path)
    media = [medium(family)] + ([] if family == "ultravox" else [medium(family, 2)])
    text = f"Look at {f'{MARK} and '.join([''] * len(media))}{MARK} and say more."
    want, prompt, found = reference(model, mmproj, text, media, N)
    assert all(np.isfinite(one).all() for one in want)
    cuts = _cuts(model)
    assert cuts
    for cut in fewer(cuts, [cuts[0], cuts[-1]]):
        shards = [load(extract_shard(model, a, b, cache_dir=tmp_path), (a, b), model.n_layers,
                       n_ctx=2048, n_batch=1024)
                  for a, b in cut]
        got = _generated(shards, prompt, found)
        assert [a.tobytes() == b.tobytes() for a, b in zip(got, want, strict=True)] \
            == [True] * len(want), cut
        for shard in shards:
            shard.close()


@pytest.mark.parametrize("family", ["qwen3vl", "gemma3", "qwen35"])
def test_a_branch_behind_a_picture_continues_as_alone(family, llama, tmp_path):
    """Copies, removals and cells that die below living ones, behind rows that share a position."""
    path, mmproj = write_family(family, tmp_path)
    model = ModelFile(path)
    want, prompt, found = reference(model, mmproj, f"See {MARK} and {MARK} here",
                                    [medium(family), medium(family, 2)], N)
    backend = llama(path, n_ctx=2048, n_batch=1024)
    for rows, given_rows in _pieces(prompt, found):
        hidden = backend.decode(rows, given_rows)
    first, n = hidden[-1].copy(), len(prompt)
    assert first.tobytes() == want[0].tobytes()
    whole = not backend.capabilities.takes_back
    backend.seq_cp(0, 1, 0, END if whole else n)
    wrong = make_rows([((int(first.argmax()) + 1 + k) % 256, n + k, (1,), True) for k in range(3)])
    backend.decode(wrong)
    backend.seq_cp(0, 2, 0, END if whole else n)
    backend.seq_rm(1, 0, END)
    place, token = n, int(first.argmax())
    for k in range(4):
        found_row = backend.decode(make_rows([(token, place, (2,), True)]))[-1].copy()
        assert found_row.tobytes() == want[k + 1].tobytes(), k
        place, token = place + 1, int(found_row.argmax())
    backend.seq_rm(2, 0, END)
    backend.seq_rm(0, 0, END)
    for rows, given_rows in _pieces(prompt, found):  # the ids have forgotten the pictures
        hidden = backend.decode(rows, given_rows)
    assert hidden[-1].tobytes() == want[0].tobytes()


class _Slow:
    """Positions as a list per sequence id: what `Places` computes from the pictures alone."""

    def __init__(self):
        self.at = {}

    def add(self, ids, place, n, n_pos):
        for one in ids:
            own = self.at.setdefault(one, {})
            first = self.next(one, place)
            own.update({place + k: (first, first + n_pos) for k in range(n)})

    def next(self, seq_id, place):
        before = self.at.get(seq_id, {}).get(place - 1)
        return place if place == 0 else before[1]


_steps = st.lists(st.one_of(
    st.tuples(st.just("text"), st.integers(0, 2), st.integers(1, 4)),
    st.tuples(st.just("picture"), st.integers(0, 2), st.integers(1, 12)),
    st.tuples(st.just("copy"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("remove"), st.integers(0, 2), st.integers(0, 3))), max_size=25)


@examples(200)
@given(_steps)
def test_places_follow_pictures_copies_and_removals(steps):
    places, slow, ends = Places(), _Slow(), {0: 0, 1: 0, 2: 0}
    edges = {0: [0], 1: [0], 2: [0]}  # where a sequence may be cut
    for kind, one, size in steps:
        begin = ends[one]
        if kind == "text":
            rows = make_rows([(0, begin + k, (one,), False) for k in range(size)])
            for k in range(size):
                slow.add([one], begin + k, 1, 1)
            assert places.positions(rows) == [slow.at[one][begin + k][0] for k in range(size)]
        elif kind == "picture":
            n_pos = max(1, size // 3)
            slow.add([one], begin, size, n_pos)
            for first in range(0, size, 5):  # in runs
                stop = min(first + 5, size)
                part = Media(n_pos, True, np.zeros((3, stop - first), np.int32), offset=first,
                             total=size)
                rows = make_rows([(-1, begin + k, (one,), False) for k in range(first, stop)],
                                 media=part)
                assert set(places.positions(rows)) == {slow.at[one][begin][0]}
        elif kind == "copy" and one != size:
            places.remove(size, 0, END)
            places.copy(one, size, 0, ends[one])
            slow.at[size] = dict(slow.at.get(one, {}))
            ends[size], edges[size] = ends[one], list(edges[one])
        elif kind == "remove":
            cut = edges[one][size % len(edges[one])]
            places.remove(one, cut, END)
            slow.at[one] = {k: v for k, v in slow.at.get(one, {}).items() if k < cut}
            ends[one], edges[one] = cut, [edge for edge in edges[one] if edge <= cut]
        if kind in ("text", "picture"):
            ends[one] += size
            edges[one].append(ends[one])
        for seq_id, own in slow.at.items():
            assert [places.of(seq_id, place) for place in own] == [a for a, _ in own.values()]
            assert places.of(seq_id, ends[seq_id]) == slow.next(seq_id, ends[seq_id])
            assert places.of(seq_id, END) == END
