"""Wrong answers without an error: five public failures of other servers, each reproduced as far as Baton has its cause.

Every answer is compared with `transformers.generate`, or with the same request undisturbed. A router cannot be made to
send stale references, so some tests speak to the instances themselves.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.contracts.instance import Role
from baton_serve.contracts.messages import Decode, Generate, Prefill, Pull, Ticket, Work
from baton_serve.engine import Engine
from baton_serve.services.instance.request_server import RoleHandler
from tests.contract.transports_proxy import Proxy, proxy_of
from tests.e2e.in_process import served
from tests.e2e.instances import Answer, Driver, Instance, instances
from tests.e2e.test_equality import greedy, prompt_of, reference_model

pytestmark = pytest.mark.slow

LENGTH = 300
NUM_BLOCKS = 48
"""Usable blocks of each instance: two prompts of `LENGTH` tokens evict a third one."""
FLAGS = ("--max-num-batched-tokens", "32", "--max-model-len", "700", "--block-size", "16")
SMALL = ("--num-gpu-blocks-override", str(NUM_BLOCKS + 1))
SINKS = {"usm": "decode-0", "zeromq": "decode-1"}
"""The decode instance that receives blocks by this transport."""
SILENT_AFTER_BYTES = 200
"""Bytes to the consumer before a connection falls silent: part of one handoff, more than an idle connection carries."""


class Reference:
    """Answers of transformers. They are computed before a test runs: a proxy in this process must not stand still."""

    def __init__(self, folder: Path) -> None:
        self._model = reference_model(folder)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prepare(self, *prompts: list[int], num_tokens: int = 8) -> None:
        for prompt in prompts:
            if len(self._answers.get(tuple(prompt), [])) < num_tokens:
                self._answers[tuple(prompt)] = greedy(self._model, prompt, num_tokens)

    def answer(self, work: Work) -> list[int]:
        return self._answers[tuple(work.token_ids)][: work.sampling.max_tokens]


@pytest.fixture(scope="module")
def reference(llama: Path) -> Reference:
    return Reference(llama)


class Running:
    """One prefill and two decode instances for all tests that speak to instances; each leaves them idle."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        sinks = {sink: ("--kv-transport", transport) for transport, sink in SINKS.items()}
        self._context = instances(model, *FLAGS, *SMALL, own={"prefill-0": (), **sinks})
        self._driver = self._runner.run(self._context.__aenter__())

    def run(self, test: Callable[[Driver], Coroutine[Any, Any, None]], sink: str) -> None:
        async def whole() -> None:
            self._driver.sink = sink
            await test(self._driver)
            await self._driver.until_idle()

        self._runner.run(asyncio.wait_for(whole(), 60.0))

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def running(llama: Path) -> Iterator[Running]:
    made = Running(llama)
    yield made
    made.close()


async def metrics(instance: Instance) -> dict[str, float]:
    """Sum of each sample name over its labels."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{instance.record.http_address}/metrics")).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def num_links(instance: Instance) -> int:
    """How many working connections to producers `/health` shows; one to each address."""
    async with httpx.AsyncClient() as client:
        health = (await client.get(f"http://{instance.record.http_address}/health")).json()
    return len(health["links"])


async def evict(driver: Driver, instance: Instance, start: int) -> None:
    """Fill an instance's cache with other prompts."""
    for number in range(start, start + 3):
        work = driver.work(prompt_of(LENGTH, start=number), max_tokens=1)
        driver.send(instance, Prefill(work) if instance is driver.prefill else Generate(work))
        await has_begun(driver, driver.answers[work.request_id])


async def has_begun(driver: Driver, answer: Answer) -> None:
    await driver.until(lambda: bool(answer.tokens[0]), "a first token")


async def ended(driver: Driver, answer: Answer, within_s: float = 20.0) -> list[int]:
    """The whole answer. It fails if the instances report an error or do not answer in time."""
    await driver.until(lambda: bool(answer.reasons or answer.failed), "an answer", within_s)
    await driver.until(lambda: bool(answer.failed) or answer.has_begun([0]), "the first token")
    assert not answer.failed
    return answer.sequence()


