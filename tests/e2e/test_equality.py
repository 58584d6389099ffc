"""Greedy tokens through real processes equal `transformers.generate`. All other families: test_families.py."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cluster import Api, Cluster, wait_until
from tests.e2e.instances import instances
from tests.families import IN_PROCESSES
from tests.tiny_models import load_reference, write_tiny_model

BLOCK = 16
NEW_TOKENS = 12
ALWAYS = ("--dtype", "float32", "--disaggregation-min-tokens", "0")
"""Exact arithmetic, and a handoff for every request."""
pytestmark = pytest.mark.slow


def expected_tokens(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    return greedy(reference_model(folder), prompt, count)


def reference_model(folder: Path) -> Any:
    torch.set_num_threads(1)
    model = load_reference(folder)
    model.generation_config.eos_token_id = None  # as `ignore_eos`: no token ends it, none is forbidden
    return model


def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    # Without a mask transformers takes tokens of a prompt that equal the padding for padding.
    limits = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
    return [int(token) for token in generated[0, len(prompt) :]]


def served_tokens(cluster: Api, prompt: Sequence[int], count: int) -> list[int]:
    answer = cluster.complete(
        list(prompt), max_tokens=count, temperature=0, ignore_eos=True, logprobs=0, return_tokens_as_token_ids=True
    )
    return [int(token.removeprefix("token_id:")) for token in answer["choices"][0]["logprobs"]["tokens"]]


def prompt_of(length: int, *, start: int = 0) -> list[int]:
    return [7 + (start + 31 * i + i * i) % 200 for i in range(length)]


PROMPTS = {
    "shorter than a block": prompt_of(5),
    "exactly a block": prompt_of(BLOCK, start=3),
    "many blocks": prompt_of(5 * BLOCK + 3, start=5),
    "the same again: its prefix is cached on both sides": prompt_of(5 * BLOCK + 3, start=5),
    "a cached prefix and something new": prompt_of(5 * BLOCK + 3, start=5)[: 4 * BLOCK] + prompt_of(40, start=11),
}


SINKS = {"decode-0": "usm", "decode-1": "zeromq"}


@pytest.mark.parametrize("family", IN_PROCESSES)
def test_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """One handoff uses shared memory, another TCP, each with prompts that no instance has cached."""
    write_tiny_model(tmp_path, family)
    model = reference_model(tmp_path)
    # A step reads at most 32 prompt tokens, so the long prompts are prefilled in chunks.
    flags = ("--block-size", str(BLOCK), "--max-num-batched-tokens", "32")
    own = {"prefill-0": (), **{sink: ("--kv-transport", transport) for sink, transport in SINKS.items()}}

    async def test() -> None:
        async with instances(tmp_path, *flags, own=own) as driver:
            for number, (sink, transport) in enumerate(SINKS.items()):
                driver.sink = sink
                for case, prompt in PROMPTS.items():
                    shifted = [token + number for token in prompt]
                    answer = await driver.complete(driver.work(shifted, max_tokens=NEW_TOKENS))
                    assert answer.sequence() == greedy(model, shifted, NEW_TOKENS), (transport, case)
                    assert answer.handoff is not None and answer.handoff.transport == transport
                    assert bool(answer.handoff.reused_blocks) == ("cached" in case), (transport, case)
            await driver.until_idle()

    asyncio.run(asyncio.wait_for(test(), 250.0))


def test_tokens_equal_transformers_through_a_collective_library(llama: Path) -> None:
    """`oneccl` on CPUs: a group of two ranks over gloo, made when the two instances first meet."""
    flags = ("--kv-transport", "oneccl", "--block-size", str(BLOCK), "--max-num-batched-tokens", "32")
    with Cluster(llama, args=(*ALWAYS, *flags)) as cluster:
        for case, prompt in PROMPTS.items():
            assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(llama, prompt, NEW_TOKENS), case
        cluster.wait_idle()
        assert cluster.metrics()["baton:handoff_seconds_count"] == len(PROMPTS)
        wait_until(lambda: links_of(cluster) == ["oneccl"], timeout_s=30, what="a link over oneccl in /health")


def test_tokens_equal_transformers_when_the_last_chunk_leaves_in_parts(llama: Path) -> None:
    flags = ("--kv-tail-parts", "8", "--block-size", str(BLOCK), "--max-num-batched-tokens", "32")
    with Cluster(llama, args=(*ALWAYS, *flags)) as cluster:
        for case, prompt in PROMPTS.items():
            assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(llama, prompt, NEW_TOKENS), case
        cluster.wait_idle()
        # The model has three layers. An instance reports its links to the registry with its next heartbeat.
        wait_until(lambda: "tails in 3 parts" in reasons_of(cluster), timeout_s=30, what="a link with three parts")


def test_unified_instances_need_no_transport_between_processes(llama: Path) -> None:
    with Cluster(llama, prefill=0, decode=0, unified=1, args=(*ALWAYS, "--kv-transport", "memory")) as cluster:
        prompt = PROMPTS["many blocks"]
        assert served_tokens(cluster, prompt, NEW_TOKENS) == expected_tokens(llama, prompt, NEW_TOKENS)


def links_of(cluster: Cluster) -> list[str]:
    (decode,) = cluster.instances("decode")
    return [str(link["transport"]) for link in decode["links"]]


def reasons_of(cluster: Cluster) -> str:
    (decode,) = cluster.instances("decode")
    return " ".join(link["reason"] for link in decode["links"])


def test_tokens_are_the_same_when_a_small_cache_forces_preemption(llama: Path) -> None:
    """Six streams that together need more blocks than decode has: some are preempted, recomputed and go on."""
    flags = (*ALWAYS, "--num-gpu-blocks-override", "24", "--max-model-len", "256")
    prompts = [prompt_of(40, start=17 * i) for i in range(6)]
    with Cluster(llama, args=flags) as cluster:
        body = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        answer = cluster.complete(prompts, **body, return_tokens_as_token_ids=True)
        cluster.wait_idle()
        (decode,) = cluster.instances("decode")
        assert cluster.metrics(decode["http_address"])["vllm:num_preemptions_total"] > 0
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        served = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        assert served == expected_tokens(llama, prompt, 80)
