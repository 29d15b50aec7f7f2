"""What the HTTP process is told when it starts: plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """model: path of the GGUF (its vocabulary is read). name: what clients call it.

    parallel, queue: requests that run and that may wait. max_body: bytes. request_timeout,
    client_timeout: seconds. seed: for requests without one, -1 draws. defaults: sampling fields
    for requests that leave them out. decomposer: method of chat requests that name none, empty for
    none; decomposers: those that a request may name; threads, positions: see the options.
    """

    model: str
    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    parallel: int = 16
    queue: int = 64
    max_body: int = 4 << 20
    request_timeout: float = 3600.0
    client_timeout: float = 60.0
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = False
    seed: int = -1
    defaults: dict[str, Any] = field(default_factory=dict)
    decomposer: str = ""
    decomposers: tuple[str, ...] = ()
    threads: int = 0
    positions: str = "pred-10x"

    @classmethod
    def from_frame(cls, frame: dict[str, Any]) -> Settings:
        """From the first frame of the link."""
        values = {f.name: frame[f.name] for f in dataclasses.fields(cls) if f.name in frame}
        for name in ("api_keys", "cors_origins", "decomposers"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    @property
    def most_open(self) -> int:
        """Choices that may be open at a time."""
        return self.parallel + self.queue
