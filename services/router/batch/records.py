"""The objects of OpenAI's batch API, as clients see them and as the folder stores them."""

from typing import Literal

import msgspec

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome = Literal["completed", "expired", "cancelled", "failed"]
"""The statuses that a batch keeps: its requests have all ended, or will never run."""
FINAL: tuple[BatchStatus, ...] = ("completed", "expired", "cancelled", "failed")


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a file. Times are seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(msgspec.Struct, frozen=True):
    """The record of a file. `owner` is the name of the API key to which it belongs."""

    owner: str
    file: FileObject


class BatchError(msgspec.Struct, frozen=True):
    """Describes one error of an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The errors for which a batch failed."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Counts the requests of a batch. `completed` are those in the output file, `failed` those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a batch. Times are seconds since 1970; a time is None until it is reached."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a batch. Only the process that holds the batch's lock changes it.

    `outcome` is set with the status finalizing and says what follows. `output_ttl_s` is the time in seconds that the
    output is kept, or None for that of the settings.
    """

    owner: str
    batch: BatchObject
    outcome: Outcome | None = None
    output_ttl_s: int | None = None
