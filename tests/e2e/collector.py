"""An OpenTelemetry collector inside the test: takes OTLP over HTTP and remembers the spans."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids in hex, times in seconds since 1970."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_at: float
    ended_at: float
    attributes: dict[str, str | bool | int | float]
    is_error: bool

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


class Collector:
    """`with Collector() as collector:` listens at `collector.url`."""

    def __enter__(self) -> "Collector":
        self.spans: list[ReceivedSpan] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Do not log requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


def _spans_of(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    found: list[ReceivedSpan] = []
    for resource in request.resource_spans:
        names = {item.key: item.value.string_value for item in resource.resource.attributes}
        for scope in resource.scope_spans:
            found += [_span(span, names["service.name"], names["service.instance.id"]) for span in scope.spans]
    return found


def _span(span: WireSpan, service: str, instance: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        instance=instance,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        started_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        attributes={item.key: getattr(item.value, str(item.value.WhichOneof("value"))) for item in span.attributes},
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
    )
