"""Spans: where a request's time went in each process, tied together by the W3C trace context that travels with it.

`Tracing` and `Span` do nothing but pass the context on, so a process that does not trace breaks no trace. Only with
--otlp-traces-endpoint is OpenTelemetry loaded (`services.common.opentelemetry_tracing`). Times are moments of
`time.monotonic()`; None is now. A span ends once, and whoever starts one ends it.
"""

import asyncio
import importlib
from collections.abc import Callable, Mapping
from types import TracebackType
from urllib.parse import urlsplit

from baton_serve.services.common.errors import ConfigurationError

TRACE_HEADERS = ("traceparent", "tracestate")
_MAX_HEADER_CHARS = 512
_DEFAULT_PATH = "/v1/traces"

Attributes = Mapping[str, str | bool | int | float]


class Span:
    """`with` ends it: with the error that left the block if one did, and as of `over_at` where that was said."""

    is_recording = False
    """Whether anybody will see what is set."""
    over_at: float | None = None

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    @property
    def headers(self) -> dict[str, str]:
        """The context for spans below this one in other processes."""
        return dict(self._headers)

    def child(self, name: str, *, at: float | None = None) -> "Span":
        return self

    def set(self, attributes: Attributes) -> None:
        """Adds attributes; those of the same name are replaced."""

    def over(self, at: float) -> None:
        """What it stands for was over then, though the task that says so may run later."""

    def end(self, *, at: float | None = None, error: str | None = None) -> None:
        """Nothing is recorded after this."""

    def __enter__(self) -> "Span":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):  # nobody wants the rest: no failure
            self.set({"baton.cancelled": True})
            error = None
        self.end(at=self.over_at, error=None if error is None else f"{type(error).__name__}: {error}")


class Tracing:
    """Records nothing."""

    def span(self, name: str, headers: Mapping[str, str], *, at: float | None = None) -> Span:
        """The first span of this process for a request whose context came as `headers`."""
        return Span(headers) if headers else NO_SPAN

    async def close(self) -> None:
        """Sends what was recorded, as far as that takes no longer than seconds."""


NO_SPAN = Span({})


def trace_headers(header: Callable[[str], str | None]) -> dict[str, str]:
    """The trace context among the headers of an HTTP request. `header` looks one up by its name in lower case."""
    found = {name: header(name) for name in TRACE_HEADERS}
    return {name: value for name, value in found.items() if value and len(value) <= _MAX_HEADER_CHARS}


def make_tracing(endpoint: str | None, *, service: str, instance: str) -> Tracing:
    """`endpoint` is the setting of that name. Raises `ConfigurationError`."""
    if not endpoint:
        return Tracing()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigurationError(
            f"--otlp-traces-endpoint {endpoint}: traces leave as OTLP over HTTP (protobuf), "
            f"to an endpoint such as http://collector:4318{_DEFAULT_PATH}"
        )
    try:
        backend = importlib.import_module("baton_serve.services.common.opentelemetry_tracing")
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs packages that are not installed ({exc.name}): "
            "pip install 'baton-serve[otel]'"
        ) from exc
    url = parts._replace(path=_DEFAULT_PATH if parts.path in ("", "/") else parts.path).geturl()
    tracing: Tracing = backend.OpenTelemetryTracing(url, service=service, instance=instance)
    return tracing
