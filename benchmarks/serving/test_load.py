"""A real server over MPI under load: each request gets what it would get alone."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.serving import campaigns
from pipeinfer.models.locate import open_tokenizer
from pipeinfer_lab.chaos.client import complete
from tests.kit.launch import mpirun_path
from tests.kit.plain_loop import PlainLoop

pytestmark = [pytest.mark.mpi, pytest.mark.slow,
              pytest.mark.skipif(mpirun_path() is None, reason="no mpirun")]


@pytest.fixture(scope="module")
def asked(pytestconfig):
    """200 requests (in the sample 24), many of which start alike, and their tokens by a plain
    loop."""
    target = campaigns.EMBEDDED / "target.gguf"
    tokenizer = open_tokenizer(target)
    count = 200 if pytestconfig.getoption("full") else 24
    requests = campaigns.some_requests(count, 5, tokenizer, longest=32)
    tokenizer.close()
    loop = PlainLoop(target, n_ctx=1024)
    wanted = [campaigns.plain_tokens(loop, request) for request in requests]
    loop.close()
    return requests, wanted


@pytest.mark.parametrize(("ranks", "options"), [
    pytest.param(4, (), marks=pytest.mark.full),
    (3, ("-c", "400", "--set", "cache_tokens=600", "--speculation", "on")),
    pytest.param(1, ("-c", "400", "--set", "cache_tokens=450", "--parallel", "5"),
                 marks=pytest.mark.full),
])
def test_requests_under_load_get_what_they_get_alone(asked, ranks, options):
    requests, wanted = asked
    if ranks < 4:
        requests, wanted = requests[:70], wanted[:70]

    async def run():
        async with campaigns.server(ranks, *options) as running:
            answers = await campaigns.under_load(running.url, requests, 16, seed=ranks)
            for _ in range(100):
                slots = await running.slots()
                if not any(slot["is_processing"] for slot in slots):
                    break
                await asyncio.sleep(0.1)
            return answers, slots, await running.metric("pipeinfer_requests_total")

    answers, slots, counted = asyncio.run(asyncio.wait_for(run(), 240))
    assert campaigns.compare(requests, answers, wanted) == []
    assert not any(slot["is_processing"] for slot in slots)
    assert counted == len(requests)


@pytest.mark.full("slow readers in tests/server/test_http.py, requests under load beside it")
def test_memory_is_flat_and_slow_readers_hold_nobody_up(asked):
    requests, _ = asked

    async def run():
        sizes = []
        async with campaigns.server(2, "--queue", "8") as running:
            for turn in range(4):
                slow = [asyncio.create_task(complete(
                    running.url, {**requests[k], "max_tokens": 200}, read_pause=0.1))
                    for k in range(2)]
                answers = await campaigns.under_load(running.url, requests[:60], 12, seed=turn)
                assert all(answer.status == 200 for _, answer in answers)
                assert not any(task.done() and task.exception() for task in slow)
                for task in slow:
                    task.cancel()
                sizes.append(sum(running.memory().values()))
        return sizes

    sizes = asyncio.run(asyncio.wait_for(run(), 240))
    assert sizes[-1] < sizes[1] * 1.03, sizes
