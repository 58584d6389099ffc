"""Run one batch to its end: decide when it is completed, failed, expired or cancelled, and which lines are tried again.
The process that holds the batch's lock does this.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton_serve.contracts.batch_lines import BatchRequest, LineError, parse_line
from baton_serve.services.common.process_lifecycle import cancel_all
from baton_serve.services.router.batch.input_file import InputFile, InputLine, read_input, read_line
from baton_serve.services.router.batch.line_client import LineAnswer, LineClient, refusal
from baton_serve.services.router.batch.pacing import LineGate
from baton_serve.services.router.batch.records import BatchError, FileObject, Outcome, StoredBatch, StoredFile
from baton_serve.services.router.batch.results import ResultLog, result_of, unanswered
from baton_serve.services.router.batch.state_machine import begun, counted, ended, finalizing, rejected
from baton_serve.services.router.batch.store import BatchStore
from baton_serve.services.router.protocol.byte_budget import BodyMemory, BodyReservation
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import RateLimitError

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
"""Time in seconds after which results are written. A process that dies repeats the requests of this time."""
_SAVE_EVERY = 8
"""Number of writes of results after which the record is written with its counts."""
MAX_UNAVAILABLE = 20
"""Number of tries after which a request fails that no instance could serve: it may be the request that breaks them."""
_MAX_DELAY_S = 60.0
EXPIRED = LineError("batch_expired", "the request could not be run within the completion window of its batch")
FULL = BatchError(
    "storage_full",
    "the folder of batches, or the half of it that one API key may use, is full: delete files, or ask the operator to"
    " raise --batch-max-bytes; the results so far are in the output file",
)


@dataclass(frozen=True, slots=True)
class RunPorts:
    """The parts of the router that running a batch needs. All batches in one process share them."""

    store: BatchStore
    client: LineClient
    gate: LineGate
    bodies: BodyMemory
    owner: Callable[[str], Caller | None]
    """Returns the caller of an owner's name, or None if its API key does not exist any more."""
    max_requests: int
    max_line_bytes: int
    max_tasks: int
    """Largest number of requests of one batch that run or wait for their next try."""
    wall_clock: Callable[[], float] = time.time


def retry_delay_s(answer: LineAnswer, tries: int) -> float | None:
    """Return the delay in seconds before a request of a batch is sent again, or None if `answer` is final.

    A limit (429) says nothing about the request, so it is tried until the batch expires. `tries` is the number of times
    that it was sent.
    """
    # 503 also says that all replays failed, so a request that makes instances fail must not be tried forever.
    if answer.status != 429 and (answer.status != 503 or tries >= MAX_UNAVAILABLE):
        return None
    # Doubled each time: a key at its daily limit stays there for hours.
    return float(min(_MAX_DELAY_S, max(answer.retry_after_s or 0.0, 0.25 * 2 ** min(tries, 10))))


class UnansweredError(Exception):
    """Raised at the end of a batch if a request has no result because of an error that was logged. The batch must run
    again.
    """


