"""Decides whether a process sends trace spans at all (`--otlp-traces-endpoint`), and which headers of the W3C trace
context are passed on; `opentelemetry_tracing.py` makes the spans.

`Tracing` and `Span` only pass the context on, so that a process without tracing does not interrupt a trace. With
--otlp-traces-endpoint OpenTelemetry is loaded (`services.common.opentelemetry_tracing`). Times are moments of
`time.monotonic()`; None means now. The code that starts a span must end it, once.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from urllib.parse import SplitResult, urlsplit

from baton_serve.services.common.errors import ConfigurationError

TRACE_HEADERS = ("traceparent", "tracestate")
_MAX_HEADER_CHARS = 512
"""Longest header that is passed on. The specification asks for at least 512 characters."""
_DEFAULT_PATH = "/v1/traces"
_PROTOCOLS = ("http/protobuf", "grpc")
"""Protocols of OTLP, the default first."""

Attributes = Mapping[str, str | bool | int | float]


class Span:
    """One span of a request's trace. This base class records nothing and only passes the trace context on. In a `with`
    statement the span ends with the block: at the time `over_at` if that is set, and with the error if the block raises
    one.
    """

    is_recording = False
    """True if attributes are recorded. Code can skip computing them otherwise."""
    over_at: float | None = None
    """Time at which the work of this span ended, if it is earlier than the end of the block."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @property
    def headers(self) -> dict[str, str]:
        """The trace context as headers: a process that gets them makes its spans children of this one."""
        return dict(self._headers)

    def child(self, name: str, *, at: float | None = None) -> "Span":
        """Start a child span of this span, in the same process. `at` is its start (`time.monotonic()`);
        None means now.
        """
        return self

    def set(self, attributes: Attributes) -> None:
        """Set attributes of the span. An attribute that has the same name is replaced."""

    def over(self, at: float) -> None:
        """Set the time at which the span's work ended to `at` (`time.monotonic()`), because the task that ends the span
        may run later.
        """

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """End the span at `at` (`time.monotonic()`; None means now), with the text of an error if its work failed.
        Nothing is recorded afterwards.
        """

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A request that its client has cancelled is not a failure.
        if isinstance(error, asyncio.CancelledError):
            self.set({"baton.cancelled": True})
            error = None
        self.end(at=self.over_at, error=None if error is None else f"{type(error).__name__}: {error}")


class Tracing:
    """Makes spans that record nothing: the tracing of a process without --otlp-traces-endpoint."""

    def span(self, name: str, headers: Mapping[str, str], *, at: float | None = None) -> Span:
        """Start the first span of this process for a request. `headers` contain the trace context that came with the
        request. `at` is its start (`time.monotonic()`); None means now.
        """
        return Span(headers) if headers else NO_SPAN

    async def close(self) -> None:
        """Send the spans that are recorded and not sent yet. It may take a few seconds; a caller that stops waiting
        loses the rest.
        """


NO_SPAN = Span({})


def trace_headers(header: Callable[[str], str | None]) -> dict[str, str]:
    """Return the trace context (`traceparent`, `tracestate`) of an HTTP request. `header` returns one of its headers by
    the lower-case name, or None.
    """
    found = {name: header(name) for name in TRACE_HEADERS}
    return {name: value for name, value in found.items() if value and len(value) <= _MAX_HEADER_CHARS}


def make_tracing(
    endpoint: str | None, *, service: str, instance: str, environ: Mapping[str, str] = MappingProxyType({})
) -> Tracing:
    """Return the tracing of this process, which names it as `service` and `instance`. `endpoint` is the value of
    --otlp-traces-endpoint; without it nothing is recorded.

    Spans are sent over gRPC if the endpoint begins with grpc://, or if OTEL_EXPORTER_OTLP_TRACES_PROTOCOL in `environ`
    says so. Raises `ConfigurationError` if it is not such a URL, or if OpenTelemetry is not installed.
    """
    if not endpoint:
        return Tracing()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https", "grpc") or not parts.netloc:
        raise ConfigurationError(
            f"--otlp-traces-endpoint {endpoint} is not an HTTP or gRPC URL: traces are sent as OTLP (protobuf) "
            f"to an endpoint such as http://collector:4318{_DEFAULT_PATH} or grpc://collector:4317"
        )
    over_grpc = parts.scheme == "grpc" or _protocol(environ) == "grpc"
    try:
        # An optional dependency: import it only if it is asked for.
        backend = importlib.import_module("baton_serve.services.common.opentelemetry_tracing")
        # gRPC has methods instead of paths.
        url = endpoint if over_grpc else _with_path(parts)
        tracing: Tracing = backend.OpenTelemetryTracing(url, over_grpc=over_grpc, service=service, instance=instance)
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs the package {exc.name}, which is not installed: "
            f"pip install 'baton-serve[{'otel-grpc' if over_grpc else 'otel'}]'"
        ) from exc
    return tracing


def _with_path(parts: SplitResult) -> str:
    """Return the URL of a collector over HTTP, with the default path for traces (`/v1/traces`) if it has none."""
    return parts._replace(path=_DEFAULT_PATH if parts.path in ("", "/") else parts.path).geturl()


def _protocol(environ: Mapping[str, str]) -> str:
    """Return the protocol for sending spans (`http/protobuf` or `grpc`) that OpenTelemetry's variables in `environ`
    select. Raises `ConfigurationError` for a protocol that Baton cannot send.
    """
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name):
            if protocol not in _PROTOCOLS:
                raise ConfigurationError(f"{name}={protocol} is not supported: use {' or '.join(_PROTOCOLS)}")
            return protocol
    return _PROTOCOLS[0]
