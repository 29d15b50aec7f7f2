"""A node's message loop that another thread of the process may run for one message.

To pass a short run to a sleeping thread, and its result back to another, costs two wake-ups: 0.2
ms of the 8 ms that a token of a 135 M model takes. So a stage in the head's process lends its loop
while its runs are short, and the head's thread, which has nothing else to wait for then, does the
work itself. Long runs stay with the stage's own thread: otherwise the head could not cancel them.

Both threads take messages under one lock, in order, so it does not matter which comes first. The
own thread also checks its mailbox regularly, without being woken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeinfer.transport.base import Mailbox


class Stuck(Exception):
    """A turn that another thread runs does not end."""


class LentLoop:
    """The loop of the node that reads `mailbox`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._turn: Callable[[], bool] | None = None
        self._error: Exception | None = None

    def lend(self, turn: Callable[[], bool] | None) -> None:
        """Lend the loop to other threads, or end that. The node's own thread calls this, or a
        turn.

        turn: handles one message and returns whether there was one; None: the loop is not lent any
            more.
        """
        kept, self._turn = self._turn is not None and turn is None, turn
        self._mailbox.rings = turn is None
        if kept:  # a message may have come just before, when arrivals did not ring
            self._mailbox.arrived.set()

    def work(self) -> bool:
        """In another thread: run one turn; return whether it did.

        An error in the turn is raised in the node's own thread.
        """
        turn = self._turn
        # never waits for the lock: the own thread holds it for as long as its turn takes
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
        """In the node's own thread: run one turn; return whether there was a message.

        Raises the error of a turn in the other thread; TimeoutError if that turn does not end
        within `timeout` seconds.
        """
        if not self._lock.acquire(timeout=timeout):  # the other thread's turn may hang
            raise TimeoutError
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return turn()
        finally:
            self._lock.release()
