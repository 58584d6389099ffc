"""Log lines: one per event, for any content."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.logs import LogFormat, configure_logs, log_at, request_logs

logger = logging.getLogger("services.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def configured(format: LogFormat) -> io.StringIO:
    stream = io.StringIO()
    configure_logs(level="info", format=format, stream=stream)
    return stream


def test_text_lines_carry_fields() -> None:
    stream = configured("text")
    logger.info("handoff done", extra={"request_id": "r-1", "seconds": 0.123456789, "note": 'a "b" c'})
    line = stream.getvalue()
    assert line.endswith('INFO    services.test handoff done request_id=r-1 seconds=0.123457 note="a \\"b\\" c"\n')


def test_the_package_is_left_out_of_the_logger_name_in_text_and_kept_in_json() -> None:
    own = logging.getLogger("baton_serve.services.test")
    stream = configured("text")
    own.info("started")
    assert stream.getvalue().endswith("INFO    services.test started\n")
    stream = configured("json")
    own.info("started")
    assert json.loads(stream.getvalue())["logger"] == "baton_serve.services.test"


def test_json_lines_have_microseconds() -> None:
    stream = configured("json")
    logger.info("handoff done", extra={"fields": {"seconds": 0.123456789, "count": 3, "none": None}})
    event = json.loads(stream.getvalue())
    assert (event["seconds"], event["count"], event["none"]) == (0.123457, 3, None)


def test_a_line_may_be_about_a_moment_that_has_passed() -> None:
    cases: list[tuple[LogFormat, str]] = [
        ("text", ".250 INFO    services.test it was "),
        ("json", '"time":1700000000.25,'),
    ]
    for format, said in cases:
        stream = configured(format)
        log_at(logger, logging.INFO, "it was", {"request_id": "r-1"}, at=1_700_000_000.25)
        assert said in stream.getvalue()
        assert "r-1" in stream.getvalue()


def test_json_lines_carry_fields() -> None:
    stream = configured("json")
    logger.info("handoff %s", "done", extra={"request_id": "r-1"})
    event = json.loads(stream.getvalue())
    assert (event["event"], event["request_id"], event["level"]) == ("handoff done", "r-1", "info")


@pytest.mark.parametrize("format", ["text", "json"])
def test_fields_given_in_one_piece_are_as_those_given_singly(format: LogFormat) -> None:
    fields = {"request_id": "r-1", "seconds": 0.1234567891, "tokens": 7, "cached": None, "note": 'a "b"', "done": True}
    lines = []
    for extra in (fields, {"fields": fields}):
        stream = configured(format)
        logger.info("ended", extra=extra)
        lines.append(stream.getvalue().partition(" " if format == "text" else "level")[2])
    assert lines[0] == lines[1]
    assert "r-1" in lines[0]


def test_json_lines_carry_whatever_a_field_holds() -> None:
    stream = configured("json")
    for odd in (Path("/tmp"), 2**80, "half of a pair: \ud800", "naïve"):
        logger.info("odd", extra={"odd": odd})
    found = [json.loads(line)["odd"] for line in stream.getvalue().splitlines()]
    assert found == ["/tmp", 2**80, "half of a pair: \ud800", "naïve"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_traceback_stays_on_its_line(format: LogFormat) -> None:
    stream = configured(format)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("a message of\ntwo lines")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError" in stream.getvalue()


def test_lines_below_the_level_are_not_written() -> None:
    stream = configured("text")
    logger.debug("nothing")
    logging.getLogger("httpx").info("nothing")
    assert stream.getvalue() == ""


def test_lines_of_a_task_about_a_request_carry_its_id() -> None:
    stream = configured("json")
    with request_logs("r-1"):
        logger.info("inside")
        logger.info("of another", extra={"request_id": "r-2"})
    logger.info("outside")
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event.get("request_id") for event in found] == ["r-1", "r-2", None]


def test_a_text_line_contains_no_character_that_controls_a_terminal_or_cannot_be_written() -> None:
    stream = configured("text")
    request_id = "a\rb\x1b[2Jc\x9bd\u2028e\ud800f\x00g\u00e9"
    logger.info("request \x1b]0;title\x07ended", extra={"request_id": request_id})
    line = stream.getvalue()
    assert line.endswith(
        "request \\x1b]0;title\\x07ended request_id=a\\rb\\x1b[2Jc\\x9bd\\u2028e\\ud800f\\x00g\u00e9\n"
    )


@pytest.mark.parametrize("name", ["baton_serve", "vllm"])
def test_a_file_for_dictconfig_replaces_the_configuration(name: str, tmp_path: Path) -> None:
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"short": {"format": "%(levelname)s|%(message)s|%(filename)s"}},
        "handlers": {"own": {"class": "logging.FileHandler", "filename": str(tmp_path / "log"), "formatter": "short"}},
        "loggers": {name: {"handlers": ["own"], "level": "WARNING", "propagate": False}},
    }
    (tmp_path / "logging.json").write_text(json.dumps(config))
    own = logging.getLogger("baton_serve")
    try:
        configure_logs(level="debug", format="json", config_file=str(tmp_path / "logging.json"))
        logging.getLogger("baton_serve.services.test").info("left out")
        logging.getLogger("baton_serve.services.test").warning("kept")
    finally:
        for handler in own.handlers:
            handler.close()
        own.handlers.clear()
        own.propagate = True
        own.setLevel(logging.NOTSET)
    assert (tmp_path / "log").read_text() == f"WARNING|kept|{Path(__file__).name}\n"


def test_a_file_of_logging_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    for text, cause in (("{", "Expecting property name"), ('{"version": 2}', "Unsupported version"), ("[]", "list")):
        (tmp_path / "logging.json").write_text(text)
        with pytest.raises(ConfigurationError, match=rf"--log-config-file .*logging.json cannot be used: .*{cause}"):
            configure_logs(level="info", format="text", config_file=str(tmp_path / "logging.json"))
    with pytest.raises(ConfigurationError, match="No such file"):
        configure_logs(level="info", format="text", config_file=str(tmp_path / "none.json"))
