"""What is lost amid an answer about a picture changes no token of it: a stage, the job with rank 0,
the HTTP process with the rows. The journal has the picture."""

from __future__ import annotations

import base64

import psutil
import pytest
import requests

from tests.kit.random_projectors import picture, write_family
from tests.mpi.test_supervised import rank_of, read, supervised

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
SHOWN = f"data:image/png;base64,{base64.b64encode(picture(80, 60)).decode()}"
ASK = {"temperature": 0.8, "seed": 5, "ignore_eos": True, "max_tokens": 40, "stream": True,
       "pipeinfer": {"detail": True}, "messages": [{"role": "user", "content": [
           {"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": SHOWN}}]}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma3")
    model, _ = write_family("gemma3", folder)
    with supervised("-m", str(model), "--journal", str(folder / "journal"), "-md", "none"
                    ) as opened:
        opened.whole = events(opened)[1]
        assert len(opened.whole) == 40
        yield opened


def events(served, headers=None, enough=10**6, **more):
    """The number of the last event, and the tokens so far."""
    answer = requests.post(f"{served.url}/v1/chat/completions", json={**ASK, **more}, stream=True,
                           timeout=90, headers=headers)
    assert answer.status_code == 200, answer.text
    with answer:
        return read(answer, enough)[:2]


@pytest.mark.parametrize("rank", [2, 0])
def test_an_answer_goes_on_when_a_rank_is_killed(rank, served):
    names = {"Idempotency-Key": f"rank {rank}"}
    last, begun = events(served, names, enough=8)
    rank_of(served.job, rank).kill()
    assert begun + events(served, names | {"Last-Event-ID": str(last)})[1] == served.whole
    served.until(lambda: served.health()[0] == 200, "the server", 90)


def test_an_answer_goes_on_when_the_http_process_is_killed(served):
    names = {"Idempotency-Key": "http"}
    last, begun = events(served, names, enough=8)
    door = served.door()
    helpers = [p for p in door.children(recursive=True)
               if "pipeinfer.models.projecting" in p.cmdline()]
    door.kill()
    assert helpers
    assert not psutil.wait_procs([door, *helpers], timeout=20)[1]
    served.until(lambda: served.health()[0] == 200, "the server", 90)
    assert begun + events(served, names | {"Last-Event-ID": str(last)})[1] == served.whole
