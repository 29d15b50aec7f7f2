"""Numbers for pictures, so that rows of equal pictures have equal tokens, and no others do.

The prefix cache compares prompts by their tokens. Rows of a picture have none, so each gets a
number below `NO_TOKEN` that stands for the whole picture. Numbers come from a table of digests of
everything that cells depend on, and are never used twice: no client can be answered about another's
picture.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec import structs

from pipeinfer.core.types import NO_TOKEN, Request
from pipeinfer.scheduler.settings import Limits

_MOST = 1 << 16  #: pictures that are remembered; one that was forgotten gets a new number


class Pictures:
    """The table."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = NO_TOKEN - 1

    def named(self, request: Request) -> Request:
        """Return the request with numbers for the rows of its pictures, and nothing of it on disks:
        there numbers would mean others after a restart."""
        if not request.media:
            return request
        prompt = list(request.prompt)
        for one in request.media:
            prompt[one.start : one.stop] = [self._number(one.digest)] * (one.stop - one.start)
        return structs.replace(request, prompt=tuple(prompt), stores=False)

    def _number(self, digest: bytes) -> int:
        number = self._numbers.pop(digest, self._next)
        self._numbers[digest] = number
        if number == self._next:
            self._next -= 1
        if len(self._numbers) > _MOST:
            self._numbers.popitem(last=False)
        return number

    @staticmethod
    def refusal(request: Request, limits: Limits) -> str:
        """Return why the request's pictures cannot be evaluated; "" if they can."""
        for one in request.media:
            rows = one.stop - one.start
            if not one.causal and rows > limits.together:
                return (f"a picture of {rows} rows that see each other is evaluated in one run, "
                        f"which takes {limits.together} here: lower --image-max-tokens, or raise "
                        f"--set chunk={rows}")
        return ""
