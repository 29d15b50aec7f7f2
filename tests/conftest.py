"""Settings of all tests: no clocks in property tests, no shards in the user's own cache."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from pipeinfer.models.llama import llama_kernels, llama_version

settings.register_profile("pipeinfer", deadline=None, derandomize="CI" in os.environ,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipeinfer")


def pytest_report_header() -> str:
    """Tests have to pass on every build of llama.cpp; say on which they ran."""
    return f"llama.cpp: {llama_version()}, compiled for {llama_kernels()}"
