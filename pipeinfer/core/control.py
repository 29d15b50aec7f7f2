"""The control messages between ranks: start-up, placement, loading, progress and reports.

    rank k    Hello                                     at the start, to rank 0
    rank 0    Measure -> Measured, then Assignment      before any port exists
    rank 0    TestLinks -> Measured                     before that, with --grid auto
    rank 0    NewEpoch, Leave, Rehearse                    orders from rank to rank, of no epoch
    rank 0    Setup or Receive -> Progress ... Ready    to a port of an epoch
    stage     ShardWanted -> ShardOffer                 where the host has no model file
    leader    SumRegion                                 to the other members of a wide stage
    rank 0    RollCall -> Standing                      position of each node: is a link cut?
    stage     Report                                    its figures, at the end
    rank 0    DraftSetup -> DraftReady                  to ranks that only draft, of no epoch
    rank 0    StartDraft, DraftStop -> DraftDone        drafting jobs and their results

One class each; every field is validated on arrival. A port is named by its stage and its member:
several ranks may hold a stage, and member 0 leads. Independent of models, transports and policies.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from pipeinfer.errors import ProtocolError


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base class of all control messages."""


class PortName(_Message, frozen=True):
    """A stage (0: the head), and the member of that stage, from 0."""

    stage: int
    member: int = 0


# --- the start --------------------------------------------------------------------------------


class Bell(_Message, frozen=True):
    """A rank's doorbell.

    name: of its socket; empty if the rank has none
    host: equal for ranks that can ring each other
    """

    name: str = ""
    host: str = ""


class Facts(_Message, frozen=True):
    """A process's description of its host.

    cores: of this rank; cores_host: of all ranks on the host
    memory_available: in bytes
    features: of the processor
    """

    host: str
    pid: int
    cores: int
    cores_host: int
    local_rank: int
    local_size: int
    memory_available: int
    features: tuple[str, ...]
    machine: str
    python: str


class Hello(_Message, frozen=True, tag=True):
    """A rank's first message to rank 0: versions, options and its host.

    backend: which llama.cpp library, and its version
    kernels: what that library was compiled for
    config: digest of the options
    values: the options themselves
    asked_backend: the backend that the rank's options name
    torch_missing: packages that torch stages would need
    """

    rank: int
    version: str
    protocol: int
    backend: str
    kernels: str
    config: str
    values: dict[str, str]
    asked_backend: str
    torch_missing: tuple[str, ...]
    facts: Facts
    bell: Bell


class Refused(_Message, frozen=True, tag=True):
    """A rank takes no part, which ends the job. Sent in place of the awaited message."""

    rank: int
    host: str
    reason: str
    exit_code: int


class Measure(_Message, frozen=True, tag=True):
    """An order to measure the rank on this model.

    settings: of this host
    model: path of the model
    fingerprint: of the model
    hollow: the model's header, for a host that has no file
    memory_only: whether another rank of its kind gives the figures
    """

    settings: dict[str, Any]
    model: str
    fingerprint: str
    hollow: dict[str, Any] | None = None
    memory_only: bool = False


class Measured(_Message, frozen=True, tag=True):
    """The result of a measurement: figures, or an error.

    gpu: which GPUs of its host the rank uses; "": all, or none
    gpu_name: what they are; "": there is none, or no layer would be on one
    gpu_free: their free memory, in bytes; 0: unknown
    """

    figures: dict[str, Any] | None = None
    error: str = ""
    gpu: str = ""
    gpu_name: str = ""
    gpu_free: float = 0.0


class Meeting(_Message, frozen=True):
    """Where the head receives heartbeats.

    addresses: all of the head's; a rank may be able to reach only one of them
    port: UDP port
    token: shared by the job's ranks
    seconds: of silence after which a rank counts as hanging
    """

    addresses: tuple[str, ...]
    port: int
    token: str
    seconds: float


class TestLinks(_Message, frozen=True, tag=True):
    """An order to all ranks at once: exchange messages with the neighbours and report the times."""


class Assignment(_Message, frozen=True, tag=True):
    """The first placement.

    rank_of: the rank of each node
    meeting: where heartbeats go
    bells: every rank's doorbell
    """

    rank_of: tuple[int, ...]
    meeting: Meeting | None
    bells: tuple[Bell, ...]


# --- setting up -------------------------------------------------------------------------------


