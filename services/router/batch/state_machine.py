"""Define the states of a batch and the record of each change; which outcome a batch has, is decided in `batch_run.py`.
Pure: times are arguments, in seconds since 1970.

validating ──> in_progress ──> finalizing ──> completed, expired or failed
    │               └────────> cancelling ──> cancelled
    └──> failed (its input file is not valid) or cancelled
"""

from collections.abc import Sequence

from msgspec.structs import replace

from baton_serve.services.router.batch.records import (
    FINAL,
    BatchError,
    BatchErrors,
    BatchObject,
    Outcome,
    RequestCounts,
    StoredBatch,
)

MAX_ERRORS = 50
"""Largest number of errors of an input file that a batch lists."""


class TransitionError(Exception):
    """Raised if a batch is to change to a status that cannot follow its present one. It is an error of this program."""


def begun(stored: StoredBatch, *, total: int, now: int) -> StoredBatch:
    """Return the record of a batch with the status in progress, after its input file was found to have `total` valid
    requests.
    """
    _require(stored, "validating")
    counts = RequestCounts(total=total)
    batch = replace(stored.batch, status="in_progress", in_progress_at=now, request_counts=counts)
    return replace(stored, batch=batch)


def rejected(stored: StoredBatch, errors: Sequence[BatchError], *, now: int) -> StoredBatch:
    """Return the record of a batch with the status failed, because its input file is not valid or cannot be read."""
    _require(stored, "validating", "in_progress")
    found = BatchErrors(list(errors[:MAX_ERRORS]))
    return replace(stored, batch=replace(stored.batch, status="failed", failed_at=now, errors=found), outcome="failed")


def counted(stored: StoredBatch, *, completed: int, failed: int) -> StoredBatch:
    """Return the record of a batch with other numbers of completed and failed requests."""
    counts = RequestCounts(stored.batch.request_counts.total, completed, failed)
    return replace(stored, batch=replace(stored.batch, request_counts=counts))


def cancelling(batch: BatchObject, *, now: int) -> BatchObject:
    """Return the batch with the status cancelling, after a client has cancelled it. A batch that has ended or is about
    to end stays as it is.
    """
    if batch.status in (*FINAL, "finalizing", "cancelling"):
        return batch
    return replace(batch, status="cancelling", cancelling_at=now)


def finalizing(
    stored: StoredBatch,
    outcome: Outcome,
    *,
    output: str | None,
    errors: str | None,
    problem: BatchError | None = None,
    now: int,
) -> StoredBatch:
    """Return the record of a batch whose requests do not run any more and whose files are to be published: its status
    is finalizing, or cancelling for the outcome "cancelled". `output` and `errors` are the ids that its files will have
    (None: no such file), and `problem` is the reason of the outcome "failed".
    """
    _require(stored, "in_progress")
    found = None if problem is None else BatchErrors([problem])
    batch = replace(stored.batch, output_file_id=output, error_file_id=errors, errors=found)
    # OpenAI shows "cancelling" until a cancelled batch has its files, and "finalizing" for all other outcomes.
    if outcome == "cancelled":
        batch = replace(batch, status="cancelling", cancelling_at=batch.cancelling_at or now)
    else:
        batch = replace(batch, status="finalizing", finalizing_at=now)
    return replace(stored, batch=batch, outcome=outcome)


def ended(stored: StoredBatch, *, now: int) -> StoredBatch:
    """Return the record of a batch in its final status, after its results were published as files."""
    _require(stored, "finalizing", "cancelling")
    if stored.outcome is None:
        raise TransitionError(f"{stored.batch.id} ends without an outcome")
    # Each outcome has a field of its own for its time, named after it.
    times = {f"{stored.outcome}_at": now}
    return replace(stored, batch=replace(stored.batch, status=stored.outcome, **times))


def _require(stored: StoredBatch, *statuses: str) -> None:
    if stored.batch.status not in statuses:
        raise TransitionError(f"{stored.batch.id} is {stored.batch.status}, not {' or '.join(statuses)}")
