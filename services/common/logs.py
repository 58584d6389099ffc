"""Decides the form of log lines (text or JSON, levels, request ids), as one event per line on stderr.

Modules log with `logging.getLogger(__name__)`; only the `main` of a process calls `configure_logs`. Inside
`request_logs` each line carries the request's id; a callback that runs outside of it passes the id as
`extra={"request_id": ...}`. A line with many fields passes all of them as `extra={"fields": {...}}`, which takes half
the time. Never log a prompt, an answer or a key.

`LimitedLog` limits the rate of warnings that a peer can cause, so that a faulty or hostile peer cannot fill the log.
"""

import asyncio
import contextlib
import json
import logging
import logging.config
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal, TextIO

import msgspec

from baton_serve.services.common.errors import ConfigurationError


class LimitedLog:
    """Logs warnings, but at most one line in `every_s` seconds. The next line contains how many were left out."""

    def __init__(
        self, logger: logging.Logger, *, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._next_at = float("-inf")
        self._num_left_out = 0

    def warning(self, message: str, *values: object) -> None:
        """Log a warning like `Logger.warning`; if one was logged less than `every_s` ago, only count it."""
        now = self._clock()
        if now < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message += " (%d more such lines since the last one)"
            values += (self._num_left_out,)
        self._next_at, self._num_left_out = now + self._every_s, 0
        self._logger.warning(message, *values)


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

# Attributes that every record has; all others were given as `extra` and are printed.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_SOURCE_FILE = logging._srcfile
"""The file that `logging` skips to find the place of a call; None turns the search off."""
_QUIET_LOGGERS = ("asyncio", "httpcore", "httpx", "uvicorn.access", "uvicorn.error")
"""Loggers of libraries that would print a line for each request at level info."""
_NAME_PREFIX = "baton_serve."
"""Start of the name of every logger of this project. Text lines leave it out."""


def configure_logs(
    *, level: LogLevel, format: LogFormat, stream: TextIO | None = None, config_file: str | None = None
) -> None:
    """Configure the logging of this process (the root logger) for stderr or `stream`. This replaces an earlier
    configuration, also that of uvicorn and of `warnings`.

    `config_file` is a JSON file with a configuration for `logging.config.dictConfig`, which is applied instead of
    `level` and `format`. Raises `ConfigurationError` if it cannot be used.
    """
    if config_file is not None:
        _configure_by(config_file)
        return
    # No line shows the source line, the thread or the process, so looking them up for each record would be wasted time.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = _BatchingHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    handler.addFilter(_add_request_id)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)


def log_at(logger: logging.Logger, level: int, event: str, fields: dict[str, object], *, at: float) -> None:
    """Log `event` with `fields` at `level` by `logger`, but with the time `at` (seconds since 1970) instead of the
    current time.
    """
    record = logger.makeRecord(logger.name, level, "", 0, event, (), None, extra={"fields": fields})
    record.created, record.msecs = at, at % 1.0 * 1e3
    logger.handle(record)


class _BatchingHandler(logging.StreamHandler[TextIO]):
    """A log handler that writes all lines of one iteration of the event loop by one call. A warning is written
    immediately.

    A busy router logs a line per request, and a system call for each line would be a large part of its cost.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as in `logging`: a line that cannot be formatted must not fail a request
            self.handleError(record)
            return
        # A warning may be the last line before a crash. Outside an event loop nothing would flush later.
        if record.levelno >= logging.WARNING or (loop := asyncio._get_running_loop()) is None:
            self.flush()
        elif len(self._lines) == 1:
            loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the lines that were collected and not written yet."""
        with self.lock or contextlib.nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("\n".join(lines) + "\n")
                self.stream.flush()


class request_logs:  # noqa: N801 - read as a verb: `with request_logs(request_id):`
    """Adds a request id to all lines that this task, and tasks that it starts, log inside the `with` block."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        self._token = _request_id.set(self._request_id)

    def __exit__(self, *exc_info: object) -> None:
        _request_id.reset(self._token)


def _add_request_id(record: logging.LogRecord) -> bool:
    if (request_id := _request_id.get()) is not None:
        record.__dict__.setdefault("request_id", request_id)
    return True


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, other line breaks, and halves of surrogate pairs, which a stream cannot write."""


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class TextFormatter(logging.Formatter):
    """Formats a line such as `12:30:01.250 INFO    engine.kv.capacity 4096 blocks fit request_id=r-1`.

    The name of the logger is printed without `baton_serve.`, which all loggers of this project share.
    """

    # `localtime` and `strftime` are slow, so their result is kept for the lines of the same second.
    _second = -1
    _clock = ""

    def format(self, record: logging.LogRecord) -> str:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._clock = time.strftime("%H:%M:%S", time.localtime(self._second))
        name = record.name.removeprefix(_NAME_PREFIX)
        words = [f"{self._clock}.{int(record.msecs):03d} {record.levelname:<7} {name} {record.getMessage()}"]
        # Most values are numbers; formatting them here saves a function call for each.
        words += [
            f"{key}={value:.6g}"
            if type(value) is float
            else f"{key}={value}"
            if type(value) is int
            else f"{key}={_text_value(value)}"
            for key, value in _fields(record).items()
            if value is not None
        ]
        if record.exc_info:
            words.append(f"exception={json.dumps(self.formatException(record.exc_info))}")
        # One event stays one line, and a client's text can neither imitate another event with a line break nor control
        # the terminal that shows it.
        line = " ".join(words)
        return line if line.isprintable() else _UNPRINTABLE.sub(_escaped, line)


class JsonFormatter(logging.Formatter):
    """Formats a line as a JSON object. Floats have six decimals, so a time in seconds is exact to a microsecond."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{key: round(value, 6) if type(value) is float else value for key, value in _fields(record).items()},
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        try:
            return _encoder.encode(event).decode()
        except (ValueError, OverflowError):
            # msgspec encodes neither half of a surrogate pair nor an integer of more than 64 bits.
            return json.dumps(event, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given: dict[str, object] | None = record.__dict__.get("fields")
    return (
        given
        if given is not None
        else {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
    )


def _text_value(value: object) -> str:
    """Return a field's value for `key=value` in a log line. Text with spaces, quotes or `=` is quoted, so that a parser
    does not split it.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text or '"' in text or "=" in text else text


def _configure_by(path: str) -> None:
    """Configure logging by the JSON file of `--log-config-file`. Raises `ConfigurationError` if it cannot be used."""
    # A format of the file may have the place of a call, its thread and its process.
    logging._srcfile = _SOURCE_FILE
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        loggers = config.setdefault("loggers", {})
        # A file that was written for vLLM configures the logger of its name.
        if "vllm" in loggers:
            loggers.setdefault("baton_serve", loggers["vllm"])
        logging.config.dictConfig(config)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, KeyError) as exc:
        raise ConfigurationError(f"--log-config-file {path} cannot be used: {exc}") from exc
    for name in _QUIET_LOGGERS:
        if name not in loggers:
            logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
