"""Models of running workers are freed, loaded again and replaced, through real processes."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import Decode, EngineCommand
from tests.e2e.cluster import Cluster
from tests.e2e.instances import instances, is_idle
from tests.e2e.test_equality import expected_tokens, prompt_of, served_tokens
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow

PROMPT = prompt_of(90)
COUNT = 12
FLAGS = ("--dtype", "float32", "--disaggregation-min-tokens", "0", "--instance-wait-s", "1", "--enable-admin-endpoints")
STREAMED: dict[str, Any] = {"prompt": prompt_of(40, start=9), "max_tokens": 600, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights `old` and `new` of one architecture, and with some that cannot replace them."""
    folder = tmp_path_factory.mktemp("weights")
    for name, seed in (("old", 0), ("new", 1)):
        write_tiny_model(folder / name, seed=seed, max_position_embeddings=4096)
    write_tiny_model(folder / "wide", intermediate_size=112, max_position_embeddings=4096)
    # The check before the pause cannot see what a pickled file has: loading it fails.
    broken = shutil.copytree(folder / "old", folder / "broken")
    (broken / "model.safetensors").unlink()
    (broken / "pytorch_model.bin").write_bytes(b"no weights")
    return folder


@pytest.fixture(scope="module")
def cluster(models: Path) -> Iterator[Cluster]:
    with Cluster(models / "old", args=(*FLAGS, "--update-weights-folder", str(models))) as running:
        yield running


def update(cluster: Cluster, model: Path, **params: Any) -> httpx.Response:
    return cluster.client.post("/update_weights_from_disk", json={"model_path": str(model)}, params=params)


def mapped(cluster: Cluster) -> set[str]:
    """Which memory of models the workers have mapped: `weights`, and KV caches, their own or those of others."""
    found = set()
    for role in ("prefill", "decode"):
        maps = Path(f"/proc/{cluster.pid(role)}/maps").read_text()
        found |= {name for name, mark in (("weights", "model.safetensors"), ("cache", "baton-kv")) if mark in maps}
    return found


def test_sleeping_workers_have_no_memory_of_the_model_and_answer_alike_when_awake(
    cluster: Cluster, models: Path
) -> None:
    expected = expected_tokens(models / "old", PROMPT, COUNT)
    assert served_tokens(cluster, PROMPT, COUNT) == expected
    assert mapped(cluster) == {"weights", "cache"}
    generations = {one["instance"]: one["generation"] for one in cluster.instances()}

    for _ in range(2):  # a second call changes nothing
        assert cluster.client.post("/sleep", params={"level": 1}).status_code == 200
        assert cluster.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert mapped(cluster) == set()
    health = cluster.client.get("/health")
    assert health.status_code == 200 and "2 instances sleep" in health.json()["warning"]
    for one in cluster.instances():
        own = httpx.get(f"http://{one['http_address']}/health").json()
        assert (own["status"], own["load"]["total_blocks"], one["sleeping"]) == ("sleeping", 0, True)
        assert one["generation"] == own["generation"] != generations[one["instance"]]
        metrics = httpx.get(f"http://{one['http_address']}/metrics").text
        assert 'sleep_state="discard_all"} 1.0' in metrics
    refused = cluster.client.post("/v1/completions", json={"prompt": PROMPT})
    assert refused.status_code == 503 and "/wake_up" in refused.text and "retry-after" in refused.headers
    assert cluster.client.post("/reset_prefix_cache").status_code == 400
    assert update(cluster, models / "new").status_code == 409

    assert cluster.client.post("/wake_up", params={"tags": "weights"}).status_code == 400
    awake = cluster.client.post("/wake_up")
    assert awake.status_code == 200 and awake.json()["instances"].keys() == generations.keys()
    assert cluster.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert served_tokens(cluster, PROMPT, COUNT) == expected


def test_blocks_of_a_sleeping_instance_are_gone_at_once(models: Path) -> None:
    async def test() -> None:
        async with instances(models / "old") as driver:
            answer = await driver.complete(driver.work(PROMPT, max_tokens=COUNT))
            ticket, source = driver.ticket(), driver.prefill
            for action in ("pause", "sleep"):
                driver.send(source, EngineCommand(request_id=RequestId("r"), action=action))
            await driver.until(lambda: any(one.sleeping for one in driver.view.records()), "a sleeping instance")
            # A router that does not know of it yet asks for a handoff.
            work = driver.work([token + 1 for token in PROMPT], max_tokens=COUNT)
            driver.send(driver.decode, Decode(work, ticket))
            late = driver.answers[work.request_id]
            await driver.until(lambda: bool(late.failed or late.reasons), "the end of the fetch", timeout_s=15.0)
            assert [one.code for one in late.failed] == ["handoff_failed"] and answer.reasons == {0: "length"}
            await driver.until_load(driver.decode, is_idle, "no lease is left")

    asyncio.run(test())


def test_new_weights_answer_without_the_kv_of_the_old_ones(cluster: Cluster, models: Path) -> None:
    answers = {name: expected_tokens(models / name, PROMPT, COUNT) for name in ("old", "new")}
    assert answers["old"] != answers["new"]
    for name in ("new", "old"):
        cluster.complete(PROMPT, max_tokens=1)
        assert cached(cluster) > 0
        answer = update(cluster, models / name)
        assert answer.status_code == 200 and answer.json()["success"], answer.text
        assert cached(cluster) == 0
        assert served_tokens(cluster, PROMPT, COUNT) == answers[name]


def cached(cluster: Cluster) -> int:
    answer = cluster.complete(PROMPT, max_tokens=2, temperature=0)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_streams_end_with_the_weights_that_they_began_with(cluster: Cluster, models: Path) -> None:
    expected = cluster.complete(**STREAMED)["choices"][0]["text"]
    stream = cluster.stream("/v1/completions", STREAMED)
    pieces = [next(stream)]
    hurried = [update(cluster, models / "new", drain_timeout_s=0), cluster.client.post("/sleep?drain_timeout_s=0")]
    for refused in hurried:
        assert refused.status_code == 409 and "still run" in refused.text, refused.text
    answers: list[httpx.Response] = []
    patient = threading.Thread(target=lambda: answers.append(update(cluster, models / "new")))
    patient.start()
    pieces += list(stream)
    patient.join(120)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert answers[0].status_code == 200
    assert served_tokens(cluster, PROMPT, COUNT) == expected_tokens(models / "new", PROMPT, COUNT)
    assert update(cluster, models / "old").status_code == 200


def test_weights_that_cannot_be_loaded_leave_the_old_ones_serving(cluster: Cluster, models: Path) -> None:
    expected = expected_tokens(models / "old", PROMPT, COUNT)
    generations = {one["generation"] for one in cluster.instances()}
    for path, status, reason in (
        (models / "nowhere", 400, "config.json"),
        (models / "wide", 400, "intermediate_size is 112"),
        (models.parent, 403, "--update-weights-folder"),
        (models / "old" / ".." / ".." / "x", 403, "--update-weights-folder"),
    ):
        answer = update(cluster, path)
        assert answer.status_code == status and reason in answer.text, answer.text
    # None of them has disturbed the instances.
    assert {one["generation"] for one in cluster.instances()} == generations
    answer = update(cluster, models / "broken")
    assert answer.status_code == 400 and "broken cannot be loaded" in answer.text, answer.text
    assert served_tokens(cluster, PROMPT, COUNT) == expected
