"""These tests need network namespaces."""

from __future__ import annotations

import pytest

from tests.kit import namespaces


@pytest.fixture(scope="module", autouse=True)
def _possible():
    reason = namespaces.why_not()
    if reason:
        pytest.skip(f"no cluster of namespaces here: {reason}")
