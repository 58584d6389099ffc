"""Prefill and decode as real processes: together they write what one engine writes, and leave nothing behind."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.contracts.messages import Decode, Generate, Prefill, Work
from baton_serve.engine import Engine, EngineConfig
from tests.e2e.instances import Driver, instances, is_idle
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

BLOCK = 16
CHUNK = "64"
LENGTHS = (5, BLOCK, 3 * BLOCK + 1, 300)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + 31 * salt + i * i) % 240 for i in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    write_tiny_model(folder, "llama")
    return folder


class Alone:
    """One engine in this process, without anything around it."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        config = EngineConfig(model=str(model), device="cpu", dtype="float32", kv_cache_bytes=8 << 20, max_num_seqs=16)
        self.engine = Engine(config)

    def answer(self, work: Work) -> dict[int, list[int]]:
        self.engine.add(work)
        found: dict[int, list[int]] = {index: [] for index in work.sequences}
        while self.engine.has_work():
            for output in self.engine.step().tokens:
                found[output.sequence] += output.token_ids
        return found


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    return Alone(model)


class Shared:
    """One prefill and one decode instance for all tests that leave them alive and idle."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        self._context = instances(model, "--max-num-batched-tokens", CHUNK)
        self.driver = self._runner.run(self._context.__aenter__())

    def run(self, test: Callable[[Driver], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            await test(self.driver)
            await self.driver.until_idle()

        self._runner.run(asyncio.wait_for(whole(), 120.0))

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Shared]:
    running = Shared(model)
    yield running
    running.close()


def run(test: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 250.0) -> None:
    asyncio.run(asyncio.wait_for(test(), timeout_s))


async def metrics(address: str) -> dict[str, float]:
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{address}/metrics")).text
    return {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}


async def equal_to_alone(driver: Driver, alone: Alone, work: Work) -> None:
    answer = await driver.complete(work)
    assert {index: answer.sequence(index) for index in work.sequences} == alone.answer(work)


async def check_tokens(driver: Driver, alone: Alone, transport: str) -> None:
    for length in LENGTHS:
        await equal_to_alone(driver, alone, driver.work(prompt(length)))
    await equal_to_alone(driver, alone, driver.work(prompt(100), temperature=1.0, seed=5, max_tokens=20))
    await equal_to_alone(driver, alone, driver.work(prompt(50, 1), n=2, temperature=1.0, max_tokens=20))
    await equal_to_alone(driver, alone, driver.work(prompt(40, 2), max_tokens=1))
    many = [driver.work(prompt(20 * n, n + 3), max_tokens=12) for n in range(1, 9)]
    await asyncio.gather(*(equal_to_alone(driver, alone, work) for work in many))
    again = await driver.complete(driver.work(prompt(300)))
    assert again.sequence() == alone.answer(driver.work(prompt(300)))[0]
    assert again.handoff is not None and again.prefill is not None
    assert again.handoff.transport == transport
    assert again.handoff.reused_blocks == 300 // BLOCK, "blocks that decode had travelled again"
    assert again.handoff.transferred_blocks == 1
    assert again.prefill.cached_tokens["device"] >= 288
    await driver.until_idle()
    numbers = await metrics(driver.decode.record.http_address)
    assert numbers["baton:leases"] == 0
    assert numbers["baton:kv_bytes_total"] > 0
    assert numbers["baton:kv_link_bytes_per_second"] > 0


def test_tokens_over_shared_memory_equal_those_of_one_engine(shared: Shared, alone: Alone) -> None:
    shared.run(lambda driver: check_tokens(driver, alone, "usm"))


def test_tokens_over_zeromq_equal_those_of_one_engine(model: Path, alone: Alone) -> None:
    async def test() -> None:
        async with instances(model, "--kv-transport", "zeromq", "--max-num-batched-tokens", CHUNK) as driver:
            await check_tokens(driver, alone, "zeromq")

    run(test)


def test_decode_generates_alone(shared: Shared, alone: Alone) -> None:
    async def test(driver: Driver) -> None:
        work = driver.work(prompt(70), max_tokens=9)
        driver.send(driver.decode, Generate(work))
        answer = driver.answers[work.request_id]
        await driver.until(lambda: bool(answer.reasons), "an answer")
        assert answer.sequence() == alone.answer(work)[0]

    shared.run(test)


def test_prefill_without_a_ticket_ends_with_the_first_token(shared: Shared, alone: Alone) -> None:
    async def test(driver: Driver) -> None:
        work = driver.work(prompt(71), max_tokens=9)
        driver.send(driver.prefill, Prefill(work))
        answer = driver.answers[work.request_id]
        await driver.until(lambda: bool(answer.tokens[0]), "a first token")
        assert answer.sequence() == alone.answer(work)[0][:1]

    shared.run(test)


def test_what_cannot_be_served_is_refused_and_leaves_nothing(shared: Shared) -> None:
    async def test(driver: Driver) -> None:
        wrong = driver.work(prompt(10))
        driver.send(driver.decode, Prefill(wrong))
        await driver.until(lambda: bool(driver.answers[wrong.request_id].failed), "a refusal")
        assert driver.answers[wrong.request_id].failed[0].code == "invalid"
        refused = driver.start(driver.work(prompt(5000)))
        await driver.until(lambda: len(refused.failed) == 2, "two refusals")
        assert {failed.code for failed in refused.failed} == {"too_long"}

    shared.run(test)


def test_a_cancel_frees_both_ends_at_any_moment(shared: Shared) -> None:
    async def test(driver: Driver) -> None:
        for steps in (0, 1, 3, 8):
            work = driver.work(prompt(400, steps + 20), max_tokens=100)
            answer = driver.start(work)
            for _ in range(steps):
                await driver.load_of(driver.prefill)
            driver.cancel(work)
            await driver.until_idle()
            # One end may receive the other's cancel before the router's and report it: then neither is to blame.
            assert all(failed.lost is None for failed in answer.failed)
        work = driver.work(prompt(30, 30), n=2, max_tokens=400)
        answer = driver.start(work)
        await driver.until(lambda: len(answer.tokens[1]) > 3, "tokens of decode")
        driver.cancel(work)

    shared.run(test)


def test_a_lost_router_leaves_nothing_behind(shared: Shared) -> None:
    async def test(driver: Driver) -> None:
        driver.start(driver.work(prompt(60, 31), max_tokens=400))
        for instance in list(driver.instances.values()):
            assert instance.link is not None
            await instance.link.close()
        for instance in list(driver.instances.values()):
            await driver.connect(instance.process, instance.record)

    shared.run(test)


def test_health_names_the_link_and_its_speed(shared: Shared) -> None:
    async def test(driver: Driver) -> None:
        await driver.complete(driver.work(prompt(100, 32)))
        async with httpx.AsyncClient() as client:
            health = (await client.get(f"http://{driver.decode.record.http_address}/health")).json()
        assert health["status"] == "ok" and health["role"] == "decode"
        assert health["pid"] == driver.decode.process.pid
        assert health["generation"] == driver.decode.record.generation
        (link,) = health["links"]
        assert (link["peer"], link["transport"]) == ("prefill-0", "usm")
        assert link["bytes_per_second"] > 0
        assert (link["choice"], link["probed_bytes_per_second"]) == ("rule", 0)  # on hosts nothing is probed
        assert "usm: in use" in link["reason"]

    shared.run(test)


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_prefill_killed_during_a_handoff(model: Path, transport: str) -> None:
    async def test() -> None:
        async with instances(model, "--kv-transport", transport, "--max-num-batched-tokens", "16") as driver:
            await driver.complete(driver.work(prompt(20)))
            work = driver.work(prompt(400, 1))
            driver.send(driver.decode, Decode(work, driver.ticket()))
            await driver.until_load(driver.decode, lambda load: load.waiting == 1, "a fetch that waits")
            driver.prefill.kill()
            answer = driver.answers[work.request_id]
            await driver.until(lambda: bool(answer.failed), "decode hears of the death", timeout_s=10)
            (failed,) = answer.failed
            assert (failed.code, failed.lost) == ("handoff_failed", "prefill-0")
            await driver.until_load(driver.decode, is_idle, "an idle decode")
            assert (await metrics(driver.decode.record.http_address))["baton:leases"] == 0
            lonely = driver.work(prompt(30), max_tokens=5)
            driver.send(driver.decode, Generate(lonely))
            await driver.until(lambda: bool(driver.answers[lonely.request_id].reasons), "decode serves on")

    run(test)


def test_with_a_local_fallback_a_killed_prefill_is_not_noticed(model: Path, alone: Alone) -> None:
    async def test() -> None:
        flags = ("--handoff-fallback", "local", "--max-num-batched-tokens", "16")
        async with instances(model, *flags) as driver:
            work = driver.work(prompt(200), max_tokens=10)
            driver.send(driver.decode, Decode(work, driver.ticket()))
            await driver.until_load(driver.decode, lambda load: load.waiting == 1, "a fetch that waits")
            driver.prefill.kill()
            answer = driver.answers[work.request_id]
            await driver.until(lambda: bool(answer.reasons), "an answer")
            assert answer.sequence() == alone.answer(work)[0]

    run(test)


@pytest.mark.parametrize("transport", ["usm", "zeromq"])
def test_decode_killed_during_a_handoff(model: Path, transport: str) -> None:
    """One fetch waits at prefill, one is being served, and one will never come."""

    async def test() -> None:
        async with instances(model, "--kv-transport", transport, "--max-num-batched-tokens", "16") as driver:
            await driver.complete(driver.work(prompt(20)))
            work, ticket = driver.work(prompt(300, 1)), driver.ticket()
            driver.send(driver.decode, Decode(work, ticket))
            await driver.until_load(driver.decode, lambda load: load.waiting == 1, "a fetch that waits")
            never_fetched = driver.ticket(timeout_s=1.0)
            for salt in range(3, 11):  # enough to read for whoever looks at the load now and then
                driver.start(driver.work(prompt(400, salt)))
            await driver.until_load(driver.prefill, lambda load: load.running >= 1, "prefill computes")
            driver.decode.kill()
            driver.send(driver.prefill, Prefill(work, ticket))
            driver.send(driver.prefill, Prefill(driver.work(prompt(300, 2)), never_fetched))
            await driver.until(lambda: driver.decode.lost is not None, "decode is lost")
            await driver.until_idle()
            numbers = await metrics(driver.prefill.record.http_address)
            assert numbers["baton:leases"] == numbers["baton:held_blocks"] == 0

    run(test)


def test_a_stop_lets_what_runs_end_and_takes_nothing_new(model: Path) -> None:
    async def test() -> None:
        async with instances(model, "--drain-handover-s", "0") as driver:  # no router here could name heirs
            work, ticket = driver.work(prompt(30), max_tokens=40), driver.ticket()
            answer = driver.answers[work.request_id]
            driver.send(driver.decode, Decode(work, ticket))
            await driver.until_load(driver.decode, lambda load: load.waiting == 1, "a fetch that waits")
            driver.decode.process.signal(signal.SIGTERM)
            await driver.until(lambda: any(r.draining for r in driver.view.records()), "decode says that it leaves")
            late = driver.work(prompt(10))
            driver.send(driver.decode, Generate(late))
            refused = driver.answers[late.request_id]
            await driver.until(lambda: bool(refused.failed), "a refusal")
            assert refused.failed[0].code == "draining"
            driver.send(driver.prefill, Prefill(work, ticket))
            await driver.until(lambda: bool(answer.reasons), "the running request ends")
            await driver.until(lambda: answer.has_begun(work.sequences), "its first token")
            assert len(answer.sequence()) == 40
            await driver.until(lambda: len(driver.view.records()) == 1, "decode has left")
            driver.prefill.process.signal(signal.SIGTERM)
            for instance in driver.instances.values():
                assert await asyncio.to_thread(instance.process.wait) == 0
            assert not driver.view.records()

    run(test)
