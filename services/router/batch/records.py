"""Define the objects of OpenAI's batch API, as clients see them and as the folder stores them."""

from typing import Literal

import msgspec

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Outcome = Literal["completed", "expired", "cancelled", "failed"]
"""The statuses that a batch keeps: its requests have all ended, or will never run."""
FINAL: tuple[BatchStatus, ...] = ("completed", "expired", "cancelled", "failed")


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an uploaded file or a batch's output to clients. Times are seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(msgspec.Struct, frozen=True):
    """The record of a file in the folder of batches. `owner` is the name of the API key's owner to whom it belongs."""

    owner: str
    file: FileObject


class BatchError(msgspec.Struct, frozen=True):
    """One error in a batch's input file. `line` is the number of the line, from 1, or None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The list of errors because of which a batch failed."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """The numbers of a batch's requests: all, those with a result in the output file (`completed`), and those in the
    error file (`failed`).
    """

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a batch to clients. Times are seconds since 1970; a time is None until it is reached."""

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
    """The record of a batch in the folder. Only the process that holds the batch's lock changes it.

    `outcome` is set with the status `finalizing` and says which status follows. `output_ttl_s` is the time in seconds
    for which the output is kept, or None for that of the settings.
    """

    owner: str
    batch: BatchObject
    outcome: Outcome | None = None
    output_ttl_s: int | None = None
