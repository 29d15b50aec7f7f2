"""The settings that the HTTP process receives when it starts: plain data."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct, field

from pipeinfer.core.types import SamplingParams
from pipeinfer.server.keys import Allowance


class Settings(Struct, frozen=True, tag_field="op", tag="settings", forbid_unknown_fields=True):
    """The first frame to the HTTP process.

    model: path of the model, whose vocabulary is read
    name: what clients call the model
    any_name: whether clients may call it anything else
    api_keys: keys that open the server; none: it is open
    allowances: what each of them may do; everything where there are fewer
    parallel: maximum requests that run
    queue: maximum requests that wait
    max_body: bytes of a request
    request_timeout: seconds that a request may take
    client_timeout: seconds that a client may leave its answer unread
    restart_timeout: seconds that requests wait for a job that is started again
    cors_origins: web page origins that may use the server
    hosts: accepted host names, besides localhost and addresses
    check_hosts: whether requests under other names are refused
    log_requests: whether every request is logged
    seed: for requests without one; -1 draws one
    defaults: for sampling fields that a request leaves out
    decomposer: method of chat requests that name none; "" for none
    decomposers: methods that a request may name
    remember_answers: whether prompt lookup copies from other answers to the same key
    journal: file in which requests outlive the process; "" for none
    journal_sync: seconds between two syncs of it to the disk
    journal_keep: seconds for which ended requests stay in it
    journal_size: MiB of it beyond which the oldest of them are deleted
    certificate, private_key: files of TLS; "" for plain HTTP
    reasoning_format: none: reasoning is a part of the content
    race: words of `pipeinfer race` with the server's models; none where it offers no race
    """

    op: ClassVar[str] = "settings"
    model: str
    name: str
    any_name: bool = False
    api_keys: tuple[str, ...] = ()
    allowances: tuple[Allowance, ...] = ()
    parallel: int = 16
    queue: int = 64
    max_body: int = 4 << 20
    request_timeout: float = 3600.0
    client_timeout: float = 60.0
    restart_timeout: float = 300.0
    cors_origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    check_hosts: bool = False
    log_requests: bool = False
    seed: int = -1
    defaults: SamplingParams = field(default_factory=SamplingParams)
    decomposer: str = ""
    decomposers: tuple[str, ...] = ()
    remember_answers: bool = False
    journal: str = ""
    journal_sync: float = 1.0
    journal_keep: float = 3600.0
    journal_size: int = 64
    certificate: str = ""
    private_key: str = ""
    race: tuple[str, ...] = ()
    reasoning_format: str = "auto"

    def __repr__(self) -> str:
        return f"Settings({self.model!r}, {self.name!r})"  # keys do not belong into logs

    @property
    def most_open(self) -> int:
        """Choices that may be open at a time."""
        return self.parallel + self.queue
