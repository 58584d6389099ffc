"""One prompt, read by two prefill instances at the same time: the same tokens, whatever becomes of the first."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.instance import Role
from engine.pace import Pace
from tests.e2e.in_process import served
from tests.e2e.instances import instances
from tests.e2e.joint import BLOCK, FLAGS, OWN, Joint
from tests.e2e.test_equality import expected_tokens, prompt_of
from tests.e2e.test_families import until_ready

pytestmark = pytest.mark.slow

NEW_TOKENS = 6


@pytest.mark.parametrize("transport", ["usm", "zeromq", "oneccl"])
def test_tokens_equal_those_of_one_reader(llama: Path, transport: str) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, "--kv-transport", transport, own=OWN) as driver:
            joint = Joint(driver)
            # In one step of the front and one behind it; in several of either; the last block and a token alone.
            for number, (length, num_blocks) in enumerate([(120, 4), (200, 4), (200, 9), (81, 5), (33, 1)]):
                prompt = prompt_of(length, start=7 * number)
                answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), num_blocks)
                assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS), (length, num_blocks)
                assert answer.prefill is not None
                assert answer.prefill.front_tokens == num_blocks * BLOCK
                assert not sum(answer.prefill.cached_tokens.values())
            # What the second instance has is not fetched again; where it has all of it, nobody is followed.
            for length, num_blocks, front_tokens in [(120, 6, 0), (300, 14, 14 * BLOCK - 7 * BLOCK)]:
                prompt = prompt_of(length)
                answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), num_blocks)
                assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS), (length, num_blocks)
                assert answer.prefill is not None
                assert answer.prefill.front_tokens == front_tokens
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))


@pytest.mark.parametrize("fault", ["killed", "frozen", "never told"])
def test_a_front_that_is_lost_costs_time_alone(llama: Path, fault: str) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            joint, prompt = Joint(driver), prompt_of(200)
            if fault == "killed":
                joint.front.kill()
            elif fault == "frozen":
                joint.front.process.signal(signal.SIGSTOP)
            timeout_s = 20.0 if fault == "killed" else 1.5
            work = driver.work(prompt, max_tokens=NEW_TOKENS)
            answer = joint.start(work, 6, never_told=None if fault == "frozen" else 0, timeout_s=timeout_s)
            assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
            assert answer.prefill is not None
            assert answer.prefill.front_tokens == 0
            if fault == "frozen":
                joint.front.process.signal(signal.SIGCONT)
            for instance in driver.instances.values():
                if instance is not joint.front or fault == "frozen":
                    await driver.until_load(instance, lambda load: not load.running and not load.held_blocks, "idle")

    asyncio.run(asyncio.wait_for(test(), 120.0))


def test_one_that_follows_can_be_cancelled(llama: Path) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            joint = Joint(driver)
            for delay_s in (0.0, 0.01, 0.03):
                work = driver.work(prompt_of(250), max_tokens=NEW_TOKENS)
                joint.start(work, 8)
                await asyncio.sleep(delay_s)
                joint.cancel(work, 2)
                await driver.until_idle()
            # The same prompt afterwards.
            prompt = prompt_of(250)
            answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), 8)
            assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))


def test_through_the_router_answers_are_the_same_whoever_reads(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As fast as one another, and slow enough to be worth it, whatever else this machine does.
    monkeypatch.setattr(Pace, "computed", lambda pace, tokens, seconds: setattr(pace, "prefill_tokens_per_s", 2000.0))
    params: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    params |= {"return_tokens_as_token_ids": True}
    one, other, shared = prompt_of(150), prompt_of(170, start=50), [*prompt_of(150)[:96], *prompt_of(120, start=9)]
    cases: list[tuple[list[int], int]] = [(one, 80), (one, 0), (other, 80), (shared, 64), (prompt_of(60, start=3), 0)]

    async def test() -> None:
        roles: list[Role] = ["prefill", "prefill", "decode"]
        own = {"kv_tail_parts": 4, "max_num_batched_tokens": 64}
        async with served(llama, transport="usm", roles=roles, instance=own, joint_prefill_min_tokens=64) as client:
            await until_ready(client, len(roles))
            for prompt, front_tokens in cases:
                answer = await explained(client, prompt, temperature=0, **params)
                assert tokens_of(answer) == [expected_tokens(llama, prompt, NEW_TOKENS)]
                route = answer["baton"]
                assert (route.get("front_tokens", 0), "front" in route) == (front_tokens, front_tokens > 0)
                assert route.get("front") != route["prefill"]
            sampled = {"temperature": 1.0, "seed": 5, "n": 2, **params}
            answer, again = [await explained(client, prompt_of(140, start=99), **sampled) for _ in range(2)]
            assert "front" in answer["baton"] and "front" not in again["baton"]  # its prefix is cached then
            assert tokens_of(answer) == tokens_of(again)
            metrics = (await client.get("/metrics")).text
            assert re.search(r"^baton:joint_prefill_requests_total.* 4\.0$", metrics, re.MULTILINE)

    asyncio.run(asyncio.wait_for(test(), 100.0))


async def explained(client: httpx.AsyncClient, prompt: list[int], **params: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": prompt, **params}, headers={"x-baton-explain": "1"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [
        [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]] for choice in answer["choices"]
    ]
