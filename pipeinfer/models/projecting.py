"""The process of a projector, for `media.Pictures`: pictures in, tokens and rows out."""

from __future__ import annotations

import base64
import resource
import time
from typing import Any

from pipeinfer import host
from pipeinfer.core.types import NO_TOKEN, Media
from pipeinfer.errors import ModelError, RequestError
from pipeinfer.llama.mtmd import Projector, Sizes
from pipeinfer.models.media import SECONDS, encoded
from pipeinfer.models.text.helper import serve, stamp

_BEYOND = 6 << 30  #: bytes for a projector's graph and a decoded picture, besides its weights
_STACK_BYTES = 16 << 20


def _begin(hello: dict[str, Any]) -> Any:
    path, n_ctx = hello["path"], hello["n_ctx"]
    if stamp(path) != hello["stamp"]:
        raise ModelError(f"{path} has changed since it was loaded: restart pipeinfer")
    size = sum(hello["stamp"][:1])
    resource.setrlimit(resource.RLIMIT_DATA, (2 * size + _BEYOND,) * 2)
    cores = host.widen_affinity(0, 1)  # a launcher may have bound rank 0 to some of them
    projector = Projector(path, hello["model"], Sizes(
        hello["threads"] or cores, hello["least"], hello["most"]))

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if "data" not in question:
            return {"vision": projector.vision, "audio": projector.audio}
        if not (projector.audio if question["kind"] == "audio" else projector.vision):
            raise RequestError("this model's projector takes no "
                               + ("pictures" if projector.audio else "sound"))
        begun = time.monotonic()
        encode = question["encode"]
        found = projector.read(base64.b64decode(question["data"]), n_ctx, encode=encode)
        parts = [{"tokens": one.tokens} if one.tokens else encoded(
            Media(one.n_pos, one.causal, one.places, one.rows)) for one in found if encode]
        return {"parts": parts, "seconds": time.monotonic() - begun,
                "tokens": [token for one in found
                           for token in one.tokens or (NO_TOKEN,) * one.n]}

    return answer


if __name__ == "__main__":
    # of data, not of addresses: libraries for GPUs reserve more of these than there is memory
    serve(_begin, limits=resource.RLIMIT_DATA, memory=1 << 40, stack=_STACK_BYTES,
          seconds=256 * SECONDS)  # of processor, by all threads
