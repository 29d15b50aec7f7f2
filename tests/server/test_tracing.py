"""Requests as spans: what is in them, and that a collector gets them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib.util
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pipeinfer.core.types import SamplingParams
from pipeinfer.errors import UsageError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.server import tracing
from pipeinfer.server.asker import asking
from pipeinfer.server.engine_client import EngineClient
from pipeinfer.server.frames import Changed, Ended, Failed, News, Ready, Token
from pipeinfer.server.metrics import Metrics
from pipeinfer.server.requests import EngineRequest
from pipeinfer.server.settings import Settings
from tests.rig import launch
from tests.rig.server_peer import FACTS, SECONDS, front
from tests.server.test_asking_again import Kept, all_events, begin
from tests.server.test_door import rest, some
from tests.server.test_http import MODEL

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LOST = {"changes": [{"lost": [2], "why": "rank 2 has died"}]}


class Receiver(http.server.ThreadingHTTPServer):
    """A collector that keeps what it gets."""

    def __init__(self):
        got = self.got = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append((self.path, ExportTraceServiceRequest.FromString(body), body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self):
        return [span for _, request, _ in self.got for resource in request.resource_spans
                for scope in resource.scope_spans for span in scope.spans]

    def close(self):
        self.shutdown()
        self.server_close()


def values(span):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_span_has_the_requests_figures_and_what_happened_meanwhile():
    kept = InMemorySpanExporter()

    async def run():
        hub = EngineClient(Settings("m", "m"), Metrics(), outlives=True)
        hub.tracer = tracing.Tracer("", "m", SimpleSpanProcessor(kept))
        with contextlib.closing(open_tokenizer(MODEL)) as hub.tokenizer:
            hub.handle(Ready(FACTS | {"bits": "a"}))
            trace = hub.tracer.request("/v1/completions", {b"traceparent": CALLER.encode()})
            asked = EngineRequest([[1, 2, 3]], [""], 2, 9,
                                  SamplingParams(temperature=0.5, top_k=7), seed=4)
            with asking(trace=trace):
                first, second = hub.submit(asked).generations
            hub.handle(News((Token(first.request_id, 5, False, None, (), None),)))
            hub.handle(Changed(FACTS | {"bits": "a"} | LOST, ""))
            hub.handle(Failed("rank 0 has died"))
            hub.handle(Ready(FACTS | {"bits": "b"}))
            trace.status(200)
            trace.release()
            assert not kept.get_finished_spans()  # choices are still open
            hub.handle(News((Token(second.request_id, 6, False, None, (), None),
                             Ended(first.request_id, "stop", {"reused": 2}))))
            hub.end_all("over")

    asyncio.run(run())
    (span,) = kept.get_finished_spans()
    assert span.name == "text_completion m"
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" == CALLER[3:-3]
    found = dict(span.attributes)
    assert 0 <= found.pop("gen_ai.response.time_to_first_chunk") < SECONDS
    assert found == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "pipeinfer",
        "gen_ai.request.model": "m", "gen_ai.response.model": "m",
        "gen_ai.request.max_tokens": 9, "gen_ai.request.seed": 4, "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0, "gen_ai.request.top_k": 7,
        "gen_ai.request.presence_penalty": 0.0, "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop", "error"), "pipeinfer.restarts": 1,
        "http.request.method": "POST", "http.route": "/v1/completions",
        "http.response.status_code": 200, "error.type": "failed"}
    assert span.status.status_code is StatusCode.ERROR
    events = [(event.name, dict(event.attributes)) for event in span.events]
    assert events[:3] == [("first token", {}),
                          ("recovery", {"pipeinfer.why": "rank 2 has died"}),
                          ("pause", {"pipeinfer.why": "rank 0 has died"})]
    assert sorted(name for name, _ in events[3:]) == ["resume", "resume"]
    assert ("resume", {"pipeinfer.tokens": 1, "pipeinfer.same_arithmetic": False}) in events


@pytest.mark.parametrize("header", [b"", b"x" * 9999, b"\xff", CALLER.encode()[:-1], b"00-0-0-1"])
def test_a_traceparent_that_is_none_is_passed_over(header):
    kept = InMemorySpanExporter()
    tracer = tracing.Tracer("", "m", SimpleSpanProcessor(kept))
    tracer.request("/v1/responses", {b"traceparent": header, b"tracestate": b"\x00,=,"}).release()
    assert kept.get_finished_spans()[0].parent is None


@pytest.mark.slow
def test_a_collector_gets_a_span_that_goes_on_after_the_process_was_killed(tmp_path):
    with contextlib.closing(Receiver()) as receiver, \
            contextlib.closing(Kept(tmp_path, otlp=receiver.url)) as door:
        some(door, 3)
        answer = door.ask("/v1/completions", {"prompt": "a secret", "max_tokens": 99,
                                              "stream": True}, traceparent=CALLER)
        begin(answer, 1)
        door.wrote('"op":"tokens"')
        door.killed()
        rest(door)
        door.enter(answer=door.peer.answer)
        door.until(receiver.spans)
        replay = receiver.spans()[0]
        assert replay.trace_id.hex() == CALLER.split("-")[1]
        assert replay.parent_span_id.hex() != CALLER.split("-")[2]  # that of the killed process
        assert [event.name for event in replay.events] == ["journal replay", "resume"]
        rest(door)
        assert all_events(door.ask("/v1/completions", {"prompt": "b", "stream": True}))
        door.ask("/v1/completions", {"prompt": "b", "nonsense": 1})
        door.until(lambda: len(receiver.spans()) >= 3)
        # a span comes when it has ended: that of a stream may be the last
        whole, refused = sorted(receiver.spans()[1:],
                                key=lambda span: values(span)["http.response.status_code"])
        assert whole.name == "text_completion m"
        assert values(whole)["gen_ai.usage.output_tokens"] == len(door.tokens)
        assert values(whole)["http.response.status_code"] == 200
        assert not whole.parent_span_id
        assert values(refused)["http.response.status_code"] == 400
        (path, request, _), *_ = receiver.got
        assert path == "/v1/traces"
        about = values(request.resource_spans[0].resource)
        assert about["service.name"] == "pipeinfer"
        assert b"secret" not in b"".join(body for _, _, body in receiver.got)


@pytest.mark.slow
def test_without_a_collector_requests_go_on_and_it_is_said_once(capfd):
    said = ""

    def told():
        nonlocal said
        said += capfd.readouterr().err
        return "takes no traces" in said

    with front(MODEL, otlp=f"http://127.0.0.1:{launch.free_port()}") as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
        server.until(told)
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    said += capfd.readouterr().err
    assert said.count("takes no traces") == 1
    assert "Traceback" not in said


def test_what_cannot_be_a_collector_and_a_missing_extra_are_one_line(monkeypatch):
    assert tracing.check("http://host:4318") == "http://host:4318"
    for bad in ("host:4318", "ftp://host", "http://", "http://host:x"):
        with pytest.raises(UsageError, match="is not an address such as"):
            tracing.check(bad)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'pipeinfer\[otel\]'"):
        tracing.check("http://host:4318")
