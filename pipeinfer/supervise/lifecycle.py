"""The states of a supervisor, and what follows in each of them from an event. Pure."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias, assert_never

from msgspec import Struct
from msgspec.structs import replace

from pipeinfer.errors import PlanError, ending
from pipeinfer.supervise.rules import INTERRUPTED, End, Patience

LIMIT = 600.0  #: seconds for the next job of a move to be ready
_BUSY = "the job is being moved already: wait until that is over"
_NOT_READY = "the job is not ready: try again when `pipeinfer status` says so"
_ENDING = "the server is ending"


class Phase(Enum):
    """What the supervisor is doing; the value is shown to users."""

    STARTING = "starting"
    READY = "ready"
    ORDERED = "ready, and about to move"
    MOVING = "moving: the job ends"
    TRYING = "moving: the next job starts"
    FAILING = "moving: the next job ends, as it was not ready in time"
    RETURNING = "the next job did not start: the job before starts again"
    PAUSING = "starting again soon"
    WAITING = "waiting for more machines to join"
    ENDING = "ending"
    STOPPED = "ended"


_MOVES = (Phase.ORDERED, Phase.MOVING, Phase.TRYING, Phase.FAILING, Phase.RETURNING)


class State(Struct, frozen=True):
    """The state of a supervisor.

    job: number of the last start. order: number of the move in progress, 0 if there is none.
    failure: why that move has failed, "" if it has not.
    waits: whether a job that its hosts cannot hold waits for more hosts.
    """

    phase: Phase
    patience: Patience
    waits: bool = False
    job: int = 1
    order: int = 0
    failure: str = ""


# --- events -----------------------------------------------------------------------------------


class JobReady(Struct, frozen=True):
    """The job of this number serves."""

    job: int


class JobEnded(Struct, frozen=True):
    """The last job has ended after `lived` seconds. why: for the user."""

    status: int
    lived: float
    why: str = ""


class HostCame(Struct, frozen=True):
    """There is a host more."""


class Elapsed(Struct, frozen=True):
    """The time of a `Wait` is over."""

    job: int


class Stop(Struct, frozen=True):
    """The user ends the supervisor. at_once: without waiting for running requests."""

    at_once: bool = False


class Order(Struct, frozen=True):
    """A move is to be prepared. number: positive, another one for each order."""

    number: int


class Due(Struct, frozen=True):
    """The move is prepared: the job may end."""

    number: int


class Withdraw(Struct, frozen=True):
    """There is nothing to move, or (why) it is not possible."""

    number: int
    why: str = ""


Event: TypeAlias = JobReady | JobEnded | HostCame | Elapsed | Stop | Order | Due | Withdraw

# --- actions ----------------------------------------------------------------------------------


class Start(Struct, frozen=True):
    """Start the job; a `JobEnded` follows. again: after a failure, on the hosts that answer."""

    again: bool = False


class EndJob(Struct, frozen=True):
    """End the job at once: the next one takes its requests."""


class Interrupt(Struct, frozen=True):
    """Let the job complete its requests and end. at_once: without them."""

    at_once: bool


class Wait(Struct, frozen=True):
    """Send `Elapsed` for this job after some seconds. Replaces the `Wait` before."""

    seconds: float
    job: int


class Announce(Struct, frozen=True):
    """Let the HTTP process expect another engine. back: one with the former settings."""

    back: bool = False


class Apply(Struct, frozen=True):
    """Use the settings of the move for the next job."""


class Restore(Struct, frozen=True):
    """Use the settings from before the move for the next job."""


class Admit(Struct, frozen=True):
    """Let new requests in, if they were held."""


class Answered(Struct, frozen=True):
    """Answer an order. error: "" if it is done. refused: it was never in progress."""

    order: int
    error: str = ""
    refused: bool = False


class Say(Struct, frozen=True):
    """Print a line for the user."""

    text: str


class Exit(Struct, frozen=True):
    """End the supervisor with this exit status."""

    status: int


Action: TypeAlias = (Start | EndJob | Interrupt | Wait | Announce | Apply | Restore | Admit
                     | Answered | Say | Exit)
Step: TypeAlias = tuple[State, tuple[Action, ...]]

# --- transitions ------------------------------------------------------------------------------


def begin(restarts: int, *, waits: bool = False) -> Step:
    """Return the first state and its actions. restarts: how often a failed job starts again.
    waits: see `State`."""
    return State(Phase.STARTING, Patience.of(restarts), waits), (Start(),)


def next_state(state: State, event: Event) -> Step:
    """Return the state after an event, and the actions, in their order.

    | in                    | event    | then      | actions                                       |
    |-----------------------|----------|-----------|-----------------------------------------------|
    | STARTING              | Ready    | READY     |                                               |
    | READY                 | Order    | ORDERED   |                                               |
    | ORDERED               | Withdraw | READY     | Admit, Answer                                 |
    | ORDERED               | Due      | MOVING    | Announce, EndJob                              |
    | MOVING                | Ended    | TRYING    | Apply, Start, Wait(LIMIT)                     |
    | TRYING                | Ready    | READY     | Answer                                        |
    | TRYING                | Elapsed  | FAILING   | EndJob                                        |
    | TRYING, FAILING       | Ended    | RETURNING | Say, Restore, Announce, Start, Wait(LIMIT)    |
    | RETURNING             | Ready    | READY     | Answer (the failure)                          |
    | RETURNING             | Elapsed  | STARTING  | Answer (the failure)                          |
    | STARTING, READY,      | Ended    | PAUSING   | Say, Wait(pause), if restarts are left and    |
    | ORDERED, RETURNING    |          |           | the exit status is that of a failure          |
    |                       |          | WAITING   | Say, if it waits for hosts and the status is  |
    |                       |          |           | that of a model that does not fit             |
    |                       |          | STOPPED   | Exit(status), else                            |
    |                       |          |           | before that in ORDERED: Admit, Answer;        |
    |                       |          |           | in RETURNING: Answer (the failure)            |
    | PAUSING               | Elapsed  | STARTING  | Start(again)                                  |
    | WAITING               | HostCame | STARTING  | Start(again)                                  |
    | PAUSING, WAITING      | Stop     | STOPPED   | Exit(130)                                     |
    | ENDING                | Stop     | ENDING    | Interrupt                                     |
    | any other but STOPPED | Stop     | ENDING    | Answer, if an order is open; Interrupt        |
    | ENDING                | Ended    | STOPPED   | Exit(status)                                  |
    | any other             | Order    | the same  | Answer (refused)                              |

    Everything else changes nothing, as does an event of another job or order than the present one.
    """
    match event:
        case JobReady(job):
            return _ready(state) if job == state.job else (state, ())
        case JobEnded():
            return _ended(state, event)
        case HostCame():
            return _restarted(state) if state.phase is Phase.WAITING else (state, ())
        case Elapsed(job):
            return _elapsed(state) if job == state.job else (state, ())
        case Stop(at_once):
            return _stop(state, at_once)
        case Order(number):
            if state.phase is Phase.READY:
                return replace(state, phase=Phase.ORDERED, order=number), ()
            why = _BUSY if state.phase in _MOVES else _NOT_READY
            return state, (Answered(number, why, refused=True),)
        case Due(number) if state.phase is Phase.ORDERED and number == state.order:
            return replace(state, phase=Phase.MOVING), (Announce(), EndJob())
        case Withdraw(number, why) if state.phase is Phase.ORDERED and number == state.order:
            return _answered(state, Phase.READY, why)
        case Due() | Withdraw():
            return state, ()
        case _:
            assert_never(event)


def _ready(state: State) -> Step:
    match state.phase:
        case Phase.STARTING:
            return replace(state, phase=Phase.READY), ()
        case Phase.TRYING | Phase.RETURNING:
            return _answered(state, Phase.READY, state.failure)
        case _:
            return state, ()


def _ended(state: State, event: JobEnded) -> Step:
    match state.phase:
        case Phase.ENDING:
            return replace(state, phase=Phase.STOPPED), (Exit(event.status),)
        case Phase.MOVING:
            then = replace(state, phase=Phase.TRYING, job=state.job + 1)
            return then, (Apply(), Start(), Wait(LIMIT, then.job))
        case Phase.TRYING | Phase.FAILING:
            failure = state.failure or (
                f"the changed job does not start ({ending(event.status)}; {event.why}): back to "
                "what there was before")
            then = replace(state, phase=Phase.RETURNING, job=state.job + 1, failure=failure)
            return then, (Say(failure), Restore(), Announce(back=True), Start(),
                          Wait(LIMIT, then.job))
        case Phase.ORDERED | Phase.RETURNING:
            then, answers = _answered(state, Phase.STARTING,
                                      state.failure or "the job has ended meanwhile")
            return _again(then, event, answers)
        case Phase.STARTING | Phase.READY:
            return _again(state, event)
        case _:
            return state, ()


def _again(state: State, event: JobEnded, before: tuple[Action, ...] = ()) -> Step:
    """Start the job again, or stop. before: further actions, which come first."""
    if state.waits and event.status == PlanError.exit_code:
        return replace(state, phase=Phase.WAITING), (
            *before, Say("the model does not fit yet: waiting for more machines to join"))
    patience, verdict = state.patience.after(event.status, event.lived)
    ended = f"the job has ended with {ending(event.status)}"
    if isinstance(verdict, End):
        said = (Say(f"{ended}, and every restart is used up"),) if verdict.used_up else (
            Say(ended),) if "killed" in ended else ()
        return (replace(state, phase=Phase.STOPPED, patience=patience),
                (*before, *said, Exit(event.status)))
    said = (Say(f"{ended}: starting again in {verdict.pause:.0f} s ({verdict.left} more after "
                "that)"),)
    return (replace(state, phase=Phase.PAUSING, patience=patience),
            (*before, *said, Wait(verdict.pause, state.job)))


def _elapsed(state: State) -> Step:
    match state.phase:
        case Phase.PAUSING:
            return _restarted(state)
        case Phase.TRYING:
            failure = (f"the changed job is not ready after {LIMIT:g} s: back to what there was "
                       "before")
            return replace(state, phase=Phase.FAILING, failure=failure), (EndJob(),)
        case Phase.RETURNING:
            return _answered(state, Phase.STARTING, state.failure)
        case _:
            return state, ()


def _restarted(state: State) -> Step:
    return replace(state, phase=Phase.STARTING, job=state.job + 1), (Start(again=True),)


def _stop(state: State, at_once: bool) -> Step:
    match state.phase:
        case Phase.STOPPED:
            return state, ()
        case Phase.PAUSING | Phase.WAITING:
            return replace(state, phase=Phase.STOPPED), (Exit(INTERRUPTED),)
        case phase if phase in _MOVES:
            then, answers = _answered(state, Phase.ENDING, state.failure or _ENDING)
            return then, (*answers, Interrupt(at_once))
        case _:
            return replace(state, phase=Phase.ENDING), (Interrupt(at_once),)


def _answered(state: State, phase: Phase, error: str) -> Step:
    """Answer the order in progress, and go on in `phase`."""
    admit = (Admit(),) if state.phase is Phase.ORDERED else ()
    return (replace(state, phase=phase, order=0, failure=""),
            (*admit, Answered(state.order, error)))
