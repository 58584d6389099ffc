"""Settings of the version before that have no effect any more: accepted, with a line in the log."""

import logging
from pathlib import Path

import pytest

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.router.main import warn_of_removed
from baton_serve.services.router.settings import RouterSettings


def loaded(argv: list[str], environ: dict[str, str]) -> RouterSettings:
    return load(
        RouterSettings,
        ["--model", "m", *argv],
        environ,
        prefix="BATON__ROUTER__",
        program="baton router",
        description="",
    )


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
@pytest.mark.parametrize("value", ["0", "4096"])
def test_a_removed_setting_is_accepted_and_named_in_the_log(
    source: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"joint-prefill-min-tokens: {value}\n")
    argv = {"flag": ["--joint-prefill-min-tokens", value], "variable": [], "file": ["--config", str(file)]}[source]
    environ = {"BATON__ROUTER__JOINT_PREFILL_MIN_TOKENS": value} if source == "variable" else {}
    with caplog.at_level(logging.WARNING):
        warn_of_removed(loaded(argv, environ))
    (line,) = caplog.messages
    assert "--joint-prefill-min-tokens has no effect any more" in line


def test_without_removed_settings_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_removed(loaded([], {}))
    assert not caplog.messages
