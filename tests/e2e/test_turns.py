"""One prompt, read by two prefill instances in turns: the same tokens, whatever becomes of either."""

import asyncio
import signal
from pathlib import Path

import pytest

from contracts.messages import Cancel
from tests.e2e.instances import instances
from tests.e2e.joint import BLOCK, FLAGS, OWN, Joint, part_id
from tests.e2e.test_equality import expected_tokens, prompt_of

pytestmark = pytest.mark.slow

NEW_TOKENS = 6
ENDS = (4, 8, 12, 16)
"""Five parts of 64 tokens and the rest: a step each."""


@pytest.mark.parametrize("transport", ["usm", "zeromq", "oneccl"])
def test_tokens_equal_those_of_one_reader(llama: Path, transport: str) -> None:
    cases = [(290, ENDS), (200, (4, 8)), (250, (2, 9, 11)), (330, (1, 2, 3, 10, 11, 20)), (81, (2, 5))]

    async def test() -> None:
        async with instances(llama, *FLAGS, "--kv-transport", transport, own=OWN) as driver:
            joint = Joint(driver)
            for number, (length, ends) in enumerate(cases):
                prompt = prompt_of(length, start=7 * number)
                answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), *ends)
                assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS), (length, ends)
                assert answer.prefill is not None
                # What the other one read, and nothing that was cached before.
                starts = (0, *ends[:-1])
                read = [end - start for start, end in zip(starts, ends, strict=True)]
                assert answer.prefill.front_tokens == sum(read[::-2]) * BLOCK
                assert not sum(answer.prefill.cached_tokens.values())
            # Of a prompt of which both have the beginning, the rest.
            prompt = [*prompt_of(290)[:100], *prompt_of(190, start=77)]
            answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), 8, 12, 14)
            assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
            assert answer.prefill is not None
            assert answer.prefill.cached_tokens == {"device": 96}
            assert answer.prefill.front_tokens == (2 + 2) * BLOCK
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))


@pytest.mark.parametrize("num_parts", [2, 4])
def test_prompts_in_both_directions_wait_for_nobody_for_ever(llama: Path, num_parts: int) -> None:
    def ends(number: int) -> tuple[int, ...]:
        return (1 + number % 8,) if num_parts == 2 else (2, 3 + number % 3, 8)

    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            there, back = Joint(driver), Joint(driver)
            back.readers = there.readers[::-1]
            prompts = [prompt_of(150 + 17 * number, start=11 * number) for number in range(10)]
            answers = [
                (there if number % 2 else back).start(driver.work(prompt, max_tokens=NEW_TOKENS), *ends(number))
                for number, prompt in enumerate(prompts)
            ]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert await there.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_one_that_is_lost_costs_time_alone(llama: Path, fault: str) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            joint = Joint(driver)
            for number in range(1 if fault == "killed" else 3):
                prompt = prompt_of(290, start=number)
                answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), *ENDS, timeout_s=1.5)
                await asyncio.sleep(0.01 * number)
                joint.front.process.signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
                assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
                if fault == "frozen":
                    joint.front.process.signal(signal.SIGCONT)
                    await driver.until_idle()
            await driver.until_load(joint.back, lambda load: not load.running and not load.held_blocks, "idle")

    asyncio.run(asyncio.wait_for(test(), 120.0))


def test_a_part_of_which_nobody_is_told_or_that_is_cancelled_is_computed_by_the_next(llama: Path) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            joint = Joint(driver)
            for number in range(len(ENDS)):
                for never_told in (True, False):
                    prompt = prompt_of(290, start=10 * number + never_told)
                    work = driver.work(prompt, max_tokens=NEW_TOKENS)
                    left_out = number if never_told else None
                    answer = joint.start(work, *ENDS, never_told=left_out, brings_all=True, timeout_s=1.0)
                    if not never_told:
                        for instance in joint.readers:
                            driver.send(instance, Cancel(part_id(work, number)))
                    assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
                    await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))


def test_it_can_be_cancelled_at_any_time(llama: Path) -> None:
    async def test() -> None:
        async with instances(llama, *FLAGS, own=OWN) as driver:
            joint = Joint(driver)
            for delay_s in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
                work = driver.work(prompt_of(290), max_tokens=NEW_TOKENS)
                joint.start(work, *ENDS)
                await asyncio.sleep(delay_s)
                joint.cancel(work, 5)
                await driver.until_idle()
            prompt = prompt_of(290)
            answer = joint.start(driver.work(prompt, max_tokens=NEW_TOKENS), *ENDS)
            assert await joint.answer(answer) == expected_tokens(llama, prompt, NEW_TOKENS)
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 120.0))
