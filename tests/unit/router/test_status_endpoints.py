"""Endpoints around the answers: health, models, tokens, metrics, documents."""

import asyncio
import re
from pathlib import Path

from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.tokenizers_for_tests import TEMPLATE, write_folder


def test_health_shows_pools_instances_and_links(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.get("/health")
        assert answer.status_code == 200
        found = answer.json()
        assert found["status"] == "ok"
        assert found["pools"] == {"prefill": 2, "decode": 1, "unified": 0}
        assert [i["instance"] for i in found["instances"]] == ["decode-0", "prefill-0", "prefill-1"]
        decode = found["instances"][0]
        (link,) = decode["links"]
        assert link.pop("reason") == "memory: in use"
        assert link == {"peer": "prefill-0", "transport": "memory", "gigabytes_per_second": 2.0, "choice": "rule"}
        assert decode["http_address"] == "decode-0:80"
        for method in ("GET", "POST"):
            assert (await router.http.request(method, "/ping")).status_code == 200

    serve(scenario, prefill=2)


def test_health_follows_the_cluster(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["prefill-0"].die()
        await settle()
        found = (await router.http.get("/health")).json()
        assert found["pools"]["prefill"] == 0
        assert [i["instance"] for i in found["instances"]] == ["decode-0"]
        decode = router.fakes["decode-0"]
        decode.draining = True
        decode.report()
        answer = await router.http.get("/health")
        assert answer.status_code == 503
        why = "no instance can generate an answer: empty pools are prefill, decode, unified"
        assert answer.json()["reason"] == why + "; registered, but not connected: prefill-0"
        unreached = {"instance": "prefill-0", "role": "prefill", "http_address": "prefill-0:80"}
        assert answer.json()["unreached"] == [unreached]
        router.fakes.registry_answers = False
        assert (await router.http.get("/health")).json()["reason"].endswith("; the registry does not answer")

    serve(scenario)


def test_models_are_those_that_may_be_asked_for(serve: Serve) -> None:
    async def advertised(router: Router) -> None:
        models = (await router.http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert models["data"][0]["id"] == "tiny"
        assert models["data"][0]["max_model_len"] == 256
        for model in models["data"]:
            answer = await router.complete(prompt="hello", max_tokens=2, model=model["id"])
            assert answer["model"] == "tiny"
            assert (await router.http.get(f"/v1/models/{model['id']}")).json() == model
        missing = await router.http.get("/v1/models/some/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"

    async def served(router: Router) -> None:
        models = (await router.http.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["one", "two"]
        assert (await router.complete(prompt="hello", max_tokens=2, model="two"))["model"] == "one"

    serve(advertised)
    serve(served, served_model_name=["one", "two"])


def test_tokens_and_text_turn_into_each_other(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        tokens = await router.http.post("/tokenize", json={"prompt": "hello wörld", "return_token_strs": True})
        found = tokens.json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 256
        text = await router.http.post("/detokenize", json={"tokens": found["tokens"]})
        assert text.json() == {"prompt": "hello wörld"}
        beyond = await router.http.post("/detokenize", json={"tokens": [2**40]})
        assert beyond.status_code == 400 and beyond.json()["error"]["param"] == "tokens"
        chat = await router.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]})
        back = await router.http.post("/detokenize", json={"tokens": chat.json()["tokens"]})
        assert back.json()["prompt"] == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    serve(scenario)


def test_the_tokenizer_is_published_only_if_enabled(serve: Serve, tmp_path: Path) -> None:
    async def enabled(router: Router) -> None:
        info = (await router.http.get("/tokenizer_info")).json()
        assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
        assert (info["chat_template"], info["tokenizer_class"]) == (TEMPLATE, "PreTrainedTokenizerFast")
        assert info["added_tokens_decoder"] == {"3": "<x>"} and info["pad_token"] == "<pad>"
        assert "/tokenizer_info" in (await router.http.get("/openapi.json")).json()["paths"]

    async def overridden(router: Router) -> None:
        assert (await router.http.get("/tokenizer_info")).json()["chat_template"] == "{{ 1 }}"

    async def disabled(router: Router) -> None:
        assert (await router.http.get("/tokenizer_info")).status_code == 404

    token = {"content": "<x>", "special": True}
    folder = str(write_folder(tmp_path, added_tokens_decoder={"3": token}, pad_token={**token, "content": "<pad>"}))
    serve(enabled, model=folder, enable_tokenizer_info_endpoint=True)
    serve(overridden, model=folder, enable_tokenizer_info_endpoint=True, chat_template="{{ 1 }}")
    serve(disabled)


def test_metrics_count_each_request_once(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(prompt=[104] * 10, max_tokens=6, n=2)
        await router.complete(prompt=[104] * 10, max_tokens=1)
        text = (await router.http.get("/metrics")).text
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }
        assert samples["vllm:prompt_tokens_total", "tiny"] == 20
        assert samples["vllm:generation_tokens_total", "tiny"] == 13
        assert samples["vllm:request_success_total", "length", "tiny"] == 3
        assert samples["vllm:time_to_first_token_seconds_count", "tiny"] == 2
        assert samples["vllm:time_per_output_token_seconds_count", "tiny"] == 10
        assert samples["vllm:e2e_request_latency_seconds_count", "tiny"] == 2
        assert samples["vllm:request_queue_time_seconds_sum", "tiny"] == 0.5
        assert samples["vllm:request_prefill_time_seconds_sum", "tiny"] == 1.0
        assert samples["baton:handoff_seconds_count", "tiny"] == 1
        assert samples["baton:handoff_exposed_seconds_sum", "tiny"] == 0.0625
        assert samples["baton:placements_total", "disaggregated", "tiny"] == 1
        assert samples["baton:placements_total", "prefill_only", "tiny"] == 1
        assert samples["baton:prefix_hit_tokens_total", "device", "tiny"] == 8
        assert samples["baton:requests_in_flight", "tiny"] == 0
        assert samples["baton:replays_total", "tiny"] == 0

    serve(scenario)


def test_metrics_show_the_pools_and_whether_the_registry_answers(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.http.get("/metrics")
        value = router.metrics.registry.get_sample_value
        health = (await router.http.get("/health")).json()
        roles = ("prefill", "decode", "unified")
        pools = {role: value("baton:pool_instances", {"role": role, "model_name": "tiny"}) for role in roles}
        assert pools == health["pools"] and pools["decode"] == 1
        assert value("baton:registry_connected") == 1

    serve(scenario)


def test_metrics_show_the_load_that_the_router_has_assigned_to_instances(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        async def assigned() -> float | None:
            await router.http.get("/metrics")
            return router.metrics.registry.get_sample_value("baton:router_assigned_requests")

        assert await assigned() == 0
        decode = router.fakes["decode-0"]
        decode.hold = 1
        request = asyncio.create_task(router.complete(prompt=[104] * 10, max_tokens=6))
        await settle()
        during = await assigned()
        decode.resume()
        await request
        assert during in (1, 2) and await assigned() == 0

    serve(scenario)


PAGES = {"/", "/docs", "/redoc", "/docs/swagger-ui.js", "/docs/swagger-ui.css", "/openapi.json"}
"""Pages for people, what they load, and the document itself. They are not part of the API."""


def routes_of(router: Router) -> list[Route]:
    app = router.app._app
    assert isinstance(app, FastAPI)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes), "a route of another kind is not looked at here"
    return routes


def test_the_path_of_redoc_shows_the_description_too(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        page, redoc = await router.http.get("/docs"), await router.http.get("/redoc")
        assert redoc.status_code == 200 and redoc.text == page.text and "swagger-ui.js" in redoc.text
        loaded = re.findall(r'(?:src|href)="([^"]+)"', redoc.text)
        # The two pages lie in the same folder, so that relative paths lead to the same files, also below a prefix.
        assert loaded and all(path.startswith(("docs/", "data:")) for path in loaded)

    serve(scenario)


def test_the_openapi_document_lists_every_route_that_is_not_marked_as_a_page(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        document = (await router.http.get("/openapi.json")).json()
        routed = {
            (route.path.replace(":path", ""), method.lower())
            for route in routes_of(router)
            for method in (route.methods or set()) - {"HEAD"}
            if route.include_in_schema
        }
        assert routed == {(path, method) for path, operations in document["paths"].items() for method in operations}
        assert {route.path for route in routes_of(router) if not route.include_in_schema} == PAGES
        some = {"/v1/chat/completions", "/v1/models", "/v2/rerank", "/invocations", "/v1/unload_lora_adapter", "/ping"}
        assert some <= document["paths"].keys()

    serve(scenario)


def test_each_route_needs_an_api_key_except_those_of_monitoring_and_the_pages(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        open_paths = set()
        for route in routes_of(router):
            for method in route.methods or ():
                if (await router.http.request(method, route.path)).status_code != 401:
                    open_paths.add(route.path)
        assert open_paths == {"/health", "/ping", "/metrics", *PAGES}

    serve(scenario, keys=["sk-1"])


def test_the_openapi_document_has_schemas_and_pages_that_show_it(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        document = (await router.http.get("/openapi.json")).json()
        assert "ChatMessage" in document["components"]["schemas"]
        assert document["components"]["securitySchemes"] == {"ApiKey": {"type": "http", "scheme": "bearer"}}
        for path in PAGES:
            assert (await router.http.get(path)).status_code == 200
            assert (await router.http.head(path)).status_code == 200
        assert (await router.http.get("/version")).json().keys() == {"version"}

    serve(scenario)
