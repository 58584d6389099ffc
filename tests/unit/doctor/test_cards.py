"""Facts about Intel cards in the files of the kernel."""

import os
from pathlib import Path

import pytest

from baton_serve.services.doctor.cards import check_cards, check_visible, intel_cards, runtime_version
from baton_serve.services.doctor.findings import Finding
from tests.unit.doctor.machine import GIB, add_card, forbid, install


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_good_card_has_driver_window_and_permission(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    found = list(check_cards(tmp_path))
    assert {finding.status for finding in found} == {"ok"}
    assert "renderD128 (xe)" in found[0].message


def test_a_card_without_rebar_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    add_card(tmp_path, 0, bar_bytes=GIB // 4)
    finding = by_check(list(check_cards(tmp_path)))["rebar"]
    assert finding.status == "problem" and "256 MiB" in finding.message
    assert "Above 4G" in finding.remedy


def test_a_foreign_driver_is_a_problem(tmp_path: Path) -> None:
    add_card(tmp_path, 0, driver="vfio-pci")
    assert by_check(list(check_cards(tmp_path)))["driver"].status == "problem"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_that_cannot_be_opened_names_its_group(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    forbid(tmp_path / "dev/dri/renderD128")
    assert "usermod" in by_check(list(check_cards(tmp_path)))["permissions"].remedy


def test_a_container_without_dev_dri_is_reported(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    (tmp_path / "dev/dri/renderD128").unlink()
    assert by_check(list(check_cards(tmp_path)))["permissions"].status == "problem"


def test_a_box_without_a_card_is_not_ill(tmp_path: Path) -> None:
    (only,) = check_cards(tmp_path)
    assert only.status == "note"


def test_a_module_without_a_card_is_suspicious(tmp_path: Path) -> None:
    (tmp_path / "sys/module/xe").mkdir(parents=True)
    (only,) = check_cards(tmp_path)
    assert only.status == "warning"


def test_wsl_gets_a_note_about_the_driver_of_windows(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    (only,) = check_cards(tmp_path)
    assert only.status == "note" and "WSL" in only.message and "Windows only" in only.remedy


def test_cards_of_others_do_not_count(tmp_path: Path) -> None:
    add_card(tmp_path, 0, vendor="0x10de")
    assert intel_cards(tmp_path) == []


def test_two_visible_cards_are_mirrored_in_host_memory_by_a_recent_runtime(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    add_card(tmp_path, 1)
    install(tmp_path, "libze-intel-gpu1", "26.9.37000-1")
    finding = by_check(list(check_visible(tmp_path, {})))["host mirror"]
    assert finding.status == "warning" and "ZE_AFFINITY_MASK" in finding.remedy


def test_a_mask_spares_the_mirror(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    add_card(tmp_path, 1)
    assert "host mirror" not in by_check(list(check_visible(tmp_path, {"ZE_AFFINITY_MASK": "1"})))


def test_an_empty_mask_limits_nothing(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    add_card(tmp_path, 1)
    findings = by_check(list(check_visible(tmp_path, {"ZE_AFFINITY_MASK": ""})))
    assert "visible cards" not in findings and findings["host mirror"].status == "warning"


def test_an_older_runtime_has_no_mirror(tmp_path: Path) -> None:
    add_card(tmp_path, 0)
    add_card(tmp_path, 1)
    install(tmp_path, "libze-intel-gpu1", "25.18.33578-1")
    assert by_check(list(check_visible(tmp_path, {})))["host mirror"].status == "ok"


def test_the_runtimes_version_is_that_of_its_own_package(tmp_path: Path) -> None:
    install(tmp_path, "libzip4", "99.1-1")
    install(tmp_path, "intel-opencl-icd", "25.35.1-1")
    install(tmp_path, "zlib1g", "1.3-1")
    assert runtime_version(tmp_path) == (25, 35)
    assert runtime_version(tmp_path / "nowhere") is None
