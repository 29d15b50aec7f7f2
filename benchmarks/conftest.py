"""The benchmarks' own tests keep their shards apart from the user's."""

from __future__ import annotations

from pipeinfer.experiments.rig.fixtures import nothing_left_running, private_cache  # noqa: F401