class BatchRun:
    """Runs the requests of one batch. If a process that has ended ran the batch before, it runs the requests that are
    left. `run` is called once.

    `stop` ends it early: the requests that run are cancelled, and another process, or this one after its restart,
    continues the batch.
    """

    def __init__(self, stored: StoredBatch, ports: RunPorts) -> None:
        self._stored = stored
        self._ports = ports
        self._is_stopped = False
        self._over = asyncio.Event()
        """Set when no further request may start."""
        self._outcome: Outcome = "completed"
        self._input = ports.store.content(stored.batch.input_file_id)

    def stop(self) -> None:
        """Make `run` return early, because the process stops."""
        self._is_stopped = True
        self._over.set()

    async def run(self) -> None:
        """Run the batch until it has ended or `stop` is called. Raises `OSError` if the folder of batches cannot be
        read or written.
        """
        if self._stored.batch.status not in ("finalizing", "cancelling"):
            await self._run_requests()
            if self._is_stopped or self._stored.batch.status == "failed":
                return
        await self._finalize()

    async def _run_requests(self) -> None:
        store, batch = self._ports.store, self._stored.batch
        # Looked up again after each restart: the limits of the key may have changed, or the key is gone.
        caller = self._ports.owner(self._stored.owner)
        found = await self._read_input(caller)
        if found.errors or caller is None:
            await self._save(rejected(self._stored, found.errors, now=self._now()))
            store.remove_working_files(batch.id)
            return
        if self._stored.batch.status == "validating":
            await self._save(begun(self._stored, total=len(found.lines), now=self._now()))
        if await asyncio.to_thread(store.cancelled_at, batch.id) is not None:
            self._end("cancelled")
        log = await asyncio.to_thread(ResultLog.open, *store.results(batch.id))
        try:
            await self._answer_all(found.lines, log, caller)
        finally:
            # Also when the process stops, so that these requests need not run again.
            await log.flush()
            log.close()
        self._stored = counted(self._stored, completed=log.num_completed, failed=log.num_failed)
        # A file without lines gets no id, as in OpenAI's API.
        if not self._is_stopped:
            output, errors = (path.stat().st_size > 0 for path in store.results(batch.id))
            await self._save(
                finalizing(
                    self._stored,
                    self._outcome,
                    output=_output_id(batch.id, 0) if output else None,
                    errors=_output_id(batch.id, 1) if errors else None,
                    problem=FULL if self._outcome == "failed" else None,
                    now=self._now(),
                )
            )

    async def _read_input(self, caller: Caller | None) -> InputFile:
        """Read the batch's input file. A missing file, or a `caller` of None (the API key was removed), is returned as
        an error in the result.
        """
        if caller is None:
            return _failed("owner_not_found", "the API key of this batch exists no more: create the batch again")
        try:
            return await asyncio.to_thread(
                read_input,
                self._input,
                self._stored.batch.endpoint,
                max_lines=self._ports.max_requests,
                max_line_bytes=self._ports.max_line_bytes,
            )
        except OSError as exc:
            return _failed("file_not_readable", f"the input file cannot be read: {exc.strerror}")

    async def _answer_all(self, lines: list[InputLine], log: ResultLog, caller: Caller) -> None:
        """Send all requests that have no result in `log` yet, until all have one or the batch must end."""
        # After a restart the order is the same, so that the rest of a group of equal prefixes still runs together.
        left = [line for line in lines if not log.is_answered(line.custom_id)]
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.create_task(self._write_results(log), name="batch-results")
        try:
            for line in left:
                await self._wait_until_fewer(tasks, self._ports.max_tasks)
                if not await self._ports.gate.enter(self._over, self._stored.owner):
                    break
                task = asyncio.create_task(self._answer(line, log, caller), name="batch-line")
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await self._wait_until_fewer(tasks, 1)
        finally:
            # No result is added after this: a cancelled request has none and runs again, or expires.
            await cancel_all(list(tasks))
            self._over.set()
            await writing
        left = [line for line in left if not log.is_answered(line.custom_id)]
        # Only now, since cancelled requests count as unanswered too.
        if self._outcome == "expired":
            for line in left:
                log.add(unanswered(line.custom_id, EXPIRED))
        elif self._outcome == "completed" and left and not self._is_stopped:
            raise UnansweredError(f"{len(left)} requests of {self._stored.batch.id} have no result")

    async def _wait_until_fewer(self, tasks: set[asyncio.Task[None]], number: int) -> None:
        """Wait until fewer than `number` of the tasks run, or until the batch must end."""
        while len(tasks) >= number and not self._over.is_set():
            await asyncio.wait(tasks, timeout=FLUSH_S, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, line: InputLine, log: ResultLog, caller: Caller) -> None:
        """Send the request of one line, again if necessary, and add its result to `log`. `LineGate` has counted it as
        running already.
        """
        tries = 0
        is_counted = True
        try:
            while True:
                tries += 1
                answer = await self._ask(line, caller)
                if (delay_s := retry_delay_s(answer, tries)) is None:
                    break
                # Another batch, whose caller is not at its limit, may use the place meanwhile.
                self._ports.gate.leave(self._stored.owner)
                is_counted = False
                # Spread, or requests that were refused together would all come back together.
                await _sleep_unless(self._over, delay_s * random.uniform(0.75, 1.25))
                if not await self._ports.gate.enter(self._over, self._stored.owner):
                    return
                is_counted = True
            log.add(result_of(line.custom_id, status=answer.status, body=answer.body, request_id=answer.request_id))
        except OSError:
            # The folder fails: `_write_results` will find that too. The request stays without a result.
            logger.exception("a line of the batch %s cannot be read", self._stored.batch.id)
        finally:
            if is_counted:
                self._ports.gate.leave(self._stored.owner)

    async def _ask(self, line: InputLine, caller: Caller) -> LineAnswer:
        """Send the request of one line to its endpoint and return the response. Raises `OSError` if the input file
        cannot be read.
        """
        memory = BodyReservation(self._ports.bodies, caller.name)
        try:
            await memory.grow(line.length)
            # Read for each try: the requests of a large file, or all that wait for their next try, would not fit into
            # the memory of bodies.
            request = await asyncio.to_thread(self._read_request, line)
            return await self._ports.client.post(request.url, bytes(request.body), caller, memory)
        except RateLimitError as exc:
            return refusal(exc)
        finally:
            memory.release()

    def _read_request(self, line: InputLine) -> BatchRequest:
        return parse_line(read_line(self._input, line), (self._stored.batch.endpoint,))

    async def _write_results(self, log: ResultLog) -> None:
        """Write results and their counts to disk from time to time, and check whether the batch is cancelled, has
        expired or has no space left. Return when the batch must end.
        """
        rounds = 0
        try:
            while not self._over.is_set():
                await _sleep_unless(self._over, FLUSH_S)
                await log.flush()
                rounds += 1
                # Other processes read the counts in the record. It is not needed to continue: the results are.
                if rounds % _SAVE_EVERY == 0:
                    await self._save(counted(self._stored, completed=log.num_completed, failed=log.num_failed))
                    if await asyncio.to_thread(self._ports.store.free_bytes, self._stored.owner) <= 0:
                        self._end("failed")
                if await asyncio.to_thread(self._ports.store.cancelled_at, self._stored.batch.id) is not None:
                    self._end("cancelled")
                elif self._now() >= self._stored.batch.expires_at:
                    self._end("expired")
        finally:
            self._over.set()

    def _end(self, outcome: Outcome) -> None:
        if not self._over.is_set():
            self._outcome = outcome
            self._over.set()

    async def _finalize(self) -> None:
        """Publish the results as files of the batch's owner. After a crash this is done again, and completes what is
        missing.
        """
        store, batch = self._ports.store, self._stored.batch
        sources = store.results(batch.id)
        for source, file_id, name in zip(
            sources, (batch.output_file_id, batch.error_file_id), ("output", "errors"), strict=True
        ):
            if file_id is not None:
                await asyncio.to_thread(self._publish, source, file_id, f"{batch.id}_{name}.jsonl")
        await self._save(ended(self._stored, now=self._now()))
        await asyncio.to_thread(store.remove_working_files, batch.id)
        logger.info("the batch %s is %s", batch.id, self._stored.batch.status)

    def _publish(self, source: Path, file_id: str, name: str) -> None:
        store, now = self._ports.store, self._now()
        # A process that died here may have moved the file already, but not written its record.
        path = source if source.exists() else store.content(file_id)
        ttl_s = store.limits.keep_s if self._stored.output_ttl_s is None else self._stored.output_ttl_s
        described = FileObject(
            id=file_id,
            bytes=path.stat().st_size,
            created_at=now,
            expires_at=now + ttl_s,
            filename=name,
            purpose="batch_output",
        )
        store.add_file(source, StoredFile(self._stored.owner, described))

    async def _save(self, stored: StoredBatch) -> None:
        self._stored = stored
        await asyncio.to_thread(self._ports.store.save_batch, stored)

    def _now(self) -> int:
        return int(self._ports.wall_clock())


def _failed(code: str, message: str) -> InputFile:
    return InputFile([], [BatchError(code, message)])


def _output_id(batch_id: str, number: int) -> str:
    """Return the id of an output file (`number` 0: results, 1: errors). It is derived from the batch's id, so that it
    stays the same after a crash.
    """
    # Only the last digit differs between the two files. Ids are random, so that no other file has one of them.
    return f"file-{batch_id.removeprefix('batch_')[:-1]}{(int(batch_id[-1], 16) + number) % 16:x}"


async def _sleep_unless(over: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        return
