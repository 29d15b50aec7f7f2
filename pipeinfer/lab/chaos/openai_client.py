"""The same honest client by way of the official openai library, with its default time-outs and
repetitions: what a user's program lives through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import APIStatusError, AsyncOpenAI, OpenAIError

from pipeinfer.lab.chaos.client import Answer, take


async def complete(url: str, body: dict[str, Any], *, on_token: Callable[[], None] | None = None,
                   answer: Answer | None = None, key: str = "") -> Answer:
    """Stream a completion; as `client.complete`."""
    got = Answer() if answer is None else answer
    got.begin()
    more = {name: value for name, value in body.items() if name != "prompt"}
    try:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="any", prompt=body["prompt"], stream=True,
                extra_headers={"Idempotency-Key": key} if key else {},
                extra_body={**more, "pipeinfer": {"detail": True}})
            got.status, got.trouble = stream.response.status_code, "the answer is not whole"
            async with stream:
                async for chunk in stream:
                    take(got, chunk.model_dump(), on_token)
            if got.reason:  # the library takes a broken connection's end for the stream's
                got.whole()
    except APIStatusError as error:
        got.status, got.trouble = error.status_code, f"status {error.status_code}: {error}"
    except OpenAIError as error:
        got.trouble = f"{got.trouble}: {error or type(error).__name__}"
    return got
