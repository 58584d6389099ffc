"""Several models behind one router: each request goes to instances of its model, read by its tokenizer."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.pooling import PoolingProfile
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.tracing import Tracing
from baton_serve.services.router.app import create_app
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.main import admission_control, request_policy
from baton_serve.services.router.quota.api_keys import ApiKeys
from baton_serve.services.router.requests.metrics import RouterMetrics
from baton_serve.services.router.service_builder import Models, settings_of_models, with_local_models
from baton_serve.services.router.settings import RouterSettings
from tests.unit.local.hub_cache import downloaded
from tests.unit.router.conftest import settle
from tests.unit.router.fakes import LAYOUT, FakeCluster, record
from tests.unit.router.tokenizers_for_tests import write_folder

OTHER = msgspec.structs.replace(LAYOUT, fingerprint="other")


def add(fakes: FakeCluster, model: str, layout: KVLayout, max_model_len: int) -> None:
    for role in ("prefill", "decode"):
        one = record(f"{model}-{role}", role, layout=layout, max_model_len=max_model_len)
        fakes.add(msgspec.structs.replace(one, model=model))


@asynccontextmanager
async def routed(settings: RouterSettings, fakes: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router of several models."""
    cluster = Cluster(fakes, fakes, clock=time.monotonic)
    models = Models(
        settings,
        cluster=cluster,
        rules=request_policy(settings),
        admission=admission_control(settings, has_several_owners=lambda: False),
        metrics=RouterMetrics(CollectorRegistry(), "big"),
        tracing=Tracing(),
    )
    await cluster.start()
    await settle()
    app = create_app(models.model_services[0], api_keys=ApiKeys())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http:
        yield http
    models.end_requests()
    await cluster.close()


def settings_of(model_folder: Path, **models: dict[str, object]) -> RouterSettings:
    given: dict[str, object] = dict(models)
    return RouterSettings(
        model=str(model_folder),
        served_model_name=["big"],
        disaggregation_min_tokens=0,
        instance_wait_s=0.05,
        models=given,
    )


def test_each_model_has_its_own_instances_and_limits(model_folder: Path, tmp_path: Path) -> None:
    small = write_folder(tmp_path / "small")
    settings = settings_of(model_folder, small={"model": str(small), "default_ttft_ms": 60_000.0})

    async def scenario() -> None:
        fakes = FakeCluster()
        add(fakes, "big", LAYOUT, 256)
        add(fakes, "small", OTHER, 64)
        async with routed(settings, fakes) as http:
            for name in ("big", "small", None):
                body = {"model": name, "prompt": "abcdefgh", "max_tokens": 3}
                answer = await http.post("/v1/completions", json=body)
                assert answer.json()["model"] == (name or "big")
            chat = {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            assert (await http.post("/v1/chat/completions", json=chat)).json()["model"] == "small"
            cards = {c["id"]: c["max_model_len"] for c in (await http.get("/v1/models")).json()["data"]}
            assert cards == {"big": 256, "small": 64}
            unknown = await http.post("/v1/completions", json={"model": "none", "prompt": "a"})
            assert unknown.status_code == 404 and "big, small" in unknown.json()["error"]["message"]
            text = (await http.get("/metrics")).text
            assert 'vllm:e2e_request_latency_seconds_count{model_name="small"} 2.0' in text
            assert 'vllm:e2e_request_latency_seconds_count{model_name="big"} 2.0' in text
            for instance in list(fakes.instances.values()):
                if instance.record.model == "small":
                    fakes.forget(instance.record.instance)
            gone = await http.post("/v1/completions", json={"model": "small", "prompt": "a", "max_tokens": 1})
            assert gone.status_code == 503, "the other model's instances are not asked"
            text = (await http.get("/metrics")).text
            sizes = {name: f'baton:pool_instances{{model_name="{name}",role="decode"}}' for name in ("big", "small")}
            assert f"{sizes['big']} 1.0" in text and f"{sizes['small']} 0.0" in text
        served = {name: len(i.assignments()) for name, i in fakes.instances.items()}
        assert served == {"big-prefill": 2, "big-decode": 2, "small-prefill": 2, "small-decode": 2}

    asyncio.run(scenario())


def test_a_model_that_writes_and_one_that_embeds_share_a_router(model_folder: Path, tmp_path: Path) -> None:
    settings = settings_of(model_folder, embedder={"model": str(write_folder(tmp_path / "embedder"))})

    async def scenario() -> None:
        fakes = FakeCluster()
        add(fakes, "big", LAYOUT, 256)
        profile = PoolingProfile(tasks=["embed"], dimensions=3)
        one = record("embedder-0", "prefill", layout=OTHER, pooling=profile)
        fakes.add(msgspec.structs.replace(one, model="embedder"))
        async with routed(settings, fakes) as http:
            for path in ("/v1/embeddings", "/invocations"):
                found = await http.post(path, json={"model": "embedder", "input": "ab"})
                assert (found.json()["model"], found.json()["data"][0]["embedding"]) == ("embedder", [2.0, 195.0, 0.0])
                wrong = await http.post(path, json={"model": "big", "input": "ab"})
                assert wrong.status_code == 400 and "generates text" in wrong.text
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            for path in ("/v1/chat/completions", "/invocations"):
                assert (await http.post(path, json={"model": "big", **body})).json()["model"] == "big"
            refused = await http.post("/v1/chat/completions", json={"model": "embedder", **body})
            assert refused.status_code == 400 and "generates no text" in refused.text

    asyncio.run(scenario())


def test_a_model_that_is_described_wrongly_stops_the_start() -> None:
    for entry, reason in (({"model": "m", "colour": 1}, "colour"), ({}, "model"), ({"model": 5}, "str")):
        with pytest.raises(ConfigurationError, match=f"--models small: .*{reason}"):
            settings_of_models(RouterSettings(model="m", models={"small": entry}))


def test_models_by_the_names_of_the_hub_get_their_paths_and_keep_their_names(tmp_path: Path) -> None:
    folders = {name: downloaded(tmp_path, name, "abc") for name in ("org/big", "org/small", "org/words")}
    (folders["org/small"] / "model.safetensors").unlink()  # the router needs no weights
    given = RouterSettings(
        model="org/big",
        tokenizer="org/words",
        models={
            "small": {"model": "org/small", "served_model_name": ["tiny"]},
            "local": {"model": "/models/local"},
            "broken": 3,
        },
    )
    found = with_local_models(given, {"HF_HUB_CACHE": str(tmp_path)})
    assert (found.model, found.served_model_name) == (str(folders["org/big"]), ["org/big", "big"])
    assert found.tokenizer == str(folders["org/words"])
    assert found.models == {
        "small": {"model": str(folders["org/small"]), "served_model_name": ["tiny", "org/small", "small"]},
        "local": {"model": "/models/local"},
        "broken": 3,
    }
    named = with_local_models(
        RouterSettings(model="org/big", served_model_name=["mine"]), {"HF_HUB_CACHE": str(tmp_path)}
    )
    assert named.served_model_name == ["mine"]


def test_a_further_model_that_is_missing_is_named_when_downloads_are_off(tmp_path: Path) -> None:
    given = RouterSettings(model="/models/big", models={"small": {"model": "org/small"}}, offline=True)
    with pytest.raises(ConfigurationError, match=r"MODEL org/small .* `baton pull org/small`"):
        with_local_models(given, {"HF_HUB_CACHE": str(tmp_path)})
