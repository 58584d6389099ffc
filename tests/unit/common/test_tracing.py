"""The destination of traces, invalid settings, and that a process without tracing passes traces on."""

import sys

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.tracing import Tracing, make_tracing, trace_headers

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_nothing_is_recorded_and_nothing_loaded_without_an_endpoint() -> None:
    assert type(make_tracing(None, service="s", instance="i")) is Tracing
    assert type(make_tracing("", service="s", instance="i")) is Tracing


def test_a_process_that_does_not_trace_passes_the_context_on() -> None:
    span = Tracing().span("llm_request", {"traceparent": TRACEPARENT})
    with span.child("tokenize") as child:
        assert child.headers == span.headers == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize("endpoint", ["grpc://collector:4317", "collector:4318", "http://", "file:///tmp/traces"])
def test_an_endpoint_that_is_no_http_address_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="http://collector:4318/v1/traces"):
        make_tracing(endpoint, service="s", instance="i")


def test_missing_packages_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "baton_serve.services.common.opentelemetry_tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'baton-serve\[otel\]'"):
        make_tracing("http://collector:4318", service="s", instance="i")


def test_only_headers_of_the_trace_context_are_taken_and_no_longer_than_the_standard_says() -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "x" * 513, "authorization": "Bearer key"}
    assert trace_headers(headers.get) == {"traceparent": TRACEPARENT}
