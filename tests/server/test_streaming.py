"""What a stream says while it has nothing to say."""

from __future__ import annotations

import asyncio
import json

import pytest

from pipeinfer.server import streaming
from pipeinfer.server.errors import ApiError

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")


class Slow:
    """The work of a request that is silent between its two pieces, and its writer."""

    failure, ended, ends_with_mark, ping = None, False, True, None

    def __init__(self):
        self.choices, self.waits, self.done = [self], 0, False

    async def wait(self, seconds):
        self.waits += 1
        return self.waits % 3 == 1

    def leave(self):
        pass

    def opening(self):
        return []

    def closing(self):
        return []

    def failed(self, error: ApiError):
        return {"error": str(error)}

    def chunks(self, choice):
        if self.waits % 3 == 1:
            self.done = self.waits > 3
            yield {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "m",
                   "choices": [{"index": 0, "text": "ab"[self.waits > 3], "logprobs": None,
                                "finish_reason": "length" if self.done else None}]}


async def _bytes(after):
    work = Slow()
    return b"".join([data async for data in streaming.events(work, work, after)])


@pytest.mark.parametrize("after", [None, -1])
def test_signs_of_life_are_no_events_to_the_official_client(after):
    """Also where events bear numbers: it remembers the last one and must not dispatch it again."""
    text = asyncio.run(_bytes(after))
    assert text.count(b": waiting\n") == 2
    assert (b"id: 1\n" in text) == (after is not None)

    def give(_):
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=text)

    with openai.OpenAI(base_url="http://x/v1", api_key="k", http_client=httpx.Client(
            transport=httpx.MockTransport(give))) as client:
        stream = client.completions.create(model="m", prompt="x", stream=True)
        assert [chunk.choices[0].text for chunk in stream] == ["a", "b"]


def test_signs_of_life_are_events_where_the_api_has_some():
    work = Slow()
    work.ping = {"type": "ping"}

    async def data():
        return b"".join([one async for one in streaming.events(work, work)])

    text = asyncio.run(data())
    assert text.count(b'event: ping\ndata: {"type":"ping"}\n\n') == 2
    assert b"waiting" not in text


def test_a_sign_of_life_does_not_swallow_the_event_behind_it():
    """Clients that take a stream line by line find every event's data."""
    lines = asyncio.run(_bytes(-1)).decode().split("\n")
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [one["choices"][0]["text"] for one in found] == ["a", "b"]
