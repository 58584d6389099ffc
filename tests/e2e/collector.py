"""OpenTelemetry collectors inside the test: they take OTLP over HTTP or gRPC and remember the spans."""

import gzip
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
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


class GrpcCollector:
    """`with GrpcCollector() as collector:` listens at `collector.address`, a host and a port. It needs grpcio."""

    def __enter__(self) -> "GrpcCollector":
        grpc: Any = importlib.import_module("grpc")
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def _export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
        self.spans += _spans_of(request)
        return ExportTraceServiceResponse()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait(10)


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
