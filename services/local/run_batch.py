"""`baton run-batch`: sends the requests of a file to a server, decides which are tried again, and writes the
answers.

The formats are those of OpenAI's batch API and the options those of `vllm run-batch`. With a MODEL a cluster is started
for it and stopped at the end.
"""

import asyncio
import codecs
import contextlib
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, TextIO

import httpx
import msgspec

from baton_serve.contracts.batch_lines import (
    BATCH_ENDPOINTS,
    BatchResponse,
    BatchResult,
    InvalidLineError,
    LineError,
    parse_line,
)
from baton_serve.services.common.errors import ConfigurationError, LocalError
from baton_serve.services.common.settings.configuration import environment, load, stop
from baton_serve.services.local.serve_process import LocalCluster
from baton_serve.services.local.settings import RunBatchSettings

PROGRAM = "baton run-batch"
_TIMEOUT = httpx.Timeout(3600.0, connect=10.0)
"""The server limits the time of a request itself (--request-timeout-s), by default to an hour."""
_PROGRESS_S = 0.5
_MAX_TRIES = 8
_MAX_DELAY_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Run `baton run-batch` with these arguments. Return the exit status: 1 if a request got no answer
    with status 200.
    """
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    own, options = words[:end], words[end + 1 :]
    environ = environment()
    settings = load(
        RunBatchSettings,
        own,
        environ,
        prefix="BATON__RUN_BATCH__",
        program=PROGRAM,
        description="Answer the requests of a JSONL file in the format of OpenAI's batch API, with a running server or"
        " with a MODEL, for which a cluster is started and stopped.",
    )
    if options and not settings.model:
        stop(PROGRAM, f"options after -- are those of a cluster, but no MODEL is given: {options[0]}")
    # An exception, so that the cluster is stopped; by default these signals end the process at once.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)
    try:
        with (
            Path(settings.input_file).open("rb") as lines,
            Path(settings.output_file).open("wb") as output,
            _server(settings, options) as url,
        ):
            client = BatchClient(url, _key(settings, environ), output, ProgressLine(sys.stderr))
            return 0 if asyncio.run(client.run(lines, settings.max_concurrency)) else 1
    except KeyboardInterrupt:
        return 130
    except (LocalError, OSError) as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 2 if isinstance(exc, ConfigurationError) else 1


def _exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _key(settings: RunBatchSettings, environ: Mapping[str, str]) -> str | None:
    """Return the API key for the server, or None. Keys in the environment are used only for a server at `--url`: they
    do not belong to a cluster that is started here.
    """
    if settings.api_key or settings.model:
        return settings.api_key
    return environ.get("VLLM_API_KEY") or environ.get("OPENAI_API_KEY")


@contextlib.contextmanager
def _server(settings: RunBatchSettings, options: Sequence[str]) -> Iterator[str]:
    """Yield the URL, without `/v1`, of the server at `--url` or, if a MODEL is given, of a local cluster for it, which
    is started with `options` and stopped at the end of the block.
    """
    if not settings.model:
        yield settings.url.rstrip("/").removesuffix("/v1")
        return
    with LocalCluster([settings.model, "--log-level=error", *options]) as cluster:
        yield cluster.url


class ProgressLine:
    """Shows how many requests of a batch have ended: on a terminal while they run, elsewhere once at the end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown_at = 0.0
        self._begun_at = time.monotonic()
        self.num_ended = 0
        self.num_failed = 0

    def add(self, *, is_failed: bool) -> None:
        """Count a request that has ended, and whether it failed."""
        self.num_ended += 1
        self.num_failed += is_failed
        if self._out.isatty() and time.monotonic() - self._shown_at > _PROGRESS_S:
            self._shown_at = time.monotonic()
            self._out.write(f"\r{self._text()}")
            self._out.flush()

    def end(self) -> None:
        """Print the final numbers of ended and failed requests."""
        start = "\r" if self._out.isatty() else ""
        self._out.write(f"{start}{self._text()}\n")

    def _text(self) -> str:
        seconds = max(time.monotonic() - self._begun_at, 1e-9)
        return f"{self.num_ended} requests ended, {self.num_failed} failed, {self.num_ended / seconds:.1f} per second"


class BatchClient:
    """Sends the requests of one batch file to the server at `url`, and writes each result to `output` as soon as it is
    there.
    """

    def __init__(self, url: str, api_key: str | None, output: BinaryIO, progress: ProgressLine) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._output = output
        self._progress = progress

    async def run(self, lines: BinaryIO, max_concurrency: int) -> bool:
        """Send the requests in `lines`, at most `max_concurrency` at once. Return whether each got an answer with
        status 200.
        """
        limits = httpx.Limits(max_connections=max_concurrency)
        running: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT, limits=limits) as http:
            for number, written in enumerate(lines):
                # Some editors begin a file with a byte order mark.
                line = written if number else written.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    continue
                # Only as many lines as may run are in memory.
                if len(running) >= max_concurrency:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running.add(asyncio.create_task(self._answer(http, line)))
            if running:
                await asyncio.wait(running)
        self._progress.end()
        return self._progress.num_failed == 0

    async def _answer(self, http: httpx.AsyncClient, line: bytes) -> None:
        result_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            request = parse_line(line, BATCH_ENDPOINTS)
        except InvalidLineError as exc:
            self._write(BatchResult(result_id, _custom_id(line), None, LineError(exc.code, exc.message)))
            return
        try:
            response = await self._post(http, request.url, bytes(request.body))
            body = msgspec.json.decode(response.content, type=msgspec.Raw)
        except (httpx.HTTPError, msgspec.DecodeError) as exc:
            message = f"the server gave no answer: {exc or type(exc).__name__}"
            self._write(BatchResult(result_id, request.custom_id, None, LineError("no_answer", message)))
            return
        request_id = response.headers.get("x-request-id", "")
        self._write(BatchResult(result_id, request.custom_id, BatchResponse(response.status_code, request_id, body)))

    async def _post(self, http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
        """Send the request `body` to the server's `path`, and again after a delay if the server is overloaded. Raises
        `httpx.HTTPError` if it does not answer.
        """
        for number in range(1, _MAX_TRIES + 1):
            response = await http.post(path, content=body, headers=self._headers)
            if response.status_code not in (429, 503) or number == _MAX_TRIES:
                break
            await asyncio.sleep(min(_MAX_DELAY_S, 0.5 * 2**number))
        return response

    def _write(self, result: BatchResult) -> None:
        self._output.write(msgspec.json.encode(result) + b"\n")
        # A user who follows the file sees whole lines at once.
        self._output.flush()
        self._progress.add(is_failed=result.response is None or result.response.status_code != 200)


def _custom_id(line: bytes) -> str:
    """Return the `custom_id` of `line`, a line of the batch file that is not a valid request. Return an empty string if
    the line has no `custom_id`.
    """
    try:
        return str(msgspec.json.decode(line)["custom_id"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
