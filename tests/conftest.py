"""Settings of all tests: no clocks in property tests, no shards in the user's own cache."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from pipeinfer.experiments.rig.fixtures import private_cache  # noqa: F401

settings.register_profile("pipeinfer", deadline=None, derandomize="CI" in os.environ,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pipeinfer")
