"""Images through an encode pool: the same tokens, each image encoded once, and no request lost with an instance."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_serve.contracts.instance import Role
from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tests.e2e.test_grid_images import COUNT, pieces_of, write_model
from tests.e2e.test_images import Content, body_of, chat, tokens_of
from tests.images import Reference, picture

pytestmark = pytest.mark.slow

RIVER, TOWN, WIDE = picture(1, size=(50, 70)), picture(2, size=(50, 70)), picture(4, kind="JPEG", size=(600, 40))
CHATS: list[Content] = [
    [RIVER, "What is it?"],
    ["Compare ", TOWN, " with ", RIVER, " and ", WIDE, "."],
    [WIDE, "And this? It is ", RIVER],
]
"""Each of the three images is in several prompts, behind other tokens, so that their KV is not cached."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings have columns for several layers (DeepStack), and images fill several blocks."""
    folder = tmp_path_factory.mktemp("model")
    write_model("qwen3_vl", folder)
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[list[int]]:
    reference = Reference(model)
    return [reference.answer(pieces_of(model, [("user", content)]), COUNT) for content in CHATS]


async def counts_of(client: httpx.AsyncClient, role: str, name: str) -> dict[str, float]:
    """Return a counter of the only instance of a role, by its label `result`."""
    instances = (await client.get("/health")).json()["instances"]
    (address,) = [one["http_address"] for one in instances if one["role"] == role]
    return results_in((await client.get(f"http://{address}/metrics")).text, name)


def results_in(metrics: str, name: str) -> dict[str, float]:
    samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples if s.name == name]
    return {sample.labels["result"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    ("transport", "pools"), [("usm", ["prefill", "decode"]), ("zeromq", ["prefill", "decode"]), ("usm", ["unified"])]
)
def test_tokens_equal_transformers_and_each_image_is_encoded_once(
    model: Path, wanted: list[list[int]], transport: str, pools: list[Role]
) -> None:
    async def ask() -> list[dict[str, Any]]:
        roles: list[Role] = [*pools, "encode"]
        small = {"max_model_len": 400, "embedding_cache_gb": 0.01}
        async with asyncio.timeout(60), served(model, transport=transport, roles=roles, instance=small) as client:
            await until_ready(client, len(roles))
            assert (await client.get("/health")).json()["pools"]["encode"] == 1
            answers = [await chat(client, content) for content in CHATS]
            encoded = await counts_of(client, "encode", "baton:encoded_images_total")
            assert encoded == {"computed": 3.0, "cached": 3.0, "damaged": 0.0}
            assert await counts_of(client, pools[0], "baton:image_embeddings_total") == {"fetched": 6.0, "missed": 0.0}
            for _ in range(20):  # until the router knows that the KV of the first prompt is cached
                answers[0] = await chat(client, CHATS[0])
                before, encoded = encoded, await counts_of(client, "encode", "baton:encoded_images_total")
                if encoded == before:
                    break
            assert encoded == before, "an image whose KV is cached was fetched"
            assert encoded["computed"] == 3.0
            return answers

    answers = asyncio.run(ask())
    assert [tokens_of(answer) for answer in answers] == wanted
    assert {answer["baton"]["decision"] for answer in answers} == {"disaggregated" if len(pools) == 2 else "unified"}


def test_prefill_encodes_when_the_encode_instance_dies(model: Path, wanted: list[list[int]]) -> None:
    """Real processes: the instance is stopped, gets the images, and is killed. The next one serves again."""
    flags = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--max-model-len", "400")

    def ask(content: Content) -> list[int]:
        answer = cluster.client.post("/v1/chat/completions", json=body_of(content))
        assert answer.status_code == 200, answer.text
        return tokens_of(answer.json())

    with Cluster(model, encode=1, args=flags) as cluster, ThreadPoolExecutor() as pool:
        assert ask(CHATS[0]) == wanted[0]
        pid, (instance,) = cluster.pid("encode"), cluster.instances("encode")
        os.kill(pid, signal.SIGSTOP)
        answer = pool.submit(ask, CHATS[1])
        wait_until(
            lambda: cluster.metrics()["baton:router_assigned_requests"] > 0, timeout_s=20, what="a placed request"
        )
        os.kill(pid, signal.SIGKILL)
        assert answer.result(timeout=30) == wanted[1]
        (prefill,) = cluster.instances("prefill")
        text = httpx.get(f"http://{prefill['http_address']}/metrics").text
        assert results_in(text, "baton:image_embeddings_total") == {"fetched": 1.0, "missed": 3.0}

        def is_replaced() -> bool:
            return any(one["generation"] != instance["generation"] for one in cluster.instances("encode"))

        wait_until(is_replaced, timeout_s=60, what="another encode instance")
        assert ask(CHATS[2]) == wanted[2]
        (address,) = [one["http_address"] for one in cluster.instances("encode")]
        assert cluster.metrics(address)["baton:encode_seconds_total"] > 0
        cluster.wait_idle()
