"""A node's message loop that another thread of its process may run for a turn.

To hand a short run to a thread that sleeps, and its result back to one that does, costs two
wake-ups: 0.2 ms of the 8 that a token of a 135 M model takes. So a stage in the head's own process
lends its loop while its runs are short, and the head's thread, which waits for nothing else then,
does the work itself. Long runs stay with the stage's own thread: the head could not cancel them.

Both threads take messages under one lock, in order, so it does not matter who comes first. The own
thread looks now and then, whether or not it is rung for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeinfer.transport.base import Mailbox


class Stuck(Exception):
    """A turn in another thread does not come back."""


class LentLoop:
    """Of the node that reads `mailbox`. turn: handles one message; whether there was one."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._turn: Callable[[], bool] | None = None
        self._error: Exception | None = None

    def lend(self, turn: Callable[[], bool] | None) -> None:
        """The node's own thread, or a turn: lend the loop from now on, or (None) keep it."""
        kept, self._turn = self._turn is not None and turn is None, turn
        self._mailbox.rings = turn is None
        if kept:
            self._mailbox.arrived.set()

    def work(self) -> bool:
        """Another thread: run one turn. Whether it did; an error is raised in the own thread."""
        turn = self._turn
        if turn is None or self._mailbox.empty or not self._lock.acquire(blocking=False):
            return False
        try:
            return turn()
        except Exception as error:
            self._error = error
            self.lend(None)
            return True
        finally:
            self._lock.release()

    def own(self, turn: Callable[[], bool], timeout: float) -> bool:
        """The node's own thread: run one turn, whether there was a message.

        Raises what a turn in the other thread has raised; TimeoutError if that one does not come
        back within `timeout` seconds.
        """
        if not self._lock.acquire(timeout=timeout):
            raise TimeoutError
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return turn()
        finally:
            self._lock.release()
