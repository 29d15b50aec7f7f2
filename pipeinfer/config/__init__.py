"""Every option, declared once, in sections: its flags, type, bounds, default and help.

A function takes the section that it needs. `JobConfig` joins the three that a running job is made
of, `Config` all of them. This package contains no model, rank or click command; `cli.options` turns
the declarations into options and finds out where each value came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pipeinfer.config.job import (
    AUTO,
    CACHE_TYPES,
    NO_DRAFT,
    UNQUANTISED,
    ClusterConfig,
    JobConfig,
    ModelConfig,
    SpeculationConfig,
)
from pipeinfer.config.option import Option, OwnOption, Sections
from pipeinfer.config.serving import (
    GrammarConfig,
    RequestConfig,
    SamplingConfig,
    ServeConfig,
)

__all__ = [
    "AUTO", "BASIC", "CACHE_TYPES", "NO_DRAFT", "SECTIONS", "UNQUANTISED", "ClusterConfig",
    "Config", "GrammarConfig", "JobConfig", "ModelConfig", "Option", "OwnOption", "RequestConfig",
    "Resolved", "SamplingConfig", "ServeConfig", "SpeculationConfig", "options",
]

#: What `--help` shows; `--help-all` shows the rest, too.
BASIC = frozenset((
    "model", "draft_model", "ctx", "threads", "gpu_layers", "policy", "proposer",
    "parallel", "nodes", "head_stage", "temp", "top_k", "top_p", "seed", "json_schema", "prompt",
    "file", "n_predict", "chat", "stop", "host", "port", "api_key_file"))


@dataclass(frozen=True, slots=True)
class Config(Sections):
    """All sections: what a command was given."""

    job: JobConfig = field(default_factory=JobConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)


SECTIONS: Mapping[str, type] = {
    "model": ModelConfig, "cluster": ClusterConfig, "speculation": SpeculationConfig,
    "sampling": SamplingConfig, "grammar": GrammarConfig, "request": RequestConfig,
    "serve": ServeConfig,
}


@cache
def options(*sections: str) -> Mapping[str, Option]:
    """Names to declarations, in order; of these sections, or of all."""
    return {f.name: f.metadata["option"] for name in sections or SECTIONS
            for f in dataclasses.fields(SECTIONS[name]) if "option" in f.metadata}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, where each of its values came from, and strategies' own options with defaults."""

    config: Config
    origin: Mapping[str, str]
    own: Mapping[str, Any] = field(default_factory=dict)

    def show(self) -> str:
        """One line per value: name, value, origin."""
        values = {**self.own, **self.config.values()}
        width = max(map(len, self.origin))
        return "\n".join(
            f"{name:{width}}  {_shown(name, values[name]):24}  {origin}"
            for name, origin in self.origin.items())


def _shown(name: str, value: Any) -> str:
    secret = name in options() and options()[name].secret
    return "(hidden)" if value and secret else repr(value)
