"""Judging what the throw-away process says, and what happens when it says nothing."""

import sys

import msgspec

from baton_serve.services.doctor.device_findings import check_devices, device_findings
from baton_serve.services.doctor.device_probe import DeviceFacts, PeerFacts, ProbeFacts

CARD = DeviceFacts(index=0, name="Arc B580", memory_bytes=12 << 30, pinned_to_device=12e9, device_to_pinned=11e9)


def facts(*peers: PeerFacts, device: DeviceFacts = CARD) -> ProbeFacts:
    return ProbeFacts(torch="2.13.0+xpu", kind="xpu", features={"triton": True}, devices=[device], peers=list(peers))


def says(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_a_good_card_is_reported_with_its_speed() -> None:
    found = list(device_findings(facts()))
    assert {finding.status for finding in found} == {"ok"}
    assert any("12.0 GB/s in, 11.0 GB/s out" in finding.message for finding in found)


def test_a_driver_version_is_shown_if_torch_reports_it() -> None:
    card = msgspec.structs.replace(CARD, driver="1.6.33578")
    shown = [f.message for f in device_findings(facts(device=card)) if f.check == "devices"]
    assert shown == ["xpu:0 Arc B580, 12.0 GiB, driver 1.6.33578"]
    assert all("driver" not in f.message for f in device_findings(facts()))


def test_slow_copies_are_a_warning() -> None:
    slow = msgspec.structs.replace(CARD, device_to_pinned=1.5e9)
    assert [f.status for f in device_findings(facts(device=slow)) if f.check == "copies"] == ["warning"]


def test_a_peer_copy_with_other_bytes_is_a_problem_however_fast_it_was() -> None:
    corrupt = PeerFacts(source=0, target=1, can_access=True, is_intact=False, bytes_per_second=22e9)
    (finding,) = [f for f in device_findings(facts(corrupt)) if f.check == "peer copies"]
    assert finding.status == "problem" and "CCL_TOPO_P2P_ACCESS=0" in finding.remedy


def test_a_verified_peer_copy_is_reported() -> None:
    good = PeerFacts(source=0, target=1, can_access=False, is_intact=True, bytes_per_second=6e9)
    assert any("6.0 GB/s, verified (through host memory)" in f.message for f in device_findings(facts(good)))


def test_a_box_without_accelerator_gets_a_note_not_a_problem() -> None:
    cpu = ProbeFacts(torch="2.13.0+cpu", kind="cpu", features={}, devices=[], peers=[])
    assert {f.status for f in device_findings(cpu)} == {"ok", "note"}


def test_a_driver_that_hangs_is_a_problem_and_does_not_hang_the_doctor() -> None:
    (finding,) = check_devices(0.2, says("import time; time.sleep(60)"))
    assert finding.status == "problem" and "0.2 s" in finding.message


def test_a_probe_that_dies_is_reported_with_its_last_output() -> None:
    (finding,) = check_devices(20, says("raise RuntimeError('UR_RESULT_ERROR_DEVICE_LOST')"))
    assert finding.status == "problem" and "DEVICE_LOST" in finding.message
