"""Log lines: one event per line on stderr, as `key=value` text or as JSON, with the request's id where there is one.

Modules log with `logging.getLogger(__name__)`; only a process's `main` configures. Inside `request_logs` every line
carries the request's id; callbacks that run outside give it as `extra={"request_id": ...}`. A line with many fields
gives all of them as `extra={"fields": {...}}`, which takes half the time.
Never log a prompt, an answer or a key.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal, TextIO

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_QUIET_LOGGERS = ("asyncio", "httpcore", "httpx", "uvicorn.access", "uvicorn.error")


def configure_logs(*, level: LogLevel, format: LogFormat, stream: TextIO | None = None) -> None:
    """Replaces whatever was configured before, uvicorn's and warnings' own lines included."""
    # What no line of ours shows need not be found out for each.
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


def log_at(logger: logging.Logger, event: str, fields: dict[str, object], *, at: float) -> None:
    """A line with `fields` about a moment that has passed: `at`, in seconds since 1970."""
    record = logger.makeRecord(logger.name, logging.INFO, "", 0, event, (), None, extra={"fields": fields})
    record.created, record.msecs = at, at % 1.0 * 1e3
    logger.handle(record)


class _BatchingHandler(logging.StreamHandler[TextIO]):
    """Lines of one turn of the event loop leave in one write; a warning leaves at once, with those before it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as in logging: a line that cannot be written ends no request
            self.handleError(record)
            return
        if record.levelno >= logging.WARNING or (loop := asyncio._get_running_loop()) is None:
            self.flush()
        elif len(self._lines) == 1:
            loop.call_soon(self.flush)

    def flush(self) -> None:
        with self.lock or contextlib.nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("\n".join(lines) + "\n")
                self.stream.flush()


class request_logs:  # noqa: N801 - read as a verb: `with request_logs(request_id):`
    """Lines of this task, and of tasks that it starts, are about this request."""

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


class TextFormatter(logging.Formatter):
    """`12:30:01.250 INFO  engine.kv.capacity 4096 blocks fit request_id=r-1`"""

    _second = -1
    _clock = ""

    def format(self, record: logging.LogRecord) -> str:
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._clock = time.strftime("%H:%M:%S", time.localtime(self._second))
        words = [f"{self._clock}.{int(record.msecs):03d} {record.levelname:<7} {record.name} {record.getMessage()}"]
        # Most values are numbers: no call for each.
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
        return " ".join(words).replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """Numbers that are no integers have six decimals: of a time in seconds, microseconds."""

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
        except (ValueError, OverflowError):  # half of a surrogate pair, or an integer of more than 64 bits
            return json.dumps(event, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given: dict[str, object] | None = record.__dict__.get("fields")
    return (
        given
        if given is not None
        else {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
    )


def _text_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text or '"' in text or "=" in text else text
