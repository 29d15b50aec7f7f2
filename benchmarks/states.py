"""The states of a run and of a job, as pictures in docs/architecture.md: `benchmarks.tables`.

Transitions of runs are those that occur while the scheduler works over a simulated pipeline.
Those of a job are declared here; the supervisor's tests record exactly these.
"""

from __future__ import annotations

from msgspec import structs

from pipeinfer.core.types import Request
from pipeinfer.scheduler.events import Restart
from pipeinfer.scheduler.settings import Limits
from pipeinfer.supervise.supervisor import Phase
from tests.kit.run_states import WatchedPipeline

_ROUNDS = 12  #: pipelines; a third of them shows every transition
_PICTURE = "```mermaid\nstateDiagram-v2\n    {}\n```"
#: by phase those that may follow; `stop` leads from each to ENDING, the last end to STOPPED
PHASES = {
    Phase.STARTING: (Phase.READY, Phase.PAUSING, Phase.WAITING),
    Phase.READY: (Phase.ORDERED, Phase.RETIRING, Phase.PAUSING, Phase.WAITING),
    Phase.ORDERED: (Phase.MOVING, Phase.READY, Phase.PAUSING, Phase.WAITING),
    Phase.MOVING: (Phase.TRYING,),
    Phase.TRYING: (Phase.READY, Phase.FAILING, Phase.RETURNING),
    Phase.FAILING: (Phase.RETURNING,),
    Phase.RETURNING: (Phase.READY, Phase.STARTING, Phase.PAUSING, Phase.WAITING),
    Phase.PAUSING: (Phase.STARTING,), Phase.WAITING: (Phase.STARTING,),
    Phase.RETIRING: (Phase.ASLEEP, Phase.READY), Phase.ASLEEP: (Phase.STARTING,)}


def run_moves() -> set[tuple[str, str, str]]:
    """Return each transition of runs that occurs: from, to, and the event."""
    found: set[tuple[str, str, str]] = set()
    limits = Limits(n_ctx=90, exact_width=4, credit=5, chunk=7, parallel=3, draft_max=3)
    for seed in range(_ROUNDS):
        pipeline = WatchedPipeline(structs.replace(limits, same_cores=bool(seed % 2)), seed)
        for number in range(3):
            pipeline.submit(Request(number, (1, 2, 3 + number), 30))
        for step in range(200 + 40 * seed):
            pipeline.step()
            if step == 100 + 20 * seed:
                pipeline.abort(seed % 3)
        pipeline.feed(Restart(limits))
        found |= pipeline.found
    return found


def runs() -> str:
    """Return the picture of a run."""
    events: dict[tuple[str, str], list[str]] = {}
    for was, now, event in sorted(run_moves()):
        events.setdefault((was, now), []).append(event)
    return _PICTURE.format("\n    ".join(
        f"{was} --> {now}: {', '.join(names)}" for (was, now), names in events.items()))


def phases() -> str:
    """Return the picture of a job."""
    return _PICTURE.format("\n    ".join(f"{phase.name} --> {other.name}".lower()
                                        for phase, others in PHASES.items() for other in others))
