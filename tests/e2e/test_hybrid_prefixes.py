"""Prefixes of a model with recurrent states, through the router: pulls between instances, hints where prompts part, and
handoffs between block sizes. Tokens equal those of `transformers.generate`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cluster import Api, Cluster
from tests.e2e.in_process import BLOCK, in_background
from tests.families import MAX_POSITIONS
from tests.tiny_models import load_reference, write_tiny_model

pytestmark = pytest.mark.slow

NEW_TOKENS = 6
TRIES = 5
"""Of conversations: the router may get cache events later than the next request."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


def prompt_of(number: int, length: int) -> list[int]:
    return [7 + (13 * i + 31 * number * i + number) % 200 for i in range(length)]


def greedy(folder: Path, prompt: list[int]) -> list[int]:
    model: Any = load_reference(folder)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    return [int(token) for token in found[0, len(prompt) :]]


def ask(api: Api, prompt: list[int]) -> dict[str, Any]:
    """The answer's explanation, with its tokens and the number of cached ones."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = api.client.post(
        "/v1/completions", json=body | {"return_tokens_as_token_ids": True}, headers={"x-baton-explain": "1"}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokens = [int(token.removeprefix("token_id:")) for token in found["choices"][0]["logprobs"]["tokens"]]
    cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return {**found["baton"], "tokens": tokens, "cached": cached}


def test_a_pull_brings_the_states_after_the_prefix(folder: Path) -> None:
    """The decode instance computes short prompts alone. A longer one with the same beginning goes to prefill."""
    flags = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", str(MAX_POSITIONS))
    pulls = ("--disaggregation-min-tokens", "100", "--kv-pull", "always", "--kv-cache-memory-bytes", str(8 << 20))
    with Cluster(folder, prefill=1, decode=1, args=(*flags, *pulls)) as cluster:
        pulled: list[dict[str, Any]] = []
        for number in range(TRIES):
            first = ask(cluster, prompt_of(number, 90))
            assert first["decision"] == "decode_only"
            turn = prompt_of(number, 90) + prompt_of(number + 50, 150)
            second = ask(cluster, turn)
            assert second["tokens"] == greedy(folder, turn)
            assert second["decision"] == "disaggregated"
            if second.get("pulled_tokens"):
                pulled.append(second)
                break
        # The last checkpoint of 90 tokens is the one after 5 blocks of 16.
        assert [(one["pulled_from"][:6], one["pulled_tokens"], one["cached"]) for one in pulled] == [("decode", 80, 80)]
        cluster.wait_idle()


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Api]:
    sizes = {"kv_cache_memory_bytes": 24 << 20, "max_model_len": MAX_POSITIONS}
    with in_background(folder, instance=sizes) as api:
        yield api


@pytest.mark.parametrize("num_shared", [480, 380])
def test_64_prompts_that_share_a_prefix_all_hit_it(serving: Api, folder: Path, num_shared: int) -> None:
    """The workloads of vLLM #45238: with a prefix that is 100 tokens shorter all hits were lost."""
    shared = prompt_of(num_shared, num_shared)
    prompts = [shared + prompt_of(1000 + number, 20) for number in range(66)]
    # The second prompt parts from the first, and leaves a checkpoint there.
    for prompt in prompts[:2]:
        assert ask(serving, prompt)["tokens"] == greedy(folder, prompt)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(partial(ask, serving), prompts[2:]))
    assert [answer["cached"] for answer in answers] == [num_shared // BLOCK * BLOCK] * 64
    assert answers[-1]["tokens"] == greedy(folder, prompts[-1])


@pytest.mark.parametrize("case", ["usm, 16 to 32", "zeromq, 48 to 16"])
def test_a_handoff_between_block_sizes_converts_the_states(folder: Path, case: str, tmp_path: Path) -> None:
    transport, sizes = case.split(", ")
    source, sink = sizes.split(" to ")
    config = tmp_path / "baton.yaml"
    config.write_text(f"prefill:\n  block_size: {source}\ndecode:\n  block_size: {sink}\n")
    flags = ("--dtype", "float32", "--max-model-len", str(MAX_POSITIONS), "--disaggregation-min-tokens", "0")
    memory = ("--kv-transport", transport, "--kv-cache-memory-bytes", str(16 << 20))
    with Cluster(folder, prefill=1, decode=1, args=(*flags, *memory, "--config", str(config))) as cluster:
        for prompt in (prompt_of(3, 130), prompt_of(3, 130), prompt_of(3, 160)):
            answer = ask(cluster, prompt)
            assert answer["tokens"] == greedy(folder, prompt)
            assert (answer["decision"], answer["transport"]) == ("disaggregated", transport)
        cluster.wait_idle()
