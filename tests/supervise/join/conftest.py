"""The fixture of a head with its members."""

from __future__ import annotations

import pytest

from tests.supervise.join.world import World


@pytest.fixture
async def world(tmp_path):
    found = World(tmp_path)
    await found.start()
    yield found
    await found.close()
