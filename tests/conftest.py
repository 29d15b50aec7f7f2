"""Settings of all tests: no clocks in property tests, fewer examples in the sample."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from pipeinfer.models.llama import llama_kernels, llama_version

settings.register_profile("full", deadline=None, derandomize="CI" in os.environ,
                          suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sample", settings.get_profile("full"), max_examples=15)


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: `tests.support.sample` reads the profile then."""
    settings.load_profile("full" if config.getoption("full") else "sample")


def pytest_report_header() -> str:
    """Tests have to pass on every build of llama.cpp; say on which they ran."""
    return f"llama.cpp: {llama_version()}, compiled for {llama_kernels()}"
