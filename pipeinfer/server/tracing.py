"""Requests as spans of OpenTelemetry: `serve --otlp-endpoint URL`.

There is one span per request, with names by OpenTelemetry's conventions for generative AI. It is a
child of the span in the client's `traceparent`. It contains figures and names, no text of prompts
or answers. The SDK is in the extra `otel`; without --otlp-endpoint it is not loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeinfer import __version__
from pipeinfer.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.trace import Span

    from pipeinfer.server.choice import Generation
    from pipeinfer.server.requests import EngineRequest

#: the operation of each path, by the conventions
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat",
              "/v1/messages": "chat", "/v1/completions": "text_completion"}
KINDS = {"chat": "/v1/chat/completions", "items": "/v1/responses", "blocks": "/v1/messages",
         "text": "/v1/completions"}
_PARAMS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
_EXPORT_SECONDS, _LAST_SECONDS = 5.0, 3.0
_EVERY_MS = 1000
_log = logging.getLogger("pipeinfer.server")


def check(endpoint: str) -> str:
    """Return the address of a collector as it was given. Raises UsageError."""
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"--otlp-endpoint {endpoint} is not an address such as "
                         "http://collector:4318")
    names = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if not all(map(_is_there, names)):
        raise UsageError("--otlp-endpoint needs OpenTelemetry: pip install 'pipeinfer[otel]'")
    return endpoint


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Tracer:
    """Makes traces and sends them. processor: receives spans instead of the exporter."""

    def __init__(self, endpoint: str, model: str, processor: SpanProcessor | None = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        about = {"service.version": __version__}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            about["service.name"] = "pipeinfer"
        self._model = model
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(processor or _exporting(endpoint))
        self._tracer = self._provider.get_tracer("pipeinfer", __version__)

    def request(self, path: str, headers: Mapping[bytes, bytes]) -> RequestTrace:
        """Return the trace of a request to one of OPERATIONS."""
        parent = {name: headers[name.encode()].decode("latin-1")
                  for name in ("traceparent", "tracestate") if name.encode() in headers}
        return self._start(path, parent)

    def replay(self, kind: str, traceparent: str, answer_id: str) -> RequestTrace:
        """Return the trace of a journaled request that an earlier process had begun, as a child
        of that process's span."""
        trace = self._start(KINDS[kind], {"traceparent": traceparent} if traceparent else {})
        trace.about(answer_id)
        return trace

    def _start(self, path: str, parent: Mapping[str, str]) -> RequestTrace:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        operation = OPERATIONS[path]
        span = self._tracer.start_span(
            f"{operation} {self._model}", TraceContextTextMapPropagator().extract(dict(parent)),
            SpanKind.SERVER, {
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "pipeinfer",
                "gen_ai.request.model": self._model, "gen_ai.response.model": self._model,
                "http.request.method": "POST", "http.route": path})
        return RequestTrace(span)

    def close(self) -> None:
        """Send the remaining spans, within some seconds."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)


class RequestTrace:
    """The span of a request. It ends with the last of its holders: the exchange with the client,
    and the choices that the engine works on."""

    def __init__(self, span: Span) -> None:
        self._span, self._holders = span, 1
        self._asked = False
        self._input = self._cached = self._output = 0
        self._reasons: dict[int, str] = {}

    @property
    def traceparent(self) -> str:
        """The span in the format of the header `traceparent`."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return carrier.get("traceparent", "")

    def about(self, answer_id: str) -> None:
        """Record the answer's id."""
        self._span.set_attribute("gen_ai.response.id", answer_id)

    def began(self, generation: Generation, asked: EngineRequest) -> None:
        """Record that a choice is sent to the engine."""
        self._holders += 1
        if generation.index % asked.n == 0:
            self._input += generation.counts.prompt
        if not self._asked:
            self._asked = True
            self._span.set_attributes({
                "gen_ai.request.max_tokens": asked.max_tokens, "gen_ai.request.seed": asked.seed,
                "gen_ai.request.choice.count": asked.count, "gen_ai.request.stream": asked.stream,
                **{f"gen_ai.request.{name}": getattr(asked.params, name) for name in _PARAMS}})

    def first(self, generation: Generation) -> None:
        """Record a choice's first token; only that of choice 0 counts."""
        counts = generation.counts
        if generation.index == 0 and counts.first is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk",
                                     counts.first - counts.submitted)
            self._span.add_event("first token")

    def event(self, name: str, **attributes: str | int | bool) -> None:
        """Record an event."""
        self._span.add_event(name, {f"pipeinfer.{key}": value for key, value in attributes.items()})

    def ended(self, generation: Generation) -> None:
        """Record the end of a choice."""
        from opentelemetry.trace import Status, StatusCode

        stats = generation.stats
        self._output += generation.counts.output
        self._cached += int(stats.get("reused", 0))
        self._reasons[generation.index] = generation.reason or ""
        self._span.set_attributes({
            "gen_ai.usage.input_tokens": self._input, "gen_ai.usage.output_tokens": self._output,
            "gen_ai.usage.cache_read.input_tokens": self._cached,
            "gen_ai.response.finish_reasons": [r for _, r in sorted(self._reasons.items())],
            "pipeinfer.restarts": generation.restarts})
        if generation.failure is not None:
            self._span.set_attribute("error.type", generation.failure.kind)
            self._span.set_status(Status(StatusCode.ERROR, generation.failure.kind))
        self.release()

    def status(self, code: int) -> None:
        """Record the answer's HTTP status."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("http.response.status_code", code)
        if code >= 400:
            self._span.set_attribute("error.type", str(code))
        if code >= 500:
            self._span.set_status(Status(StatusCode.ERROR))

    def release(self) -> None:
        """Remove one holder of the span; end the span with the last."""
        self._holders -= 1
        if not self._holders:
            self._span.end()


def _exporting(endpoint: str) -> SpanProcessor:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class Telling(SpanExporter):
        """Logs once that a collector fails, and once that it works again."""

        def __init__(self) -> None:
            whole = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
            self._inner = OTLPSpanExporter(endpoint=whole, timeout=_EXPORT_SECONDS)
            self._failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            found: Any
            try:
                found = self._inner.export(spans)
            except Exception:  # such as an answer that is no HTTP: must not end the export thread
                found = SpanExportResult.FAILURE
            failing = found is not SpanExportResult.SUCCESS
            if failing and not self._failing:
                _log.warning("the collector at %s takes no traces: those of meanwhile are lost",
                             endpoint)
            elif self._failing and not failing:
                _log.warning("the collector at %s takes traces again", endpoint)
            self._failing = failing
            return SpanExportResult.FAILURE if failing else SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            self._inner.shutdown()  # type: ignore[no-untyped-call]

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return self._inner.force_flush(timeout_millis)

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return BatchSpanProcessor(Telling(), schedule_delay_millis=_EVERY_MS)
