"""Configurations by their options alone, the strategies' own among them."""

from __future__ import annotations

from typing import Any

from pipeinfer.config import JobConfig
from pipeinfer.strategies.registry import own_options


def job_config(**values: Any) -> JobConfig:
    """Return `JobConfig.of(values)`, which may include the strategies' own options.

    Raises TypeError for unknown names.
    """
    own = {name: values.pop(name) for name in own_options() if name in values}
    return JobConfig.of(own=own, **values)
