"""Append the results of a running batch to two files that survive a crash, and know which lines are answered.

The output file gets the results with status 200, the error file all others. Lines are written and synced in groups, in
a thread. A process that dies loses the group that is not written yet, and may leave half a line. `open` removes what
follows the last whole line, so that such requests run again and each is answered exactly once.
"""

import asyncio
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import msgspec

from baton_serve.contracts.batch_lines import BatchResponse, BatchResult, LineError


def result_of(custom_id: str, *, status: int, body: bytes, request_id: str) -> BatchResult:
    """Return the result of a batch's request that got an HTTP response, as a line of the results files."""
    return BatchResult(_new_id(), custom_id, BatchResponse(status, request_id, msgspec.Raw(body)))


def unanswered(custom_id: str, error: LineError) -> BatchResult:
    """Return the result of a batch's request that got no HTTP response, as a line of the error file."""
    return BatchResult(_new_id(), custom_id, None, error)


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"


def is_success(result: BatchResult) -> bool:
    """Return whether a result belongs into the batch's output file; otherwise it belongs into the error file."""
    return result.response is not None and result.response.status_code == 200


@dataclass(slots=True)
class _ResultFile:
    file: BinaryIO
    waiting: list[bytes] = field(default_factory=list)
    """Lines that are not written yet."""


class ResultLog:
    """Appends the results of one batch to its two files, output and errors. The process that holds the batch's lock
    owns it, and closes it.
    """

    def __init__(self, output: BinaryIO, errors: BinaryIO, answered: dict[str, bool]) -> None:
        self._output = _ResultFile(output)
        self._errors = _ResultFile(errors)
        self._answered = answered
        self.num_completed = sum(answered.values())
        self.num_failed = len(answered) - self.num_completed

    @classmethod
    def open(cls, output: Path, errors: Path) -> Self:
        """Open the two results files of a batch, which may be new. Cut off a line that a crash has left incomplete at a
        file's end.

        Raises `OSError`. It reads all results: call it in a thread.
        """
        answered: dict[str, bool] = {}
        files: list[BinaryIO] = []
        try:
            for path in (output, errors):
                file: BinaryIO = path.open("a+b")
                files.append(file)
                file.truncate(_whole_bytes(file, answered))
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(files[0], files[1], answered)

    def is_answered(self, custom_id: str) -> bool:
        """Return whether the request with this `custom_id` has a result."""
        return custom_id in self._answered

    def add(self, result: BatchResult) -> None:
        """Append the result of one request; the next `flush` writes it to disk. A second result of a request is an
        error.
        """
        # Clients join answers to requests by this id, so two results would be ambiguous.
        assert result.custom_id not in self._answered, "a request has two results"
        is_complete = is_success(result)
        self._answered[result.custom_id] = is_complete
        self.num_completed += is_complete
        self.num_failed += not is_complete
        (self._output if is_complete else self._errors).waiting.append(msgspec.json.encode(result) + b"\n")

    async def flush(self) -> None:
        """Write all results so far to disk. Raises `OSError`, after which the log must not be used any more."""
        work = [(one.file, b"".join(one.waiting)) for one in (self._output, self._errors) if one.waiting]
        # Cleared before the write, because results may be added while the thread works.
        for one in (self._output, self._errors):
            one.waiting.clear()
        if work:
            await asyncio.to_thread(_write, work)

    def close(self) -> None:
        """Close both files; results that `flush` has not written are lost."""
        self._output.file.close()
        self._errors.file.close()


def _write(work: list[tuple[BinaryIO, bytes]]) -> None:
    for file, data in work:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _whole_bytes(file: BinaryIO, answered: dict[str, bool]) -> int:
    """Return the length in bytes of the part of a file that consists of whole results. Add these results to `answered`:
    `custom_id` and success.

    Reading stops at the first line that is not a result: after the loss of power a file may have a gap.
    """
    file.seek(0)
    length = 0
    for line in file:
        # The last line of a process that died while it wrote.
        if not line.endswith(b"\n"):
            break
        try:
            result = msgspec.json.decode(line, type=BatchResult)
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
        # A second result of a request can only follow damage, as a gap does.
        if result.custom_id in answered:
            break
        answered[result.custom_id] = is_success(result)
        length += len(line)
    return length
