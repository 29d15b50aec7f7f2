"""What a head and a machine that joins it send each other: one JSON object a line, over TLS.

    member                                    head
    Claim                           ->
    Offer, or SourceWanted          ->
                                    <-        Dial; or Source, and its bytes; or Rejected
    Done                            ->
                                    <-        Admitted, or Rejected
                                    <-        StartDaemon, ClearJob, Note, Sleep
    Done (of each order), Depart     ->
    Beat                           <->        Beat
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, structs

from pipeinfer.errors import ProtocolError
from pipeinfer.nodes import Mac

VERSION = 3
MOST = 1 << 16  #: bytes of a message
BEAT = 5.0  #: seconds between two beats
SILENT = 20.0  #: seconds without any message after which a connection counts as lost
#: without control characters: terminals and logs show it
Line: TypeAlias = Annotated[str, Meta(max_length=4096, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
Word: TypeAlias = Annotated[str, Meta(max_length=255, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")]
Id: TypeAlias = Annotated[str, Meta(max_length=255, pattern=r"\A\w[\w.-]*\Z")]
Port: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 53)]
Role: TypeAlias = Literal["stage", "draft", "spare"]


class _JoinMessage(Struct, frozen=True, tag_field="is", tag=str.lower, forbid_unknown_fields=True,
               kw_only=True):
    pass


# --- from the head ----------------------------------------------------------------------------


class Admitted(_JoinMessage, frozen=True):
    """The machine is a member. name: by which the head calls it. address: its own, as seen from
    the head."""

    name: Word
    address: Word


class Rejected(_JoinMessage, frozen=True):
    """The machine does not become a member. remedy: what to do. final: trying again is useless.
    version: it has another version of something than the head. token: its token is not valid."""

    why: Line
    remedy: Line
    final: bool
    version: bool = False
    token: bool = False


class Source(_JoinMessage, frozen=True):
    """The head's own source: so many bytes follow. digest: of the package."""

    size: Count
    digest: Word


class Dial(_JoinMessage, frozen=True):
    """Open a connection to this port of the head, and close it. order: its number."""

    order: int
    port: Port


class StartDaemon(_JoinMessage, frozen=True):
    """Start the launcher's daemon. order: its number. job: the id of its job. kind: of the
    launcher. arguments: of the daemon."""

    order: int
    job: Id
    kind: Word
    arguments: list[str]


class ClearJob(_JoinMessage, frozen=True):
    """End all processes of a job. order: its number."""

    order: int
    job: Id


class Note(_JoinMessage, frozen=True):
    """A line for the member's user."""

    text: Line


class Sleep(_JoinMessage, frozen=True):
    """There is no work: the machine may run the command of its owner for that, and Depart."""


# --- from the member --------------------------------------------------------------------------


class Claim(_JoinMessage, frozen=True):
    """A token: its id and its secret. member: random id of this machine, the same after it has been
    away. version: of these messages."""

    token: Id
    member: Id
    secret: Word
    version: int = VERSION


class OwnSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a machine's user gives of its table in a nodes file; None: not set."""

    memory: Annotated[int, Meta(ge=1, lt=1 << 53)] | None = None
    threads: Annotated[int, Meta(ge=1, lt=1 << 16)] | None = None
    role: Role | None = None

    @property
    def given(self) -> dict[str, int | str]:
        """Those that are set."""
        return {name: value for name, value in structs.asdict(self).items() if value is not None}


class Offer(_JoinMessage, frozen=True):
    """What the machine has.

    host: its host name. memory: in bytes. gpus: how many. numa_nodes: a rank runs on each.
    dialled: the head's address as this machine sees it. own: its own address on that connection.
    port: where it accepts a connection meanwhile, which the head tries.
    mac: of the card of that connection, by which it can be woken; "" if it never sleeps.
    pipeinfer, digest, protocol: version of the package, of its source, of the ranks' messages.
    llama, python, launcher: versions.
    """

    host: Word
    cores: Count
    memory: Count
    gpus: Count
    dialled: Word
    own: Word
    port: Port
    pipeinfer: Word
    digest: Word
    protocol: int
    llama: Word
    python: Word
    launcher: Word
    mac: Mac = ""
    numa_nodes: Annotated[int, Meta(ge=1, le=64)] = 1
    settings: OwnSettings = OwnSettings()


class SourceWanted(_JoinMessage, frozen=True):
    """The machine does not join yet: the head sends its own source, and closes the connection."""


class Done(_JoinMessage, frozen=True):
    """An order was carried out. error: "" if it was."""

    order: int
    error: Line = ""


class Depart(_JoinMessage, frozen=True):
    """The machine leaves, and its ranks end."""


# --- from both --------------------------------------------------------------------------------


class Beat(_JoinMessage, frozen=True):
    """This end lives."""


FromHead: TypeAlias = (
    Dial | Admitted | Rejected | Source | StartDaemon | ClearJob | Note | Sleep | Beat)
FromMember: TypeAlias = Claim | Offer | SourceWanted | Done | Depart | Beat
_from_head: msgspec.json.Decoder[FromHead] = msgspec.json.Decoder(FromHead)
_from_member: msgspec.json.Decoder[FromMember] = msgspec.json.Decoder(FromMember)


def encode(message: FromHead | FromMember) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def from_head(line: bytes) -> FromHead:
    """Decode what a head has sent. Raises ProtocolError."""
    try:
        return _from_head.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the head sent something else than a message: {error}") from None


def from_member(line: bytes) -> FromMember:
    """Decode what a member has sent. Raises ProtocolError."""
    try:
        return _from_member.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"something else than a message came: {error}") from None
