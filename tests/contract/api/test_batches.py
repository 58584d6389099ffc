"""OpenAI's batch API by its official client, over a fake cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import openai
import pytest
from openai.types import Batch

from baton_serve.contracts.messages import Work
from baton_serve.services.router.batch.batch_scheduler import MAX_RUNNING, MAX_RUNNING_OF_OWNER
from baton_serve.services.router.batch.endpoints import MAX_UPLOADS
from baton_serve.services.router.batch.line_client import LOWEST_PRIORITY
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.fakes import letters

PATH: Final = "/v1/completions"


def line(number: int, **body: Any) -> bytes:
    body = {"prompt": f"hello {number}", "max_tokens": 2, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": PATH, "body": body}).encode() + b"\n"


def lines(number: int, **body: Any) -> bytes:
    return b"".join(line(i, **body) for i in range(number))


async def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact that no event reports; the test has a deadline."""
    while not fact():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def client_of(router: Router, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://router/v1", api_key=key, http_client=cast(Any, router.http), max_retries=0
    )


async def create(client: openai.AsyncOpenAI, content: bytes, **options: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "in.jsonl", "batch", "processed")
    return await client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h", **options)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """Wait for the end of a batch; the test has a deadline."""
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(0.02)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "an answer is there twice"
    return {one["custom_id"]: one for one in found}


def test_the_official_client_runs_a_batch(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        content = lines(20) + lines(1, max_tokens=-1).replace(b"r0", b"bad")
        created = await create(client, content, metadata={"who": "me"})
        assert (created.status, created.endpoint, created.metadata) == ("validating", PATH, {"who": "me"})
        batch = await ended(client, created)
        assert batch.status == "completed" and batch.completed_at
        counts = batch.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (21, 20, 1)
        answers = await results(client, batch.output_file_id)
        assert set(answers) == {f"r{i}" for i in range(20)}
        assert answers["r3"]["response"]["status_code"] == 200
        assert len(answers["r3"]["response"]["body"]["choices"][0]["text"]) == 2
        (failed,) = (await results(client, batch.error_file_id)).values()
        assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["param"] == "max_tokens"
        priorities = {m.work.priority for one in router.fakes.instances.values() for m in one.assignments()}
        assert priorities == {LOWEST_PRIORITY}
        names = {file.filename async for file in client.files.list()}
        assert names == {"in.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_errors.jsonl"}
        assert (await client.files.delete(batch.input_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(batch.input_file_id)

    serve(scenario, batch_folder=str(tmp_path))


def test_a_file_with_wrong_lines_fails_its_batch(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        batch = await ended(client, await create(client, lines(2) + b"{}\n" + lines(1)))
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        found = [(error.line, error.code, error.param) for error in batch.errors.data]
        assert found == [(3, "invalid_request", None), (4, "duplicate_custom_id", "custom_id")]
        assert not any(one.assignments() for one in router.fakes.instances.values())

    serve(scenario, batch_folder=str(tmp_path))


def test_a_cancelled_batch_keeps_its_answers(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        for instance in router.fakes.instances.values():
            instance.hold = 0
        created = await create(client, lines(5))
        await until(lambda: router.dispatcher.num_running > 0)
        with pytest.raises(openai.BadRequestError, match="reads this file"):
            await client.files.delete(created.input_file_id)
        cancelled = await client.batches.cancel(created.id)
        assert cancelled.status == "cancelling" and cancelled.cancelling_at
        batch = await ended(client, cancelled)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(created.id)
        for instance in router.fakes.instances.values():
            instance.resume()

    serve(scenario, batch_folder=str(tmp_path))


def test_a_router_that_starts_again_continues_the_batch(serve: Serve, tmp_path: Path) -> None:
    state: dict[str, Any] = {}

    async def begin(router: Router) -> None:
        client = client_of(router)
        num_tokens = 0

        def stops_after_ten(work: Work, sequence: int, position: int) -> int:
            nonlocal num_tokens
            num_tokens += 1
            if num_tokens == 10:
                for instance in router.fakes.instances.values():
                    instance.hold = 0
            return letters(work, sequence, position)

        router.fakes.token_of = stops_after_ten
        state["batch"] = batch = await create(client, lines(40, max_tokens=1))
        assert router.batches is not None
        output, _ = router.batches.store.results(batch.id)
        await until(lambda: output.exists() and output.stat().st_size > 0)
        state["before"] = len(output.read_text().splitlines())
        await router.batches.close()
        for instance in router.fakes.instances.values():
            instance.resume()

    async def go_on(router: Router) -> None:
        client = client_of(router)
        batch = await ended(client, state["batch"])
        assert batch.status == "completed"
        assert set(await results(client, batch.output_file_id)) == {f"r{i}" for i in range(40)}
        served = {m.work.request_id for one in router.fakes.instances.values() for m in one.assignments()}
        assert state["before"] > 0 and len(served) <= 40 - state["before"]

    serve(begin, batch_folder=str(tmp_path), batch_max_concurrency=4)
    serve(go_on, batch_folder=str(tmp_path))


def test_files_and_batches_belong_to_their_key(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        mine, theirs = client_of(router, "one"), client_of(router, "two")
        batch = await ended(mine, await create(mine, lines(2)))
        assert batch.status == "completed" and batch.output_file_id
        assert [one.id async for one in mine.batches.list()] == [batch.id]
        assert [one.id async for one in theirs.batches.list()] == []
        assert [one.id async for one in theirs.files.list()] == []
        for refused in (
            theirs.batches.retrieve(batch.id),
            theirs.batches.cancel(batch.id),
            theirs.files.content(batch.output_file_id),
            theirs.files.delete(batch.input_file_id),
            theirs.batches.create(input_file_id=batch.input_file_id, endpoint=PATH, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await refused
        with pytest.raises(openai.AuthenticationError):
            await client_of(router, "three").files.list()

    serve(scenario, keys=["one", "two"], batch_folder=str(tmp_path))


def test_lists_have_pages(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        made = {(await create(client, lines(1))).id for _ in range(5)}
        page = await client.batches.list(limit=2)
        assert len(page.data) == 2 and page.has_more
        assert {one.id async for one in client.batches.list(limit=2)} == made
        for query in ({"limit": "0"}, {"limit": "x"}, {"after": "batch_1"}, {"order": "up"}):
            assert (await router.http.get("/v1/batches", params=query)).status_code == 400
        for batch_id in made:
            await ended(client, await client.batches.retrieve(batch_id))

    serve(scenario, batch_folder=str(tmp_path))


def test_requests_that_cannot_be_served_are_refused(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        with pytest.raises(openai.BadRequestError, match="purpose=batch"):
            await client.files.create(file=b"{}", purpose="fine-tune")
        with pytest.raises(openai.APIStatusError, match="--batch-max-file-bytes") as too_large:
            await client.files.create(file=b"x" * 5000, purpose="batch")
        assert too_large.value.status_code == 413
        foreign = {"origin": "https://evil.example"}
        with pytest.raises(openai.PermissionDeniedError):
            await client.files.create(file=b"{}", purpose="batch", extra_headers=foreign)
        file = await client.files.create(file=b"{}", purpose="batch")
        for options in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"input_file_id": 5}):
            body = {"input_file_id": file.id, "endpoint": PATH, "completion_window": "24h", **options}
            assert (await router.http.post("/v1/batches", json=body)).status_code == 400
        files = [path for path in (tmp_path / "files").iterdir() if file.id not in path.name]
        assert files == [], "refused uploads leave nothing"

    serve(scenario, batch_folder=str(tmp_path), batch_max_file_bytes=4000)


def test_without_a_folder_the_answer_names_the_flag(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        client = client_of(router)
        for refused in (client.batches.list(), client.files.create(file=b"{}", purpose="batch")):
            with pytest.raises(openai.NotFoundError, match="--batch-folder"):
                await refused

    serve(scenario)


def test_files_and_open_batches_of_a_key_are_limited_and_old_batches_are_forgotten(
    serve: Serve, tmp_path: Path
) -> None:
    async def scenario(router: Router) -> None:
        assert router.batches is not None
        store = router.batches.store
        store.limits = replace(store.limits, max_files=3, max_open_batches=2, max_batches=3)
        mine, theirs = client_of(router, "one"), client_of(router, "two")
        router.fakes["decode-0"].hold = 0
        open_batches = [await create(mine, lines(1)) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 batches of this API key have not ended") as refused:
            await create(mine, lines(1))
        assert refused.value.response.headers["retry-after"] == "60"
        with pytest.raises(openai.BadRequestError, match="this API key has 3 files"):
            await mine.files.create(file=lines(1), purpose="batch")
        other = await create(theirs, lines(1))
        router.fakes["decode-0"].resume()
        router.fakes["decode-0"].hold = None
        for batch in open_batches:
            assert (await ended(mine, batch)).status == "completed"
        assert (await ended(theirs, other)).status == "completed"
        store.limits = replace(store.limits, max_files=100)
        for _ in range(2):
            newest = await ended(mine, await create(mine, lines(1)))
        found = [one.id async for one in mine.batches.list()]
        assert len(found) == 3 and newest.id in found and not {one.id for one in open_batches} <= set(found)
        assert [one.id async for one in theirs.batches.list()] == [other.id]

    serve(scenario, keys=["one", "two"], batch_folder=str(tmp_path))


def test_a_key_with_many_long_batches_does_not_keep_those_of_others_waiting(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        mine, theirs = client_of(router, "one"), client_of(router, "two")
        router.fakes["decode-0"].hold = 0
        many = [await create(mine, lines(1)) for _ in range(MAX_RUNNING + 2)]
        other = await create(theirs, lines(1))
        while other.status != "in_progress":
            await asyncio.sleep(0.02)
            other = await theirs.batches.retrieve(other.id)
        begun = [one.id async for one in mine.batches.list(limit=100) if one.status != "validating"]
        assert len(begun) <= MAX_RUNNING_OF_OWNER
        for batch in many:
            for _ in range(3):
                await mine.batches.cancel(batch.id)
        assert {(await ended(mine, batch)).status for batch in many} == {"cancelled"}
        router.fakes["decode-0"].resume()
        assert (await ended(theirs, other)).status == "completed"

    serve(scenario, keys=["one", "two"], batch_folder=str(tmp_path))


def test_bodies_of_batches_count_in_the_memory_of_all_bodies(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        memory = router.app.bodies
        assert memory.num_free == 1 << 20
        router.fakes["decode-0"].hold = 0
        batch = await create(client_of(router), lines(4, metadata={"note": "x" * 400_000}))
        await until(lambda: len(router.fakes["decode-0"].jobs) == 2)
        assert memory.num_free < 300_000
        router.fakes["decode-0"].resume()
        router.fakes["decode-0"].hold = None
        batch = await ended(client_of(router), batch)
        assert batch.status == "completed" and batch.request_counts and batch.request_counts.completed == 4
        assert memory.num_free == 1 << 20

    serve(scenario, batch_folder=str(tmp_path), max_request_bytes=1 << 20, max_body_memory_bytes=1 << 20)


def test_a_key_may_send_a_few_uploads_at_a_time(serve: Serve, tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        may_end = asyncio.Event()

        async def form() -> AsyncIterator[bytes]:
            yield b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            await may_end.wait()
            yield b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\nx\r\n--xyz--\r\n'

        async def upload(key: str) -> int:
            headers = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=xyz"}
            return (await router.http.post("/v1/files", content=form(), headers=headers)).status_code

        running = [asyncio.create_task(upload("one")) for _ in range(MAX_UPLOADS)]
        await until(lambda: len(list((tmp_path / "files").glob("*.part"))) == MAX_UPLOADS)
        assert await upload("one") == 429
        other = asyncio.create_task(upload("two"))
        may_end.set()
        assert await asyncio.gather(*running, other) == [200] * (MAX_UPLOADS + 1)
        assert await upload("one") == 200
        assert not list((tmp_path / "files").glob("*.part"))

    serve(scenario, keys=["one", "two"], batch_folder=str(tmp_path))
