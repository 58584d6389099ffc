"""Decides by OpenTelemetry whether a request continues its caller's trace or begins one, and whether it is sampled;
sends spans as OTLP.

The SDK's own variables have effect (OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_BSP_SCHEDULE_DELAY, …). If
the collector is down, spans are lost, but requests are not affected.
"""

import asyncio
import importlib
import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton_serve.services.common.tracing import Attributes, Span, Tracing
from baton_serve.services.common.version import VERSION

_propagator = TraceContextTextMapPropagator()


class OpenTelemetryTracing(Tracing):
    """Records spans and sends them to an OpenTelemetry collector. There is one object for each process. `url` is that
    of the collector, with its path for HTTP. `service` and `instance` name this process in traces.
    """

    def __init__(self, url: str, *, over_grpc: bool, service: str, instance: str) -> None:
        """Start the OpenTelemetry SDK's thread, which sends spans over gRPC (`over_grpc`) or HTTP. Raises
        `ModuleNotFoundError` if the SDK's package for that is not installed.
        """
        # The exporter uses urllib3, which would log each connection.
        logging.getLogger("urllib3").setLevel(logging.WARNING)
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": VERSION}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(url, over_grpc=over_grpc)))
        self._tracer = self._provider.get_tracer("baton", VERSION)

    def span(self, name: str, headers: Mapping[str, str], *, at: float | None = None) -> Span:
        context = _propagator.extract(headers)
        # Computed for each request, because the two clocks drift apart.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER, start_time=_nanoseconds(at, epoch_ns))
        return _RecordedSpan(self._tracer, span, epoch_ns)

    async def close(self) -> None:
        """Send the remaining spans and wait for it. A daemon thread does it: a collector that hangs must not keep the
        process alive.
        """
        loop = asyncio.get_running_loop()
        closed = loop.create_future()

        def set_closed() -> None:
            if not closed.done():  # The caller may have been cancelled.
                closed.set_result(None)

        def shut_down() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(set_closed)

        threading.Thread(target=shut_down, name="traces", daemon=True).start()
        await closed


class _RecordedSpan(Span):
    """A span that is sent to the OpenTelemetry collector. `epoch_ns` is the time at which `time.monotonic` was 0, in
    nanoseconds since 1970.
    """

    is_recording = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, epoch_ns: int) -> None:
        headers: dict[str, str] = {}
        self._context = trace.set_span_in_context(span)
        _propagator.inject(headers, self._context)
        super().__init__(headers)
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns

    def child(self, name: str, *, at: float | None = None) -> Span:
        span = self._tracer.start_span(name, self._context, start_time=_nanoseconds(at, self._epoch_ns))
        return _RecordedSpan(self._tracer, span, self._epoch_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def over(self, at: float) -> None:
        self.over_at = at

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        if error is not None:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end(_nanoseconds(at, self._epoch_ns))


def _exporter(url: str, *, over_grpc: bool) -> SpanExporter:
    """Return the OpenTelemetry SDK's object that sends spans to the collector at `url`, over gRPC or HTTP. Raises
    `ModuleNotFoundError` if its package is not installed.
    """
    # The two are packages of their own, and gRPC's is large: import only the one that is asked for.
    name = "grpc" if over_grpc else "http"
    module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{name}.trace_exporter")
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=url)
    return exporter


def _nanoseconds(at: float | None, epoch_ns: int) -> int:
    """Convert `at`, a time of `time.monotonic()` in seconds (None: now), to nanoseconds since 1970. `epoch_ns` is the
    time at which that clock was 0.
    """
    return epoch_ns + (time.monotonic_ns() if at is None else round(at * 1e9))
