"""What ranks say to each other beside runs: who is there, who holds what, how loading goes.

    rank k    Hello                                     at the start, to rank 0
    rank 0    Measure -> Measured, then Placed          before any port exists
    rank 0    TestLinks -> Measured                     before that, with --grid auto
    rank 0    Place, Leave, Rehearse                    orders from rank to rank, of no epoch
    rank 0    Setup or Receive -> Progress ... Ready    to a port of an epoch
    stage     ShardWanted -> ShardOffer                 where the host has no model file
    leader    SumRegion                                 to the other members of a wide stage
    rank 0    RollCall -> Standing                      how far each node is: is a link cut?
    stage     Report                                    its figures, at the end
    rank 0    DraftSetup -> DraftReady                  to ranks that only draft, of no epoch
    rank 0    DraftJob, DraftStop -> DraftDone          what they are asked

One class each; every field is checked when one arrives. A port is named by its stage and its
member: a stage may be held by several ranks, member 0 leading. Knows no models, no transport and no
policy.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pipeinfer.errors import ProtocolError


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all of these have in common."""


class PortName(_Message, frozen=True):
    """A stage (0: the head) and which of the ranks that hold it together, from 0."""

    stage: int
    member: int = 0


# --- the start --------------------------------------------------------------------------------


class Bell(_Message, frozen=True):
    """A rank's doorbell; name: empty without one. host: equal for ranks that can ring each other.
    """

    name: str = ""
    host: str = ""


class Facts(_Message, frozen=True):
    """What a process finds out about its host. Memory in bytes; cores: those of this rank,
    cores_host: those of all ranks there."""

    host: str
    pid: int
    cores: int
    cores_host: int
    local_rank: int
    local_size: int
    memory_total: int
    memory_available: int
    features: tuple[str, ...]
    machine: str
    python: str


class Hello(_Message, frozen=True, tag=True):
    """What a rank tells rank 0: versions, digest and values of its options, what its host is like.

    backend: which llama.cpp library, and its version; kernels: what that was compiled for.
    torch_missing: packages that torch stages would need.
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
    """Instead of what rank 0 waits for: why this rank takes no part, which ends the job."""

    rank: int
    host: str
    reason: str
    exit_code: int


class Measure(_Message, frozen=True, tag=True):
    """Measure yourself on this model. settings: of this host; hollow: the model's header, for a
    host that has no file."""

    settings: dict[str, Any]
    model: str
    fingerprint: str
    hollow: dict[str, Any] | None = None


class Measured(_Message, frozen=True, tag=True):
    """What came of it: figures, or why there are none."""

    figures: dict[str, Any] | None = None
    error: str = ""


class Meeting(_Message, frozen=True):
    """Where the head listens for heartbeats: all its addresses, one of which a rank may reach.
    seconds: of silence after which a rank counts as hanging."""

    addresses: tuple[str, ...]
    port: int
    token: str
    seconds: float


class TestLinks(_Message, frozen=True, tag=True):
    """All ranks at once: bounce messages with your neighbours, and say what that took."""


class Placed(_Message, frozen=True, tag=True):
    """Which rank holds which node, where heartbeats go, every rank's doorbell."""

    rank_of: tuple[int, ...]
    meeting: Meeting | None
    bells: tuple[Bell, ...]


# --- setting up -------------------------------------------------------------------------------


class Setup(_Message, frozen=True, tag=True):
    """What a stage has to load, and for what.

    port: name of the port between the nodes
    widths: members of each stage of the pipeline
    model: path of the model
    fingerprint: of the model, which the stage's file must have, too
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
    holders: which of those each member of the stage has
    near: whether all members are on one host
    piece: the slice to fetch or cut out at the moment; "" for all of the layers
    exact: width up to which runs are exact, as agreed on before; 0 at first
    curve: cost of runs by rows, as agreed on before; None at first
    vocabulary: for grammars, where the stage chooses tokens
    cores: threads that the stage may use, those of idle ranks of its host included; 0: its own
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


class Receive(_Message, frozen=True, tag=True):
    """Get what others hold, without serving it: the port is a spare's for as long as that takes."""

    port: PortName
    setups: tuple[Setup, ...]


class Progress(_Message, frozen=True, tag=True):
    """How far a port is with what it is doing; done and total in units of the phase."""

    port: PortName
    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True, tag=True):
    """A member of a stage serves from now on. parts: the ranges of layers that it loaded apart.
    slices: names of those that it holds. sums: how parts of sums travel ("" without any);
    sum_seconds: of one for a single row, as measured at the start. gpu: what llama.cpp calls the
    devices that hold its layers, "" where the processor computes."""

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

    def figures(self) -> dict[str, Any]:
        """All of it in one mapping, but for the port's name."""
        own: dict[str, Any] = msgspec.structs.asdict(self)
        del own["port"]
        return own


class Received(_Message, frozen=True, tag=True):
    """A spare has what others hold."""

    port: PortName
    rank: int


class Pace(_Message, frozen=True, tag=True):
    """A member of a wide stage, now and then: what `runs` runs took so far, in seconds of its own
    computing and of waiting for the other members, who have gone through the same runs."""

    port: PortName
    runs: int
    compute: float
    waited: float


