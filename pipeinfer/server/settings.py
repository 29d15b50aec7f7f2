"""The settings that the HTTP process receives when it starts: plain data."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct, field

from pipeinfer.config import ServeConfig
from pipeinfer.core.types import SamplingParams
from pipeinfer.models.media import ProjectorOptions
from pipeinfer.server.keys import Allowance

_PICTURES = 64 << 20  #: bytes of the pictures of a request, as base64


class Settings(Struct, frozen=True, tag_field="op", tag="settings", forbid_unknown_fields=True):
    """The first frame to the HTTP process.

    model: path of the model, whose vocabulary is read
    name: what clients call the model
    serve: the server's options, checked, with absolute paths and without keys
    keys: those that open the server, and what each may do; none: it is open
    parallel: maximum requests that run
    check_hosts: whether requests under other names are refused
    seed: for requests without one; -1 draws one
    defaults: for sampling fields that a request leaves out
    decomposer: method of chat requests that name none; "" for none
    decomposers: methods that a request may name
    projector: of pictures; None without one
    race: words of `pipeinfer race` with the server's models; none where it offers no race
    """

    op: ClassVar[str] = "settings"
    model: str
    name: str
    serve: ServeConfig = field(default_factory=ServeConfig)
    keys: dict[str, Allowance] = {}
    parallel: int = 16
    check_hosts: bool = False
    seed: int = -1
    defaults: SamplingParams = field(default_factory=SamplingParams)
    decomposer: str = ""
    decomposers: tuple[str, ...] = ()
    race: tuple[str, ...] = ()
    projector: ProjectorOptions | None = None

    def __repr__(self) -> str:
        return f"Settings({self.model!r}, {self.name!r})"  # keys do not belong into logs

    @property
    def most_body(self) -> int:
        """Bytes of a request: pictures come on top of the text."""
        return self.serve.max_body + (_PICTURES if self.projector is not None else 0)

    @property
    def most_open(self) -> int:
        """Choices that may be open at a time."""
        return self.parallel + self.serve.queue
