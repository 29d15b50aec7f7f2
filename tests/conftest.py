"""Settings of all tests: no clocks in property tests, no shards in the user's own cache."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("pipeinfer", deadline=None, derandomize="CI" in os.environ,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipeinfer")


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """Shards and remembered widths of this run only, also in the jobs that tests launch."""
    before = os.environ.get("PIPEINFER_CACHE")
    os.environ["PIPEINFER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["PIPEINFER_CACHE"]
    else:
        os.environ["PIPEINFER_CACHE"] = before