class RollCall(_Message, frozen=True, tag=True):
    """The head asks how far a node is. As a transaction it is passed on from stage to stage, and
    shows that all links are there; otherwise it overtakes what waits. number: of the question."""

    number: int


class Standing(_Message, frozen=True, tag=True):
    """How far a node is. number: of the question. received: transactions of this epoch that have
    come; idle: seconds since it was done with the last one, 0 while it works on it."""

    port: PortName
    number: int
    received: int
    idle: float


class Report(_Message, frozen=True, tag=True):
    """A stage's figures at its end. Seconds: busy in all, of it compute, sample and waited (for
    other members of the stage), wasted on runs that were stopped; wall: since it began. events:
    (run, start, end, fate, rows, waited) with --trace. more: what its process adds."""

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
        """All of it in one mapping, with the numbers of stage and member."""
        own: dict[str, Any] = msgspec.structs.asdict(self)
        del own["port"]
        own |= {"stage": self.port.stage, "member": self.port.member}
        more: dict[str, Any] = own.pop("more")
        return own | more


class SumRegion(_Message, frozen=True, tag=True):
    """The leader to its stage's members: the memory that they share; "": there is none, so parts
    of sums travel as messages."""

    name: str


class ShardWanted(_Message, frozen=True, tag=True):
    """A stage lacks these layers (piece: this slice of them) and asks what their shard is called.
    """

    port: PortName
    start: int
    stop: int
    piece: str = ""


class ShardOffer(_Message, frozen=True, tag=True):
    """The shard's file name and size; bytes are asked for with ShardHave."""

    name: str
    n_bytes: int


# --- ranks that only draft --------------------------------------------------------------------


class DraftSetup(_Message, frozen=True, tag=True):
    """Load these layers of the draft. `ranks` hold it together, in the order of its layers; the
    last one is asked for guesses.

    model, fingerprint, n_layers: of the draft
    start, stop: the layers of this rank
    n_ctx, n_seq_max, n_batch: of its cache
    paths: that it keeps in the cache; ids beyond are for branches
    n_vocab: of the target
    settings: of the host (`NodeSettings`)
    vocabulary: for grammars
    """

    ranks: tuple[int, ...]
    model: str
    fingerprint: str
    n_layers: int
    start: int
    stop: int
    n_ctx: int
    n_seq_max: int
    n_batch: int
    paths: int
    n_vocab: int
    settings: dict[str, Any]
    vocabulary: dict[str, Any] | None = None


class DraftReady(_Message, frozen=True, tag=True):
    """A rank has its layers of the draft; or, with an error, it has none and takes no jobs.
    rss: resident bytes of the process. exit_code: of the error."""

    rank: int
    host: str
    layers: tuple[int, int]
    weight_bytes: int
    threads: int
    rss: int
    error: str = ""
    exit_code: int = 0


class DraftJob(_Message, frozen=True, tag=True):
    """See `drafting.StartDraft`. tokens: accepted ones of the lane from index `start` on; those
    before it are known, as jobs of a lane only ever add some. The lane's parameters came as a
    LaneOpen."""

    job_id: int
    lane: int
    start: int
    tokens: tuple[int, ...]
    suffix: tuple[int, ...]
    max_tokens: int
    max_depth: int
    branches: int
    p_min: float
    p_split: float
    stop_ids: tuple[int, ...]
    alternatives: int
    shift: int


class DraftStop(_Message, frozen=True, tag=True):
    """The job's answer is not wanted any more."""

    job_id: int


class DraftDone(_Message, frozen=True, tag=True):
    """A job has ended. proposals: None where it was stopped; else (parent, token, confidence,
    alternative) each. rows, seconds: what it evaluated, and how long that took."""

    job_id: int
    proposals: tuple[tuple[int, int, float, bool], ...] | None
    rows: int
    seconds: float


# --- orders -----------------------------------------------------------------------------------


class Place(_Message, frozen=True, tag=True):
    """A new epoch: which rank holds which node, and who is lost."""

    rank_of: tuple[int, ...]
    epoch: int
    lost: tuple[int, ...]


class Leave(_Message, frozen=True, tag=True):
    """The job goes on, or ends, without you."""


class Rehearse(_Message, frozen=True, tag=True):
    """Hold nothing, and keep in the page cache what others hold."""

    setups: tuple[Setup, ...]


Order: TypeAlias = Place | Leave | Rehearse
PortMessage: TypeAlias = (
    Setup | Receive | Progress | Ready | Received | Pace | RollCall | Standing | Report | SumRegion
    | ShardWanted | ShardOffer
    | DraftSetup | DraftReady | DraftJob | DraftStop | DraftDone)
StartMessage: TypeAlias = Hello | Refused | Measure | Measured | TestLinks | Placed
Control: TypeAlias = Order | PortMessage | StartMessage

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Control)


def pack(message: Control) -> bytes:
    """The message as JSON, for `unpack`."""
    return _encoder.encode(message)


def unpack(data: bytes | bytearray | memoryview) -> Control:
    """The message of `pack`. Raises ProtocolError that names the field which is wrong."""
    try:
        message: Control = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        words = " ".join(str(error).split())  # it may name a field of the sender's making
        raise ProtocolError(f"a control message is damaged: {words}") from error
    return message
