"""Store files and batches in `--batch-folder`, and decide what expires and how much space a key has.

    files/FILE.json      record of a file           batches/BATCH.json      record of a batch
    files/FILE.data      its content                batches/BATCH.cancel    exists after a client has cancelled it
    files/FILE.part      an upload                  batches/BATCH.lock      locked by the process that runs it
                                                    batches/BATCH.output, BATCH.errors    results so far

A record is replaced by renaming, so that readers find the old or the new one. The folder may be shared by several
processes and machines, if its file system has locks (`flock`). All functions block: call them in a thread.
"""

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.batch.records import FINAL, FileObject, StoredBatch, StoredFile
from baton_serve.services.router.protocol.errors import NotFoundError

_ID = re.compile(r"(file|batch)[-_][0-9a-f]{24}")
_RECORD_BYTES = 4096
"""Bytes that each stored name counts at least, so that empty files are limited too."""
_ABANDONED_S = 24 * 3600
"""Age in seconds of an upload that no process can be writing any more."""

S = TypeVar("S", StoredFile, StoredBatch)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits for the folder of batches, in bytes and in seconds after the creation of a file or batch.

    `max_files`, `max_open_batches` (batches that have not ended) and `max_batches` limit what one owner may have. They
    bound the time that each look into the folder takes.
    """

    max_file_bytes: int
    max_total_bytes: int
    keep_s: int
    max_files: int = 10_000
    max_open_batches: int = 100
    max_batches: int = 10_000


@dataclass(frozen=True, slots=True)
class OwnerUsage:
    """The numbers of files and batches of one owner, and their size. `num_bytes` includes the results of running
    batches.
    """

    num_files: int
    num_bytes: int
    num_open_batches: int
    ended_batches: list[str]
    """Ids, the oldest batch first."""


class BatchStore:
    """Stores files and batches in the folder of `--batch-folder`. Any thread may use it: its only state are copies of
    records that never change.
    """

    def __init__(
        self, folder: str, limits: StoreLimits, *, has_several_owners: Callable[[], bool] = lambda: False
    ) -> None:
        """Create the folder if it is missing. Raises `ConfigurationError` if this process cannot write to it.

        While `has_several_owners` returns True, each owner of an API key may use at most half of the folder.
        """
        self.limits = limits
        self._has_several_owners = has_several_owners
        self._final: dict[str, StoredFile | StoredBatch] = {}
        """Records that do not change any more, by id: those of files, and of batches that have ended."""
        self._files = Path(folder) / "files"
        self._batches = Path(folder) / "batches"
        try:
            for path in (self._files, self._batches):
                # The requests and answers of all callers are in these files.
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                probe = path / f".probe-{secrets.token_hex(8)}"
                # The lock too: on a file system without locks no batch would ever run.
                with probe.open("wb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                probe.unlink()
        except OSError as exc:
            raise ConfigurationError(
                f"--batch-folder {folder}: {exc.strerror}: give a folder to which this user may write"
            ) from exc

    def used_bytes(self) -> int:
        """Return the size of all files and records in the folder, in bytes."""
        total = 0
        for folder in (self._files, self._batches):
            with os.scandir(folder) as entries:
                for entry in entries:
                    # Records are replaced and files deleted while this loop runs.
                    with contextlib.suppress(FileNotFoundError):
                        total += max(entry.stat().st_size, _RECORD_BYTES)
        return total

    def usage(self, owner: str) -> OwnerUsage:
        """Return how many files and batches one owner has in the folder, and how many bytes."""
        files = [stored.file for stored in self.files() if stored.owner == owner]
        batches = [stored.batch for stored in self.batches() if stored.owner == owner]
        running = [batch for batch in batches if batch.status not in FINAL]
        num_bytes = sum(max(file.bytes, _RECORD_BYTES) for file in files)
        for path in [path for batch in running for path in self.results(batch.id)]:
            # Results do not exist before the batch has begun, nor after it has ended.
            with contextlib.suppress(FileNotFoundError):
                num_bytes += path.stat().st_size
        ended = sorted((batch for batch in batches if batch.status in FINAL), key=lambda one: (one.created_at, one.id))
        return OwnerUsage(len(files), num_bytes, len(running), [batch.id for batch in ended])

    def free_bytes(self, owner: str) -> int:
        """Return how many bytes an owner may still add to the folder; 0 or less if it is full."""
        total = self.limits.max_total_bytes
        free = total - self.used_bytes()
        if self._has_several_owners():
            # One owner must not fill the folder for all others.
            free = min(free, total // 2 - self.usage(owner).num_bytes)
        return free

    def new_upload(self) -> tuple[str, Path]:
        """Return a new file id, and the path to which the file's content is to be written before `add_file` is
        called.
        """
        file_id = f"file-{secrets.token_hex(12)}"
        return file_id, self._files / f"{file_id}.part"

    def add_file(self, source: Path, stored: StoredFile) -> None:
        """Move the complete file at `source` into the folder, and write its record `stored`.

        After a crash it may be called again, and completes what is missing. Raises `OSError`.
        """
        content = self.content(stored.file.id)
        if source.exists():
            with source.open("rb") as file:
                os.fsync(file.fileno())
            source.replace(content)
        # The record last: a file without a record does not exist for clients.
        _replace(self._files / f"{stored.file.id}.json", stored)

    def file(self, file_id: str, owner: str) -> FileObject:
        """Return the description of a file. Raises `NotFoundError` if this owner has no file with this id."""
        stored = self._read(self._files, file_id, StoredFile)
        if stored is None or stored.owner != owner:
            raise NotFoundError(f"no file has the id {file_id[:100]!r}", param="file_id")
        return stored.file

    def content(self, file_id: str) -> Path:
        """Return the path of the content of the file with this id."""
        assert _ID.fullmatch(file_id)
        return self._files / f"{file_id}.data"

    def delete_file(self, file_id: str) -> None:
        """Delete the content and the record of a file, if it exists."""
        # The record first: a record without its content would be an error for clients that read the file.
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    def files(self) -> Iterator[StoredFile]:
        """Yield the records of all files of all owners."""
        return self._records(self._files, StoredFile)

    def save_batch(self, stored: StoredBatch) -> None:
        """Write the record of a batch to disk. Only the process that creates the batch, and then the holder of its
        lock, may do this.
        """
        _replace(self._batches / f"{stored.batch.id}.json", stored)

    def stored_batch(self, batch_id: str) -> StoredBatch | None:
        """Return the record of the batch with this id, or None if there is none."""
        return self._read(self._batches, batch_id, StoredBatch)

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return the record of a batch. Raises `NotFoundError` if this owner has no batch with this id."""
        stored = self.stored_batch(batch_id)
        if stored is None or stored.owner != owner:
            raise NotFoundError(f"no batch has the id {batch_id[:100]!r}", param="batch_id")
        return stored

    def batches(self) -> Iterator[StoredBatch]:
        """Yield the records of all batches of all owners."""
        return self._records(self._batches, StoredBatch)

    def cancel(self, batch_id: str) -> None:
        """Record that a client has cancelled a batch. The process that runs the batch will notice and stop it."""
        (self._batches / f"{batch_id}.cancel").touch()

    def cancelled_at(self, batch_id: str) -> int | None:
        """Return the time at which a client has cancelled a batch, in seconds since 1970, or None."""
        try:
            return int((self._batches / f"{batch_id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def results(self, batch_id: str) -> tuple[Path, Path]:
        """Return the paths of the two files to which a running batch writes: its output and its errors."""
        return self._batches / f"{batch_id}.output", self._batches / f"{batch_id}.errors"

    @contextlib.contextmanager
    def lock(self, batch_id: str) -> Iterator[bool]:
        """Return a context manager that locks a batch for this process until the block ends. It yields False if another
        process has locked it.

        If a process dies, the kernel releases its lock.
        """
        with (self._batches / f"{batch_id}.lock").open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Not only `BlockingIOError`: a file system without locks must not let two processes run one batch.
                yield False
            else:
                yield True

    def sweep(self, now: float) -> None:
        """Delete files that have expired, ended batches that were created long ago, and uploads that were broken off.
        `now` is in seconds since 1970.
        """
        in_use = {stored.batch.input_file_id for stored in self.batches() if stored.batch.status not in FINAL}
        for stored in list(self.files()):
            expires_at = stored.file.expires_at
            # A batch that was created just before the file expires still reads it.
            if expires_at is not None and expires_at < now and stored.file.id not in in_use:
                self.delete_file(stored.file.id)
        for old in list(self.batches()):
            if old.batch.status in FINAL and old.batch.created_at + self.limits.keep_s < now:
                self.delete_batch(old.batch.id)
        for part in self._files.glob("*.part"):
            # Another router may remove it first.
            with contextlib.suppress(FileNotFoundError):
                if part.stat().st_mtime + _ABANDONED_S < now:
                    part.unlink()

    def delete_batch(self, batch_id: str) -> None:
        """Delete the record of a batch that has ended, and all that belongs to it except its input and output files."""
        for suffix in ("json", "output", "errors", "cancel", "lock"):
            (self._batches / f"{batch_id}.{suffix}").unlink(missing_ok=True)

    def remove_working_files(self, batch_id: str) -> None:
        """Delete the files that a batch needs only while it runs."""
        for suffix in ("output", "errors", "cancel"):
            (self._batches / f"{batch_id}.{suffix}").unlink(missing_ok=True)

    def _read(self, folder: Path, name: str, cls: type[S]) -> S | None:
        # Ids come from clients: only the form of our own may become part of a path.
        if not _ID.fullmatch(name):
            return None
        # A damaged record counts as missing: one of them must not make all lists fail.
        try:
            return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=cls)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _records(self, folder: Path, cls: type[S]) -> Iterator[S]:
        with os.scandir(folder) as entries:
            names = [entry.name.removesuffix(".json") for entry in entries if entry.name.endswith(".json")]
        for name in names:
            known = self._final.get(name)
            stored = known if isinstance(known, cls) else self._read(folder, name, cls)
            if stored is None:
                continue
            if isinstance(stored, StoredFile) or stored.batch.status in FINAL:
                self._final[name] = stored
            yield stored
        # Copies of records that were deleted meanwhile, also by another process.
        kind, present = ("file" if cls is StoredFile else "batch"), set(names)
        for name in [one for one in list(self._final) if one.startswith(kind) and one not in present]:
            self._final.pop(name, None)


def new_batch_id() -> str:
    """Return a new id for a batch. Ids sort in the order of their creation.

    `created_at` counts whole seconds. If ids were only random, a newer batch could be forgotten before an older one of
    the same second.
    """
    return f"batch_{time.time_ns():016x}{secrets.token_hex(4)}"


def _replace(path: Path, record: Any) -> None:
    """Write a record to `path` so that other processes, and this one after a crash, find either the old or the new
    record.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
