"""Two models of one release, on processes: the router sends each request to the pool of the model that it names."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.cluster import wait_until
from tests.helm.chart import Manifest
from tests.helm.pods import OTHER, POD_ADDRESSES, VALUES, Pods
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.redis]

URL = f"http://{POD_ADDRESSES['router']}:8000"
HEADERS = {"authorization": "Bearer sk-test", "x-baton-explain": "1"}
SECOND: Manifest = {
    "name": "other",
    "model": {"source": {"hostPath": {"path": "/srv/models/other"}}},
    "engine": {"maxNumSeqs": 4},
}


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    folder = tmp_path_factory.mktemp("pods")
    models = [write_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    pods = Pods(folder, models[0], {**VALUES, "models": [SECOND]}, other=models[1], are_forked=True)
    try:
        pods.start_redis()
        for name in ("router", "unified", OTHER):
            pods.start(name)
        wait_until(lambda: pods.is_up("router", "startupProbe"), timeout_s=180, what="the router")
        wait_until(lambda: pods.is_up("unified") and pods.is_up(OTHER), timeout_s=180, what="the instances")
        wait_until(lambda: httpx.get(f"{URL}/health").json()["pools"]["unified"] == 2, timeout_s=30, what="both pools")
        yield pods
    finally:
        pods.kill_all()


def complete(model: str) -> httpx.Response:
    body = {"model": model, "prompt": "the owl and the ring", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{URL}/v1/completions", json=body, headers=HEADERS, timeout=60)


def test_each_model_answers_by_its_name_from_its_own_pool(pods: Pods) -> None:
    listed = httpx.get(f"{URL}/v1/models", headers=HEADERS).json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "other"]
    texts = []
    for name, pool in (("tiny", "unified"), ("other", OTHER)):
        answer = complete(name).raise_for_status().json()
        assert answer["model"] == name
        assert answer["baton"]["decode"] == f"{pool}-0"
        texts.append(answer["choices"][0]["text"])
    assert texts[0] != texts[1], "their weights differ"
    assert complete("none").status_code == 404


def test_the_router_counts_the_pools_of_each_model(pods: Pods) -> None:
    text = httpx.get(f"{URL}/metrics").text
    for name in ("tiny", "other"):
        assert f'baton:pool_instances{{model_name="{name}",role="unified"}} 1.0' in text
        assert f'baton:pool_instances{{model_name="{name}",role="decode"}} 0.0' in text