async def refused(driver: Driver, work: Work, ticket: Ticket) -> None:
    """Send only the decode half of a request, with a ticket that is not for it: no token may come."""
    driver.send(driver.decode, Decode(work, ticket))
    answer = driver.answers[work.request_id]
    await driver.until(lambda: bool(answer.failed or answer.tokens[0]), "a refusal")
    assert [failed.code for failed in answer.failed] == ["handoff_failed"]
    assert not answer.tokens[0]


def test_a_stale_block_reference_never_returns_another_prompts_answer(running: Running, reference: Reference) -> None:
    """vLLM #52234: a reference to blocks that the producer had given to another prompt was answered with status 200 and
    the other prompt's answer. The cases are those of its table."""
    first, other = prompt_of(LENGTH, start=1), prompt_of(LENGTH, start=90)
    reference.prepare(first, other)

    async def test(driver: Driver) -> None:
        work, ticket = driver.work(first), driver.ticket()
        assert await ended(driver, driver.start(work, ticket)) == reference.answer(work)
        await refused(driver, driver.work(other), ticket)  # consumed, used again at once
        await evict(driver, driver.prefill, 20)
        await refused(driver, driver.work(other), ticket)  # its blocks hold other prompts now
        await refused(driver, driver.work(other), driver.ticket(timeout_s=0.5))  # never opened, and expired
        stale = msgspec.structs.replace(driver.ticket(), source_generation=ticket.source_generation - 1)
        await refused(driver, driver.work(other), stale)  # of an earlier process
        await evict(driver, driver.decode, 30)
        # A router whose view of the cache is old names the source that has evicted the prompt.
        before = (await metrics(driver.decode))["baton:kv_bytes_total"]
        again = driver.work(first)
        driver.send(driver.decode, Generate(again, Pull(ticket=driver.ticket(), num_blocks=LENGTH // 16)))
        assert await ended(driver, driver.answers[again.request_id]) == reference.answer(again)
        assert (await metrics(driver.decode))["baton:kv_bytes_total"] == before
        good = driver.work(other)
        assert await ended(driver, driver.start(good)) == reference.answer(good)

    running.run(test, SINKS["usm"])


@asynccontextmanager
async def through_proxy(driver: Driver) -> AsyncIterator[tuple[Proxy, Callable[[], Ticket]]]:
    """A proxy in front of the prefill instance, and a function that makes tickets whose blocks come through it."""
    async with proxy_of(driver.prefill.record.transfer_address) as proxy:
        yield proxy, lambda: msgspec.structs.replace(driver.ticket(), source_address=proxy.address)


@pytest.mark.parametrize("transport", SINKS)
def test_handoffs_are_right_after_a_connection_has_died_silently(
    transport: str, running: Running, reference: Reference
) -> None:
    """vllm-backport #33: after days the transfer connection died without an end, and the decode worker went on to
    answer with status 200 from blocks that never arrived."""
    streamed, handed_over, new = (prompt_of(LENGTH, start=start) for start in (2, 3, 4))
    if transport == "zeromq":  # the other decode instance has fetched the prompts, so prefill has cached them
        streamed, handed_over, new = ([token + 1 for token in prompt] for prompt in (streamed, handed_over, new))
    reference.prepare(streamed, num_tokens=200)
    reference.prepare(handed_over, new)

    async def test(driver: Driver) -> None:
        async with through_proxy(driver) as (proxy, ticket):
            first = driver.work(streamed, max_tokens=200)
            stream = driver.start(first, ticket())
            await driver.until(lambda: len(stream.tokens[0]) > 3, "tokens of decode")
            before = await metrics(driver.decode)
            proxy.silent_at = proxy.received[-1] + SILENT_AFTER_BYTES
            cut = driver.work(handed_over)
            assert await ended(driver, driver.start(cut, ticket())) == reference.answer(cut)
            assert proxy.silent_at is None and len(proxy.received) == 2, "the connection was not replaced"
            after = await metrics(driver.decode)
            assert after["baton:transfer_retries_total"] > before["baton:transfer_retries_total"]
            assert await ended(driver, stream) == reference.answer(first), "a stream beside the dead connection"
            # The same while nothing is fetched: /health shows it before the next handoff.
            links = await num_links(driver.decode)
            assert links > 0
            proxy.silence()
            async with asyncio.timeout(10.0):
                while await num_links(driver.decode) == links:  # noqa: ASYNC110 - a fact of another process
                    await asyncio.sleep(0.05)
            for prompt in (streamed, new):  # cached on both ends but for the last block, and not cached
                work = driver.work(prompt)
                assert await ended(driver, driver.start(work, ticket())) == reference.answer(work)
            assert len(proxy.received) == 3

    running.run(test, SINKS[transport])


def damage(engine: Engine) -> int:
    """Flip a bit of each block in the host tier, each at another place. Return the number of blocks."""
    memory = engine._host
    assert memory.tier is not None
    slots = [memory.slots.slot(memory.tier._slots[name]) for name in memory.tier.names()]
    for number, slot in enumerate(slots):
        slot[(997 * number) % len(slot)] ^= 0x10
    return len(slots)


def test_a_block_that_a_tier_has_changed_is_found_and_computed_again(llama: Path) -> None:
    """dynamo #14416: the cache's tier returned other bytes than were stored, and cached prompts got wrong answers
    without an error."""
    prompts = [prompt_of(LENGTH, start=start) for start in range(4)]
    expected = [greedy(reference_model(llama), prompt, 8) for prompt in prompts]
    handlers: dict[Role, Any] = {}

    def keep(role: Role, handler: RoleHandler) -> RoleHandler:
        handlers[role] = handler
        return handler

    async def test() -> None:
        small = {"num_gpu_blocks_override": 40, "host_kv_gb": 0.01, "max_model_len": 600}
        async with asyncio.timeout(50), served(llama, transport="usm", wrap=keep, instance=small) as client:
            while len((await client.get("/health")).json()["instances"]) < 2:  # noqa: ASYNC110 - a fact of another part
                await asyncio.sleep(0.01)
            assert [await tokens_of(client, prompt) for prompt in prompts] == expected
            for handler in handlers.values():
                assert await handler._engine.call(damage) > LENGTH // 16
            assert [await tokens_of(client, prompt) for prompt in prompts] == expected
            found = [await damaged_blocks(client, role) for role in handlers]
            assert all(count > 0 for count in found), found

    asyncio.run(test())


async def tokens_of(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = await client.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [int(token.removeprefix("token_id:")) for token in answer.json()["choices"][0]["logprobs"]["tokens"]]


async def damaged_blocks(client: httpx.AsyncClient, role: Role) -> float:
    """The counter of damaged blocks on the instance of this role."""
    listed = (await client.get("/health")).json()["instances"]
    (address,) = [one["http_address"] for one in listed if one["role"] == role]
    text = (await client.get(f"http://{address}/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(sample.value for sample in samples if sample.name == "baton:host_damaged_blocks_total")


def test_blocks_of_a_cancelled_transfer_are_reused_safely(running: Running, reference: Reference) -> None:
    """sglang #24580: a transfer was cancelled while its bytes travelled, its blocks were given to another prompt, and
    the late bytes overwrote them."""
    first, lost, taker = prompt_of(20, start=5), prompt_of(500, start=6), prompt_of(500, start=7)
    reference.prepare(first, lost)
    reference.prepare(taker, num_tokens=120)

    async def test(driver: Driver) -> None:
        async with through_proxy(driver) as (proxy, ticket):
            warm = driver.work(first)
            assert await ended(driver, driver.start(warm, ticket())) == reference.answer(warm)
            # 31 blocks of 48: the next prompt of this length cannot but take blocks of this one.
            proxy.hold_at = proxy.received[-1] + 20_000
            cancelled = driver.work(lost)
            driver.start(cancelled, ticket())
            await driver.until_load(driver.decode, lambda load: proxy.num_held > 0, "bytes on their way")
            driver.cancel(cancelled)
            await driver.until_load(driver.decode, lambda load: load.free_blocks == load.total_blocks, "free blocks")
            # This instance computes it alone, so no later transfer corrects what late bytes have overwritten.
            taking = driver.work(taker, max_tokens=120)
            driver.send(driver.decode, Generate(taking))
            answer = driver.answers[taking.request_id]
            await has_begun(driver, answer)
            proxy.release()
            assert await ended(driver, answer) == reference.answer(taking)
            for prompt in (lost, taker):  # the retry, and the other one again
                work = driver.work(prompt)
                assert await ended(driver, driver.start(work, ticket())) == reference.answer(work)

    running.run(test, SINKS["zeromq"])
