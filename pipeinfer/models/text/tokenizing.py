"""The process that tokenises for `helper.Apart`, with a vocabulary of its own."""

from __future__ import annotations

import resource
from typing import Any

from pipeinfer.errors import ModelError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text.helper import LONG_SECONDS, answer_of, serve, stamp

#: a run of one kind of character takes up to a kilobyte for each; what is not used costs nothing
_STACK_BYTES = 256 << 20


def _begin(hello: dict[str, Any]) -> Any:
    path = hello["path"]
    tokenizer = open_tokenizer(path)
    if stamp(path) != hello["stamp"]:
        raise ModelError(f"{path} has changed since it was loaded: restart pipeinfer")

    def tokens(question: dict[str, Any]) -> dict[str, Any]:
        return answer_of(tokenizer.tokens_here(
            question["how"], question["text"], question["detail"]))

    return tokens


if __name__ == "__main__":
    # of data, not of addresses: libraries for GPUs reserve more of these than there is memory
    serve(_begin, limits=resource.RLIMIT_DATA, stack=_STACK_BYTES, seconds=LONG_SECONDS)
