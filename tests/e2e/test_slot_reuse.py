"""Slots of a batch that many requests use one after another, and requests that are cancelled by hundreds."""

import asyncio
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.features import RULES
from tests.e2e.test_equality import prompt_of

pytestmark = pytest.mark.slow

ALWAYS = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
SLOTS = 3
NUM_BLOCKS = 24
"""Blocks of each instance: the sequences of `SLOTS` requests do not fit, so that some are preempted."""
AT_ONCE, NUM_REQUESTS = 12, 60
LOOSE = {"temperature": 0.9, "seed": 3}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": LOOSE,
    "penalties": {**RULES, **LOOSE},
    "repetition": {"repetition_penalty": 1.6, **LOOSE},
    "bias": {"logit_bias": {"70": 100, "71": 99, "72": 99}, **LOOSE},
    "grammar": {"guided_regex": "(ab|cd|[e-h]{3} )+", **LOOSE},
    "other grammar": {"guided_regex": "[0-9]{4}(-[0-9]{2})+", **LOOSE},
    "two sequences": {"n": 2, **LOOSE},
    "narrow": {"top_k": 5, "min_p": 0.1, "temperature": 1.1, "seed": 8},
    "adapter one": {"model": "one", "temperature": 0},
    "adapter two": {"model": "two", **LOOSE},
}
"""Parameters by kind of request: each kind keeps another state beside its slot."""

NUM_CANCELLED, PROMPT_TOKENS, ROUNDS = 300, 2000, 4
CANCEL_AFTER_S = float(os.environ.get("TEST_CANCEL_AFTER_S", "2"))
"""Seconds until all requests of a round are cancelled. The public reproduction waits for 60."""


@pytest.fixture(scope="module")
def small(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={write_adapter(folder / name, llama, seed=seed)}" for seed, name in enumerate(("one", "two"))]
    batch = ("--max-num-seqs", str(SLOTS), "--max-model-len", "220", "--max-num-batched-tokens", "48")
    cache = ("--block-size", "16", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--host-kv-gb", "0.01")
    adapters = ("--enable-lora", "--max-loras", "2", "--lora-modules", *modules)
    with Cluster(llama, args=(*ALWAYS, *batch, *cache, *adapters)) as running:
        yield running


def body_of(kind: str, number: int) -> dict[str, Any]:
    """The prompt of a kind is its own; `number` changes its length, and with it the place of everything after it."""
    prompt = prompt_of(40 + 13 * number, start=17 * list(KINDS).index(kind))
    return {"prompt": prompt, "max_tokens": 60, "ignore_eos": "grammar" not in kind, **KINDS[kind]}


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each sequence."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_slots_that_are_used_again_keep_nothing_of_the_request_before(small: Cluster) -> None:
    """sglang #39342: a slot with the state of a sequence went to the cache although a step had not written it, and
    prompts continued from another state. Recurrent states do not exist here; block tables, adapters, grammars,
    penalties and random numbers of a slot do."""
    cases = [(kind, number) for kind in KINDS for number in range(3)]
    alone = {case: texts_of(list(small.stream("/v1/completions", body_of(*case)))) for case in cases}
    choose = random.Random(7)
    plan = [
        (choose.choice(cases), choose.choice((None, None, 1, 6)), choose.choice("abc")) for _ in range(NUM_REQUESTS)
    ]

    def ask(case: tuple[str, int], cancel_after: int | None, salt: str) -> dict[int, str]:
        stream = small.stream("/v1/completions", {**body_of(*case), "cache_salt": salt})
        if cancel_after is None:
            return texts_of(list(stream))
        chunks = [chunk for chunk, _ in zip(stream, range(cancel_after), strict=False)]
        stream.close()  # type: ignore[attr-defined]
        return texts_of(chunks)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(lambda planned: ask(*planned), plan))
    for (case, cancel_after, _), texts in zip(plan, found, strict=True):
        if cancel_after is None:
            assert texts == alone[case], case
        else:
            assert all(alone[case][index].startswith(text) for index, text in texts.items()), case
    small.wait_idle()
    (decode,) = small.instances("decode")
    assert small.metrics(decode["http_address"])["vllm:num_preemptions_total"] > 0
    assert {case: texts_of(list(small.stream("/v1/completions", body_of(*case)))) for case in cases[::3]} == {
        case: alone[case] for case in cases[::3]
    }


@pytest.fixture(scope="module")
def cancelled(llama: Path) -> Iterator[Cluster]:
    with Cluster(llama, args=(*ALWAYS, "--max-model-len", "2200", "--max-num-seqs", "16")) as running:
        yield running


async def cancel_all(url: str, round_number: int) -> int:
    """Send the requests of a round, and close all connections after `CANCEL_AFTER_S`. Return how many were answered."""
    limits = httpx.Limits(max_connections=NUM_CANCELLED)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120.0) as client:

        async def ask(number: int) -> None:
            prompt = prompt_of(PROMPT_TOKENS, start=1 + number + NUM_CANCELLED * round_number)
            body = {"prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

        asking = [asyncio.create_task(ask(number)) for number in range(NUM_CANCELLED)]
        await asyncio.wait(asking, timeout=CANCEL_AFTER_S)
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
    unexpected = [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)]
    assert not unexpected, unexpected[0]
    return sum(end is None for end in ends)


def descriptors(cluster: Cluster) -> dict[int, int]:
    """Open descriptors of each process, by process id: of `baton serve` with its router, and of the instances."""
    pids = [cluster.serve_pid, cluster.pid("prefill"), cluster.pid("decode")]
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}


def test_a_request_is_answered_after_hundreds_were_cancelled_four_times(cancelled: Cluster) -> None:
    """TensorRT-LLM #11715: after 300 requests of 2,000 tokens were cancelled at once, several times, the prefill worker
    answered nothing any more. Nothing of the cancelled requests may be left, and one more must get its answer."""
    prompt, params = prompt_of(PROMPT_TOKENS), {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    undisturbed = cancelled.complete(prompt, **params)["choices"][0]["text"]
    before: dict[int, int] = {}
    for number in range(ROUNDS):
        answered = asyncio.run(cancel_all(cancelled.url, number))
        assert answered < NUM_CANCELLED / 2 or CANCEL_AFTER_S > 10, "most requests ended before they were cancelled"
        cancelled.wait_idle(30.0)
        before = before or descriptors(cancelled)
    probe = cancelled.complete(prompt, **params, cache_salt="computed again")
    assert probe["choices"][0]["text"] == undisturbed
    cancelled.wait_idle()
    wait_until(lambda: not left_over(cancelled, before), timeout_s=15, what="nothing left of the cancelled requests")


def left_over(cluster: Cluster, before: dict[int, int]) -> dict[str, float]:
    """Return what the cancelled requests still own: blocks of instances, load in the router, descriptors."""
    found: dict[str, float] = {}
    for instance in cluster.instances():
        metrics = cluster.metrics(instance["http_address"])
        found[f"{instance['instance']} blocks"] = metrics["baton:total_blocks"] - metrics["baton:free_blocks"]
        found[f"{instance['instance']} queued tokens"] = metrics["baton:queued_tokens"]
        found |= {f"{instance['instance']} {name}": float(instance[name]) for name in ("running", "waiting")}
    router = cluster.metrics()
    found |= {name: value for name, value in router.items() if name.startswith("baton:router_waiting")}
    found |= {f"descriptors of {pid}": float(count - before[pid] > 8) for pid, count in descriptors(cluster).items()}
    return {name: value for name, value in found.items() if value}
