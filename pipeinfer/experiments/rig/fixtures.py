"""Fixtures that the tests and the benchmarks' own tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shards and remembered widths of this run only, also in the jobs that tests launch."""
    before = os.environ.get("PIPEINFER_CACHE")
    os.environ["PIPEINFER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["PIPEINFER_CACHE"]
    else:
        os.environ["PIPEINFER_CACHE"] = before
