"""What `doctor` says of the library and of what makes it slow, by what ranks told."""

from __future__ import annotations

import pytest

from pipeinfer.cli.doctor import _check_library, _check_sockets

RANK = {"kernels": "avx avx2", "unused": [], "filter": True, "short_runs": ("f16", "q8_0"),
        "huge_pages": "madvise"}


def told(*changes):
    return {finding.what: finding for finding in _check_library(
        [{"rank": rank} | RANK | change for rank, change in enumerate(changes)])}


def test_ranks_that_lack_nothing_get_no_advice():
    found = told({}, {})
    assert set(found) == {"llama.cpp's kernels", "short runs"}
    assert not any(finding.remedy for finding in found.values())


@pytest.mark.parametrize(("change", "what", "advice"), [
    ({"huge_pages": "never"}, "huge pages", "echo madvise > /sys/kernel/mm/transparent_hugepage"),
    ({"filter": False}, "layer filter", "install a C compiler"),
    ({"short_runs": ()}, "short runs", "install a C compiler"),
    ({"unused": ["avx512f"]}, "llama.cpp's kernels", "--native"),
    ({"kernels": "avx"}, "llama.cpp's kernels", "compile one for what all processors have")])
def test_ranks_that_lack_something_are_named_with_what_helps(change, what, advice):
    found = told({}, change, {})[what]
    assert advice in found.remedy
    assert "ranks 1)" in found.detail or "differ" in found.detail


def test_a_system_without_huge_pages_is_not_blamed():
    assert "huge pages" not in told({"huge_pages": ""})


@pytest.mark.parametrize(("ranks", "level", "says"), [
    (1, "warn", "give it slots=2"), (2, "ok", "")])
def test_a_host_with_two_sockets_is_shown(ranks, level, says):
    nodes = [[0, 16, 64 << 30, [10, 21]], [1, 16, 32 << 30, [21, 10]]]
    found = _check_sockets("xeon1", nodes, ranks)
    assert found.level == level
    assert "node 1: 16 cores, 32 GiB; distance 2.1 of the own" in found.detail
    assert says in found.remedy
