"""The progress of loading, where standard error is not a terminal."""

import logging
import threading

import pytest

from baton_serve.services.instance.engine_builder import ProgressBar


class Lines(logging.Handler):
    """Keeps log lines, and reports when one has come that contains `awaited`."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited = awaited
        self.has_come = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._awaited in record.getMessage():
            self.has_come.set()


@pytest.mark.parametrize(
    ("stage", "fraction", "awaited"),
    [("loading weights", 0.43, "loading weights, 43 %, "), ("building kernels", 0.0, "building kernels, 0 s since")],
)
def test_a_stage_that_takes_long_is_logged_again_and_again(stage: str, fraction: float, awaited: str) -> None:
    lines, logger = Lines(awaited), logging.getLogger("baton_serve.services.instance.engine_builder")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with ProgressBar(interval_s=0.001) as progress:
            progress(stage, fraction)
            assert lines.has_come.wait(20), "no line within 20 s"
            lines.has_come.clear()
            assert lines.has_come.wait(20), "no second line within 20 s"
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    assert "loading progress" not in {thread.name for thread in threading.enumerate()}
