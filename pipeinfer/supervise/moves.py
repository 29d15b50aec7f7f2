"""Moves the job of `pipeinfer up` to other hosts or options: the job that serves ends, and the next
one starts.

The HTTP process keeps every client and passes open requests on; if answers could differ, open
requests complete first. If the next job does not start, the one before starts again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from pipeinfer.errors import UsageError
from pipeinfer.server.orders import Hold, Report
from pipeinfer.supervise.http_door import HttpDoor
from pipeinfer.supervise.supervisor import Move, Supervisor

_POLL = 0.25  #: seconds between two checks of open requests
#: returns a plan, or why there is nothing to move; raises UsageError
Planning: TypeAlias = Callable[[], Awaitable[Move | str]]


async def carry_out(supervisor: Supervisor, http: HttpDoor, report: Report, planning: Planning
                    ) -> str:
    """Replace the job by the one that `planning` returns; return the outcome in words.

    report: called with each line of progress. Raises UsageError if that was not done.
    """
    order = supervisor.order()
    try:
        plan = await planning()
        if isinstance(plan, str):
            supervisor.withdraw(order)
            return plan
        if plan.waits:
            await _until_none_is_open(http, report, plan, order)
    except BaseException as error:
        supervisor.withdraw(order, str(error))
        raise
    await supervisor.due(plan, order)
    if failure := await order:
        raise UsageError(failure)
    said = f"{plan.why}: ready again after {time.monotonic() - plan.began:.1f} s"
    supervisor.say(said)
    return f"{said}; {plan.open} open requests went on" if plan.open else said


async def _until_none_is_open(http: HttpDoor, report: Report, plan: Move,
                              order: asyncio.Future[str]) -> None:
    """Hold new requests and wait until the open ones have ended, at most for a time; or until the
    order was answered because the job has ended.

    Raises UsageError if requests are still open, unless the plan forces the move.
    """
    waited, deadline = False, time.monotonic() + plan.wait
    while (found := await http.ask(Hold(on=True))).open and not order.done():
        if not waited:
            waited = True
            report(f"{plan.waits}: waiting for {found.open} open requests, {plan.wait:g} s at "
                   "most; new ones wait")
        if time.monotonic() > deadline:
            if plan.force:
                report(f"{found.open} requests have not ended")
                return
            raise UsageError(f"{found.open} requests still run after {plan.wait:g} s, so nothing "
                             "was changed: --wait S waits for longer, --force does not wait for "
                             "them")
        await asyncio.sleep(_POLL)
