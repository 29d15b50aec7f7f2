"""The errors that pipeinfer raises on purpose, as one tree with exit codes.

    PipeinferError                  exit code 1
    |-- UsageError                  2   an option, config file or input that cannot be used
    |-- ModelError                  3   a model file that is missing, damaged or unsuitable
    |   `-- UnsupportedArchitecture     a sound model that this backend or split does not support
    |-- PlanError                   4   the model does not fit the ranks (layers, memory)
    |-- RequestError                5   one request failed, the others go on (recoverable)
    |   `-- ContextOverflow             the prompt does not fit the context
    `-- ClusterError                6   the job cannot go on
        |-- ProtocolError               a malformed or unexpected message or event
        |-- TransportTimeout            a wait ran into its deadline
        |-- MismatchError               ranks disagree on version, config or model
        |-- BackendError                a decode or a cache operation failed
        |   `-- NoCells                     there was no place for the rows
        |-- InvariantError              the scheduler's state contradicts itself (a bug)
        |-- RankRefused                 a rank cannot take part; exits with that rank's code
        |-- RankLost                    a rank is dead or unreachable (the job may recover)
        |-- WorkerFailed                another rank failed; carries its traceback (likewise)
        `-- LinkCut                     the link between two stages is cut (likewise)

Some parts derive their own from these (`HttpFailure`, `EndpointError`, `helper.HelperLate`);
`server.errors.ApiError` and the signals between modules (`transport.base.Dismissed`) stand apart.
This module does not show errors: the command line prints the message as one line and exits with
`exit_code`, a server turns it into an event or an answer.
"""

import signal
from typing import TypeAlias

#: signals that end a process which does not end by itself
_KILLS = {signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL,
          signal.SIGFPE}


class PipeinferError(Exception):
    """Base of all deliberate errors; `exit_code` is the process exit status."""

    exit_code = 1


class UsageError(PipeinferError):
    """An option, a config file or an input that cannot be used."""

    exit_code = 2


class ModelError(PipeinferError):
    """A model file that is missing, truncated, damaged or unsuitable."""

    exit_code = 3


class UnsupportedArchitecture(ModelError):
    """The model is sound, but this backend, or a split of it, is not known to be correct."""


class PlanError(PipeinferError):
    """The model does not fit the ranks: more stages than layers, or too little memory."""

    exit_code = 4


class RequestError(PipeinferError):
    """One request failed; the cluster goes on."""

    exit_code = 5


class ContextOverflow(RequestError):
    """The prompt does not fit the context."""


class ClusterError(PipeinferError):
    """The job cannot go on, unless the head recovers from it (`Loss`).

    story: what happened to the lanes before, if that may explain it
    """

    exit_code = 6
    story: tuple[str, ...] = ()


class ProtocolError(ClusterError):
    """A malformed or unexpected message, or an event at a time when it is not allowed."""


class TransportTimeout(ClusterError):
    """A wait ran into its deadline.

    rank: which waited
    peer: the rank it waited for; None for any
    tag: of the message
    run_id: of the run it was about; None for none
    seconds: how long it waited
    """

    def __init__(
        self, *, rank: int, peer: int | None, tag: str, run_id: int | None, seconds: float
    ) -> None:
        source = "any rank" if peer is None else f"rank {peer}"
        run = "" if run_id is None else f", run {run_id}"
        super().__init__(
            f"rank {rank} waited {seconds:.1f} s for {tag} from {source}{run} and got no answer; "
            "check whether that rank is still alive, or raise --timeout"
        )
        self.rank, self.peer, self.tag, self.run_id, self.seconds = rank, peer, tag, run_id, seconds


class MismatchError(ClusterError):
    """Ranks disagree on version, configuration or model."""


class BackendError(ClusterError):
    """A decode or a cache operation of a backend failed."""


class NoCells(BackendError):
    """The cache has no free cells for the rows of a decode; it is as it was."""


class InvariantError(ClusterError):
    """The scheduler's state contradicts itself: a bug, found by a test."""


class RankRefused(ClusterError):
    """Another rank cannot take part from the start.

    rank, host: which rank
    reason: its error, in one line
    exit_code: of its error
    """

    def __init__(self, rank: int, host: str, reason: str, exit_code: int) -> None:
        super().__init__(f"rank {rank} on {host}: {reason}")
        self.rank, self.host, self.exit_code = rank, host, exit_code


class RankLost(ClusterError):
    """A rank is dead, hangs or cannot be reached.

    rank: its number
    why: what happened, as the rest of a sentence that begins with "rank 3"
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank, self.why = rank, why


class StageFailed(ClusterError):
    """Another rank reported an error.

    rank, host: where it happened
    run_id: the run that it worked on; None for none
    summary: the error in one line
    remote_traceback: the rank's traceback, "" if there is none
    """

    def __init__(
        self, *, rank: int, host: str, run_id: int | None, summary: str, remote_traceback: str
    ) -> None:
        run = "" if run_id is None else f" in run {run_id}"
        super().__init__(f"rank {rank} on {host} failed{run}: {summary}")
        self.rank, self.host, self.run_id = rank, host, run_id
        self.summary, self.remote_traceback = summary, remote_traceback


class LinkCut(ClusterError):
    """Messages from one rank do not reach the next one, though both reach rank 0.

    source, target: the two ranks
    seconds: for which nothing has arrived, at least
    """

    def __init__(self, source: int, target: int, seconds: float) -> None:
        super().__init__(f"what rank {source} sends has not got to rank {target} for {seconds:.1f} "
                         "s, though rank 0 reaches both: the link between them is cut")
        self.source, self.target, self.seconds = source, target, seconds


Loss: TypeAlias = RankLost | StageFailed | LinkCut  #: what a job may recover from
LOSSES = (RankLost, StageFailed, LinkCut)


def ending(status: int) -> str:
    """Describe how a process ended.

    status: its exit code; -N or 128 + N where signal N ended it.
    """
    code = 128 - status if status < 0 else status
    if code - 128 not in _KILLS:
        return f"exit code {code}"
    return (f"exit code {code}: killed by signal {code - 128} ({signal.Signals(code - 128).name})"
            + ", maybe by the kernel for want of memory" * (code - 128 == signal.SIGKILL))
