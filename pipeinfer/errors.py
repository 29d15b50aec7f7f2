"""Every error pipeinfer raises on purpose, as one tree.

    PipeinferError                  exit code 1
    |-- UsageError                  2   an option, config file or input that cannot be used
    |-- ModelError                  3   a model file that is missing, damaged or unsuitable
    |   `-- UnsupportedArchitecture     layers of this architecture cannot be cut apart safely
    |-- PlanError                   4   the model does not fit the ranks (layers, memory)
    |-- RequestError                5   one request failed, the others go on (recoverable)
    |   `-- ContextOverflow             prompt and output exceed the context
    `-- ClusterError                6   the job cannot go on (fatal)
        |-- ProtocolError               a message that is not understood
        |-- TransportTimeout            a wait ran into its deadline
        |-- MismatchError               ranks disagree on version, config or model
        |-- BackendError                a decode or a cache operation failed
        `-- WorkerFailed                another rank failed; carries its traceback

This module knows nothing about how errors are shown: the command line prints the first line and
exits with `exit_code`, a server turns them into events.
"""


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
    """The architecture is not on the list of those proven to split bit-equal."""


class PlanError(PipeinferError):
    """The model does not fit the ranks: more stages than layers, or too little memory."""

    exit_code = 4


class RequestError(PipeinferError):
    """One request failed; the cluster goes on."""

    exit_code = 5


class ContextOverflow(RequestError):
    """Prompt plus output exceed the context size."""


class ClusterError(PipeinferError):
    """The whole job cannot go on; every request of it fails."""

    exit_code = 6


class ProtocolError(ClusterError):
    """A message with a bad header, an unknown operation or inconsistent lengths."""


class TransportTimeout(ClusterError):
    """A wait ran into its deadline; names who waited for whom, for what."""

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


class RankLost(ClusterError):
    """A rank is dead, hangs or cannot be reached. why: goes on after "rank 3"."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank, self.why = rank, why


class WorkerFailed(ClusterError):
    """Another rank failed: `remote_traceback` is what it saw."""

    def __init__(
        self, *, rank: int, host: str, run_id: int | None, summary: str, remote_traceback: str
    ) -> None:
        run = "" if run_id is None else f" in run {run_id}"
        super().__init__(f"rank {rank} on {host} failed{run}: {summary}")
        self.rank, self.host, self.run_id = rank, host, run_id
        self.summary, self.remote_traceback = summary, remote_traceback
