"""The destination of traces, invalid settings, and that a process without tracing passes traces on."""

import asyncio
import sys

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.tracing import Tracing, make_tracing, trace_headers
from tests.e2e.collector import GrpcCollector

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_nothing_is_recorded_and_nothing_loaded_without_an_endpoint() -> None:
    assert type(make_tracing(None, service="s", instance="i")) is Tracing
    assert type(make_tracing("", service="s", instance="i")) is Tracing


def test_a_process_that_does_not_trace_passes_the_context_on() -> None:
    span = Tracing().span("llm_request", {"traceparent": TRACEPARENT})
    with span.child("tokenize") as child:
        assert child.headers == span.headers == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize("endpoint", ["grpc://", "collector:4318", "http://", "file:///tmp/traces"])
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


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"])
def test_the_variables_of_the_sdk_choose_the_protocol(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    for endpoint, environ in (("http://collector:4317", {name: "grpc"}), ("grpc://collector:4317", {})):
        with pytest.raises(ConfigurationError, match=r"pip install 'baton-serve\[otel-grpc\]'"):
            make_tracing(endpoint, service="s", instance="i", environ=environ)
    with pytest.raises(ConfigurationError, match=rf"{name}=http/json is not supported: use http/protobuf or grpc"):
        make_tracing("http://collector:4318", service="s", instance="i", environ={name: "http/json"})
    tracing = make_tracing("http://collector:4318", service="s", instance="i", environ={name: "http/protobuf"})
    assert type(tracing) is not Tracing
    asyncio.run(tracing.close())


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_spans_are_sent_over_grpc(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    # As with vLLM: a grpc:// endpoint uses TLS unless this says otherwise.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "true")
    with GrpcCollector() as collector:
        endpoint, environ = f"{scheme}://{collector.address}", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
        tracing = make_tracing(endpoint, service="s", instance="i", environ=environ if scheme == "http" else {})
        with tracing.span("llm_request", {"traceparent": TRACEPARENT}) as span:
            span.child("tokenize").end()
        asyncio.run(tracing.close())
    names = {span.name: (span.service, span.instance, span.trace_id) for span in collector.spans}
    assert names == dict.fromkeys(("llm_request", "tokenize"), ("s", "i", TRACEPARENT.split("-")[1]))
