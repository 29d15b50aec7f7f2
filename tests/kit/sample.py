"""What the sample leaves out (see `tests.kit.fixtures`): examples of properties
and cells of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
FULL = pytest.mark.full


def examples(count: int) -> settings:
    """`count` examples in the full run, fewer in the sample; the rest as in tests/conftest.py."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))


def fewer(count: T, sampled: T) -> T:
    """`count` of something in the full run, `sampled` of it in the sample; or one thing, and a
    smaller one."""
    return count if settings.default.max_examples >= 100 else sampled


def full(*values: Any) -> Any:
    """A case that only the full run makes."""
    return pytest.param(*values, marks=FULL)


def mostly_full(values: Iterable[Any], *sampled: Any) -> list[Any]:
    """Cases of which the sample makes `sampled` alone."""
    values = list(values)
    assert all(value in values for value in sampled), sampled
    return [value if value in sampled else full(value) for value in values]


def matrix(*axes: Iterable[Any]) -> list[Any]:
    """Every combination; the sample makes as few as show each value of each axis."""
    lists = [list(axis) for axis in axes]
    longest = max(map(len, lists))
    shown = {tuple(k % len(axis) for axis in lists) for k in range(longest)}
    return [pytest.param(*(axis[k] for axis, k in zip(lists, place, strict=True)),
                         marks=() if place in shown else FULL)
            for place in itertools.product(*(range(len(axis)) for axis in lists))]
