"""Messages of strangers do not fill the log."""

import logging

import pytest

from baton_serve.services.common.logs import LimitedLog

logger = logging.getLogger("services.test")


def test_lines_that_follow_too_soon_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logger, every_s=10.0, clock=lambda: now)
    for number in range(100):
        log.warning("frame %d refused", number)
    now = 10.0
    log.warning("frame %d refused", 100)
    now = 20.0
    log.warning("frame %d refused", 101)
    assert [record.message for record in caplog.records] == [
        "frame 0 refused",
        "frame 100 refused (99 more such lines since the last one)",
        "frame 101 refused",
    ]
