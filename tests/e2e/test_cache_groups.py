"""Owners of different API keys do not share cached prefixes: not on an instance, by a pull, nor from host memory.

Router, prefill and decode instances with a real engine run in this process.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Api, wait_until
from tests.e2e.in_process import BLOCK, in_background

pytestmark = pytest.mark.slow

LENGTH = 150
CACHED = LENGTH // BLOCK * BLOCK
SMALL = {"num_gpu_blocks_override": 40, "host_kv_gb": 0.01, "max_model_len": 600}
"""40 blocks a card: three prompts of 300 tokens evict an earlier one to host memory."""
TRIES = 5
"""Conversations until one must have been found: the router may get cache events later than the next request."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("sk-a name=alice\nsk-a2 name=alice\nsk-b name=bob\nsk-c name=carol cache_group=bob\nsk-d\n")
    return file


@pytest.fixture(scope="module")
def serving(llama: Path, keys: Path) -> Iterator[Api]:
    with in_background(llama, instance=SMALL, kv_pull="always", api_key_file=str(keys)) as api:
        yield api


def prompt_of(number: int, length: int = LENGTH) -> list[int]:
    return [7 + (13 * i + 31 * number * i + number) % 200 for i in range(length)]


def ask(api: Api, key: str, prompt: list[int], **params: Any) -> dict[str, Any]:
    """The answer's explanation, with its tokens and the number of cached ones."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 0, **params}
    answer = api.client.post(
        "/v1/completions",
        json=body | {"return_tokens_as_token_ids": True},
        headers={"x-baton-explain": "1", "authorization": f"Bearer {key}"},
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokens = [int(token.removeprefix("token_id:")) for token in found["choices"][0]["logprobs"]["tokens"]]
    return {
        **found["baton"],
        "tokens": tokens,
        "cached": (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0),
    }


def test_a_key_finds_only_what_its_owner_or_group_has_cached(serving: Api) -> None:
    prompt = prompt_of(1)
    assert ask(serving, "sk-a", prompt)["cached"] == 0
    again = ask(serving, "sk-a", prompt)
    assert again["cached"] >= CACHED - BLOCK and again["reused_blocks"] > 0
    other = ask(serving, "sk-b", prompt)
    assert other["cached"] == 0 and other["reused_blocks"] == 0, "nothing is reused at prefill or at decode"
    assert other["transferred_blocks"] > again["transferred_blocks"]
    assert ask(serving, "sk-d", prompt)["cached"] == 0
    assert ask(serving, "sk-a2", prompt)["cached"] > 0, "the other key of the same name"
    assert ask(serving, "sk-c", prompt)["cached"] > 0, "the key of the same cache_group"
    assert other["tokens"] == again["tokens"]


def test_a_requests_own_salt_adds_to_that_of_its_key(serving: Api) -> None:
    prompt = prompt_of(2)
    assert ask(serving, "sk-a", prompt)["cached"] == 0
    assert ask(serving, "sk-a", prompt, cache_salt="x")["cached"] == 0
    assert ask(serving, "sk-b", prompt, cache_salt="x")["cached"] == 0
    assert ask(serving, "sk-a", prompt, cache_salt="x")["cached"] > 0


def test_blocks_of_an_answer_are_not_pulled_for_another_key(serving: Api) -> None:
    pulled = 0
    for number in range(10, 10 + TRIES):
        answer = ask(serving, "sk-a", prompt_of(number), max_tokens=60)["tokens"]
        turn = prompt_of(number) + answer + prompt_of(number + 50, 40)
        other = ask(serving, "sk-b", turn)
        assert other.get("pulled_tokens", 0) == 0 and other["cached"] == 0
        pulled = ask(serving, "sk-a", turn).get("pulled_tokens", 0)
        if pulled:
            break
    assert pulled, "no turn of the same key fetched the answer of the turn before"


def test_host_memory_gives_no_block_to_another_key(serving: Api) -> None:
    found = 0
    for number in range(100, 100 + TRIES):
        ask(serving, "sk-a", prompt_of(number, 300))
        for other in range(3):
            ask(serving, "sk-a", prompt_of(number + 1000 + other, 300))
        assert ask(serving, "sk-b", prompt_of(number, 300))["cached"] == 0
        found = ask(serving, "sk-a", prompt_of(number, 300))["cached_tokens"].get("host", 0)
        if found:
            break
    assert found, "no prompt of the same key came back from host memory"


def test_all_keys_share_cached_prefixes_if_the_setting_says_so(llama: Path, keys: Path) -> None:
    with in_background(llama, api_key_file=str(keys), prefix_cache_sharing="all") as api:
        prompt = prompt_of(3)
        assert ask(api, "sk-a", prompt)["cached"] == 0
        wait_until(lambda: ask(api, "sk-b", prompt)["cached"] > 0, timeout_s=20, what="a prefix of another key")
        assert ask(api, "sk-b", prompt, cache_salt="x")["cached"] == 0
