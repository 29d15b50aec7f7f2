"""Several models on the same hosts, one at a time: requests wait until theirs is served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pipeinfer.server.errors import ApiError


@dataclass(slots=True, eq=False)
class _Turn:
    """A model that is not served now. came: done when it is. count: of requests that wait."""

    came: asyncio.Future[None]
    count: int = 0


class OtherModels:
    """The requests for models that the supervisor can let another job serve.

    names: of all models that clients may name; none without a supervisor that has several.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self._turns: dict[str, _Turn] = {}  #: by name, those that were asked for first in front

    @property
    def wanted(self) -> str:
        """The model for which a request has waited longest, "" if none waits."""
        return next(iter(self._turns), "")

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(turn.count for turn in self._turns.values())

    async def wait(self, name: str, seconds: float) -> None:
        """Return when the model is served. Raises ApiError (503) if it is not after `seconds`, or
        cannot be."""
        turn = self._turns.setdefault(name, _Turn(asyncio.get_running_loop().create_future()))
        turn.count += 1
        try:
            # other clients' answers come first, and may be long
            async with asyncio.timeout(seconds):
                await asyncio.shield(turn.came)  # one that leaves must not end it for the others
        except TimeoutError:
            raise ApiError(503, f"model {name!r} was not loaded within {seconds:g} s, as other "
                                "requests were running (--set restart_timeout)",
                           code="model_not_loaded", headers={"Retry-After": "10"}) from None
        finally:
            turn.count -= 1
            if not turn.count and self._turns.get(name) is turn:
                del self._turns[name]

    def came(self, name: str) -> None:
        """Let the requests for this model go on."""
        if (turn := self._turns.pop(name, None)) is not None:
            turn.came.set_result(None)

    def refuse(self, name: str, why: str) -> None:
        """End the requests for this model with an error."""
        if (turn := self._turns.pop(name, None)) is not None:
            turn.came.set_exception(ApiError(503, f"model {name!r} cannot be served: {why}",
                                             param="model", code="model_not_loaded"))
