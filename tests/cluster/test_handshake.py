"""Which ranks may work together, by the llama.cpp that each runs."""

from __future__ import annotations

import msgspec
import pytest

from pipeinfer.cluster.handshake import _check_library, hello, notes_on
from pipeinfer.config import JobConfig
from pipeinfer.core.control import pack, unpack
from pipeinfer.errors import MismatchError, ProtocolError
from pipeinfer.host import Place
from pipeinfer.llama.library import NO_LIBRARY, llama_kernels, llama_version
from pipeinfer.nodes import RankInfo

MINE = hello(JobConfig(), Place(0, 2, None, 1, 0, 1))


def other(**change):
    facts = msgspec.structs.replace(MINE.facts, host="old1")
    return msgspec.structs.replace(MINE, rank=1, facts=facts, **change)


def refusal(mine, theirs, *, strict=False):
    with pytest.raises(MismatchError) as caught:
        _check_library(mine, theirs, strict=strict)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_rank_tells_its_library():
    assert (MINE.backend, MINE.kernels) == (llama_version(), llama_kernels())
    _check_library(MINE, other(), strict=True)


def test_another_library_is_refused():
    text = refusal(MINE, other(backend="xllamacpp 1"))
    assert text.startswith("rank 1 on old1 runs llama.cpp from xllamacpp 1, rank 0")
    assert MINE.backend in text


def test_other_kernels_are_noted_and_refused_when_strict():
    mine = msgspec.structs.replace(MINE, kernels="avx avx2 avx512f")
    theirs = other(kernels="avx avx2")
    _check_library(mine, theirs, strict=False)
    text = refusal(mine, theirs, strict=True)
    assert "kernels for less, rank 0" in text
    assert "for avx512f: use the same build" in text
    ranks = [RankInfo(0, "a", kernels=mine.kernels), RankInfo(1, "b", kernels=theirs.kernels)]
    assert "near-ties" in notes_on(ranks)[0]
    assert notes_on(ranks[:1]) == []
    assert notes_on([ranks[0], RankInfo(1, "dead", dead=True)]) == []


def test_a_rank_that_can_run_none_says_why():
    none = other(backend=f"{NO_LIBRARY}the prebuilt llama.cpp needs avx2", kernels="")
    assert refusal(MINE, none) == (
        "rank 1 on old1 runs no llama.cpp: the prebuilt llama.cpp needs avx2")
    _check_library(MINE, msgspec.structs.replace(none, asked_backend="torch"), strict=True)


def test_a_hello_without_its_kernels_is_refused():
    assert unpack(pack(MINE)) == MINE
    with pytest.raises(ProtocolError, match="damaged"):
        unpack(pack(MINE).replace(b'"kernels"', b'"colonels"'))