class Setup(_Message, frozen=True, tag=True):
    """What a stage has to load, and the sizes of its cache.

    port: name of the port between the nodes
    widths: members of each stage of the pipeline
    model: path of the model
    fingerprint: of the model; the stage's file must have the same
    n_layers: layers of the whole model
    start: first layer of the stage
    stop: first layer after the stage
    n_ctx: cells of the cache
    n_seq_max: sequence ids of the cache
    n_batch: maximum rows of a run
    prompt_id: sequence id of learned prompts
    gaps: whether positions may leave gaps
    settings: of the host (`NodeSettings`)
    cut: names of the slices of each of these layers; none where a stage holds them whole
    holders: which of those each member of the stage holds
    near: whether all members are on one host
    piece: the slice to fetch or cut out at the moment; "" for all of the layers
    exact: widest run that is tried for exactness: the width that was agreed on, if one was
    curve: cost of runs by rows, where already agreed on; None at first
    vocabulary: for grammars, where the stage chooses tokens
    cores: threads that the stage may use, those of idle ranks of its host included; 0: its own
    taps: layers of the model whose inputs a head reads, see `backends.base.tap`
    half_taps: whether they are sent as float16
    stream: cells that a stage on a GPU has for each sequence id; 0: all share `n_ctx`
    text: most positions of a request, see `LlamaOptions.text`
    """

    port: PortName
    widths: tuple[int, ...]
    model: str
    fingerprint: str
    n_layers: int
    start: int
    stop: int
    n_ctx: int
    n_seq_max: int
    n_batch: int
    prompt_id: int
    gaps: bool
    settings: dict[str, Any]
    cut: tuple[str, ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()
    near: bool = False
    piece: str = ""
    exact: int = 0
    curve: tuple[float, ...] | None = None
    vocabulary: dict[str, Any] | None = None
    cores: int = 0
    taps: tuple[int, ...] = ()
    half_taps: bool = False
    stream: int = 0
    text: int = 0


class Receive(_Message, frozen=True, tag=True):
    """An order to fetch what other ranks hold, without serving it; the port is for this only."""

    port: PortName
    setups: tuple[Setup, ...]


class Progress(_Message, frozen=True, tag=True):
    """The progress of a port; `done` and `total` are in units of the phase."""

    port: PortName
    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True, tag=True):
    """A member of a stage has loaded its layers and serves from now on.

    layers: `[start, stop)`
    parts: the ranges of layers that it loaded separately
    slices: names of those that it holds
    sums: how partial results travel; "" without any
    sum_seconds: time of one sum for a single row, measured at the start
    gpu: llama.cpp's names of the devices that hold its layers; "" where the processor computes
    padded: rows to which short decodes are filled up there; 0: they are not
    padding_cost: the time of so many rows relative to one
    arithmetic: a digest of what bits depend on in this process
    stored: the files of prompts on its disk, see `stored.held_by`; None: it keeps none
    peers: addresses at which its host gives them to others; none on a single host
    """

    port: PortName
    rank: int
    host: str
    layers: tuple[int, int]
    backend: str
    exact_width: int
    row_cost: float
    curve: tuple[float, ...]
    weight_bytes: int
    cache_bytes: int
    threads: int
    received_bytes: int
    parts: tuple[tuple[int, int], ...]
    slices: tuple[str, ...] = ()
    sums: str = ""
    sum_seconds: float = 0.0
    gpu: str = ""
    padded: int = 0
    padding_cost: float = 1.0
    arithmetic: str = ""
    stored: bytes | None = None
    peers: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """All fields but the port, by name."""
        own: dict[str, Any] = msgspec.structs.asdict(self)
        del own["port"], own["stored"], own["peers"]
        return own


class Received(_Message, frozen=True, tag=True):
    """A spare has fetched what `Receive` named."""

    port: PortName
    rank: int


class Pace(_Message, frozen=True, tag=True):
    """The times of a member of a wide stage so far, sent at intervals.

    runs: number of runs, the same for all members
    compute: seconds of its own computing
    waited: seconds of waiting for the other members
    """

    port: PortName
    runs: int
    compute: float
    waited: float


class StoreFigures(_Message, frozen=True, tag=True):
    """What a stage's host has on its disk of prompts, sent at intervals after runs that use it.

    written, read, missed, dropped: pieces that the stage's process wrote and read, that were not
        there, and that it had no time or room to write
    written_bytes: by this process
    held_bytes: in the folder
    """

    port: PortName
    written: int
    read: int
    missed: int
    dropped: int
    written_bytes: int
    held_bytes: int


class Peers(_Message, frozen=True, tag=True):
    """How stages reach each other's prompts on disks; passes from stage to stage.

    key: of the job, which proves that a host belongs to it
    hosts: of each stage, the addresses of its host; none: it serves nothing
    """

    key: str
    hosts: tuple[tuple[str, ...], ...]


class RollCall(_Message, frozen=True, tag=True):
    """The head requests from a node the number of messages it has received.

    Sent as a transaction, it passes from stage to stage and shows that all links work; otherwise it
    overtakes waiting messages. number: of the request.
    """

    number: int


class Standing(_Message, frozen=True, tag=True):
    """A node's answer to RollCall.

    number: of the request
    received: transactions of this epoch that have arrived
    idle: seconds since it finished the last one; 0 while it works on it
    """

    port: PortName
    number: int
    received: int
    idle: float


