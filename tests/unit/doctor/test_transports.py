"""The doctor's report on each transport that it tried; the probe itself is a contract test."""

import pytest

from baton_serve.kvtransfer import Verdict
from baton_serve.kvtransfer.ladder import ProbeOutcome, Rung
from baton_serve.services.doctor.device_findings import probe_ends, transport_finding
from baton_serve.services.doctor.device_probe import DeviceFacts, ProbeFacts


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        ("proved", "ok", "host → host 12.3 GB/s, every byte correct"),
        ("wrong bytes", "problem", "host → host wrong bytes, so it went"),
        ("deadline", "warning", "host → host deadline, so it went"),
        ("crashed", "warning", "host → host crashed, so it went"),
        ("unavailable", "note", "host → host unavailable, so it went"),
    ],
)
def test_each_outcome_is_a_finding(outcome: ProbeOutcome, status: str, said: str) -> None:
    finding = transport_finding(Verdict(Rung("oneccl", "gloo"), outcome, 12.34e9, "so it went"), "host → host")
    assert (finding.check, finding.status, finding.message) == ("transport oneccl by gloo", status, said)


def device(index: int) -> DeviceFacts:
    return DeviceFacts(index=index, name="a card", memory_bytes=1, pinned_to_device=1.0, device_to_pinned=1.0)


@pytest.mark.parametrize(
    ("count", "ends"), [(0, ("", "")), (1, ("xpu:0", "xpu:0")), (2, ("xpu:0", "xpu:1")), (4, ("xpu:0", "xpu:1"))]
)
def test_the_first_two_devices_are_tried(count: int, ends: tuple[str, str]) -> None:
    assert probe_ends(ProbeFacts("2", "xpu", {}, [device(i) for i in range(count)], [])) == ends
    assert probe_ends(None) == ("", "")