class Report(_Message, frozen=True, tag=True):
    """A stage's figures at its end.

    busy: seconds in all, of which compute, sample, and waited (for other members of the stage)
    wasted: seconds spent on runs that were stopped
    wall: seconds since the stage began
    events: (run, start, end, fate, rows, waited) with --trace
    more: further figures of its process
    """

    port: PortName
    layers: tuple[int, int]
    weight_bytes: int
    cache_bytes: int
    busy: float
    compute: float
    waited: float
    sample: float
    wasted: float
    rows: int
    runs: dict[str, int]
    wall: float
    sent_bytes: int
    events: list[tuple[int, float, float, str, int, float]]
    more: dict[str, Any]

    def figures(self) -> dict[str, Any]:
        """All fields in one mapping, with the numbers of stage and member."""
        own: dict[str, Any] = msgspec.structs.asdict(self)
        del own["port"]
        own |= {"stage": self.port.stage, "member": self.port.member}
        more: dict[str, Any] = own.pop("more")
        return own | more


class SumRegion(_Message, frozen=True, tag=True):
    """The leader's message to its members: the name of their shared memory.

    name: "" if there is none; partial results then travel as messages
    """

    name: str


class ShardWanted(_Message, frozen=True, tag=True):
    """A stage lacks these layers (piece: this slice of them) and requests their shard's name."""

    port: PortName
    start: int
    stop: int
    piece: str = ""


class ShardOffer(_Message, frozen=True, tag=True):
    """The shard's file name and size in bytes. The stage requests its bytes with ShardHave."""

    name: str
    n_bytes: int


# --- ranks that only draft --------------------------------------------------------------------


class DraftSetup(_Message, frozen=True, tag=True):
    """An order to load a proposer, and the draft that it evaluates.

    proposer, options: its name and the values of its own options
    model, fingerprint: of the draft; empty: the proposer evaluates none
    n_ctx, n_seq_max, n_batch: of its cache
    paths: how many paths stay in the cache; sequence ids beyond are for branches
    n_vocab: of the target
    settings: of the host (`NodeSettings`)
    vocabulary: for grammars
    target, target_fingerprint: the model whose prediction head is in the file `model`; empty: it is
        a draft model
    cut, index: the slices of the head that members of a stage have, and which one to load
    """

    proposer: str
    model: str
    fingerprint: str
    n_ctx: int
    n_seq_max: int
    n_batch: int
    paths: int
    n_vocab: int
    settings: dict[str, Any]
    options: dict[str, Any]
    vocabulary: dict[str, Any] | None = None
    target: str = ""
    target_fingerprint: str = ""
    cut: tuple[str, ...] = ()
    index: int = 0


class DraftReady(_Message, frozen=True, tag=True):
    """A rank has loaded the draft; with an error: it has none and takes no jobs.

    rss: resident bytes of the process
    exit_code: that goes with the error
    """

    rank: int
    host: str
    weight_bytes: int
    threads: int
    rss: int
    error: str = ""
    exit_code: int = 0


class DraftStop(_Message, frozen=True, tag=True):
    """The result of this job is no longer wanted."""

    job_id: int


class DraftDone(_Message, frozen=True, tag=True):
    """A job has ended.

    proposals: (parent, token, confidence, alternative, paid, depth) each, see `Proposal`; None
        where the job was stopped
    rows: that it evaluated
    seconds: that it took
    """

    job_id: int
    proposals: tuple[tuple[int, int, float, bool, bool, int], ...] | None
    rows: int
    seconds: float


# --- orders -----------------------------------------------------------------------------------


class NewEpoch(_Message, frozen=True, tag=True):
    """A new epoch.

    rank_of: the rank of each node
    epoch: its number
    lost: ranks that are lost
    """

    rank_of: tuple[int, ...]
    epoch: int
    lost: tuple[int, ...]


class Leave(_Message, frozen=True, tag=True):
    """An order to leave the job, whether the job goes on or ends."""


class Rehearse(_Message, frozen=True, tag=True):
    """An order to hold no layers, but to read other ranks' shards into the page cache."""

    setups: tuple[Setup, ...]


Order: TypeAlias = NewEpoch | Leave | Rehearse
PortMessage: TypeAlias = (
    Setup | Receive | Progress | Ready | Received | Pace | StoreFigures | Peers | RollCall
    | Standing | Report | SumRegion | ShardWanted | ShardOffer | DraftSetup | DraftReady
    | DraftStop | DraftDone)
StartMessage: TypeAlias = Hello | Refused | Measure | Measured | TestLinks | Assignment
Control: TypeAlias = Order | StartMessage

_T = TypeVar("_T")
_decoder: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)
#: encodes a control message for `unpack`
pack = msgspec.json.Encoder().encode


def unpack(data: bytes | bytearray | memoryview) -> Control:
    """Return the message between ranks that `pack` encoded, see `unpack_by`."""
    return unpack_by(_decoder, data)


def unpack_by(decoder: msgspec.json.Decoder[_T], data: bytes | bytearray | memoryview) -> _T:
    """Return the message that `pack` encoded, of the decoder's classes.

    Raises ProtocolError that names the wrong field.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())  # may quote a field name that the sender chose
        raise ProtocolError(f"a control message is damaged: {words}") from error
