"""Adapters: names of their own, blocks of their own, and instances that have them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton_serve.contracts.instance import AdapterRecord
from baton_serve.contracts.messages import Decode, LoadAdapter, Prefill, UnloadAdapter
from baton_serve.services.router.cluster.offered_adapters import most_common_adapters
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import record

PROMPT = "abcdefgh" * 4


def adapter(name: str, fingerprint: str = "") -> AdapterRecord:
    return AdapterRecord(name=name, fingerprint=fingerprint or f"of {name}", path=f"/adapters/{name}")


def load(router: Router, instance: str, *adapters: AdapterRecord) -> None:
    """Load adapters into a fake instance, and send its next report."""
    fake = router.fakes[instance]
    fake.record = msgspec.structs.replace(fake.record, adapters=list(adapters))
    fake.report()


def test_an_adapter_is_asked_for_by_name_and_names_its_own_blocks(serve: Serve) -> None:
    async def test(router: Router) -> None:
        for instance in ("prefill-0", "decode-0"):
            load(router, instance, adapter("poet"))
        plain = await router.complete(prompt=PROMPT, max_tokens=3)
        found = await router.complete(model="poet", prompt=PROMPT, max_tokens=3)
        assert (plain["model"], found["model"]) == ("tiny", "poet")
        works = [message.work for message in router.fakes["prefill-0"].assignments()]
        assert [work.lora for work in works] == ["", "of poet"]
        assert works[0].root != works[1].root
        assert all(isinstance(m, Prefill | Decode) for m in router.fakes["decode-0"].assignments())
        cards = {c["id"]: c for c in (await router.http.get("/v1/models")).json()["data"]}
        assert (cards["poet"]["parent"], cards["poet"]["root"]) == ("tiny", "/adapters/poet")

    serve(test)


def test_only_instances_that_have_it_are_asked(serve: Serve) -> None:
    async def test(router: Router) -> None:
        for instance in ("prefill-1", "decode-0"):
            load(router, instance, adapter("poet"))
        for _ in range(3):
            await router.complete(model="poet", prompt=PROMPT, max_tokens=3)
        asked = {name: len(fake.assignments()) for name, fake in router.fakes.instances.items()}
        assert asked == {"prefill-0": 0, "prefill-1": 3, "decode-0": 3, "decode-1": 0}
        load(router, "decode-0")
        await settle()
        refused = await router.http.post("/v1/completions", json={"model": "poet", "prompt": PROMPT})
        assert refused.status_code == 503

    serve(test, prefill=2, decode=2)


def test_an_adapter_that_nobody_has_is_no_model(serve: Serve) -> None:
    async def test(router: Router) -> None:
        load(router, "prefill-0", adapter("poet"))
        load(router, "prefill-0")
        answer = await router.http.post("/v1/completions", json={"model": "poet", "prompt": PROMPT})
        assert answer.status_code == 404

    serve(test)


def test_while_an_adapter_is_replaced_the_one_that_most_instances_have_counts() -> None:
    old, new, other = adapter("poet", "old"), adapter("poet", "new"), adapter("clerk")
    assert most_common_adapters([[old], [new, other], [new]]) == {"clerk": other, "poet": new}
    assert most_common_adapters([[old], [new]]) == most_common_adapters([[new], [old]])


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
POET = {"lora_name": "poet", "lora_path": "/adapters/poet"}


async def adapters(router: Router) -> list[str]:
    cards = (await router.http.get("/v1/models")).json()["data"]
    return [card["id"] for card in cards if card["parent"] is not None]


def changes(router: Router, instance: str) -> list[str]:
    received = [m for m in router.fakes[instance].received if isinstance(m, LoadAdapter | UnloadAdapter)]
    return [f"{type(message).__name__} {message.name}" for message in received]


def test_an_adapter_is_loaded_on_all_instances_and_unloaded_while_a_stream_has_it(serve: Serve) -> None:
    async def test(router: Router) -> None:
        loaded = await router.http.post(LOAD, json=POET)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert await adapters(router) == ["poet"]
        assert [changes(router, one) for one in router.fakes.instances] == [["LoadAdapter poet"]] * 3
        router.fakes["decode-0"].hold = 2
        stream = asyncio.create_task(router.stream("/v1/completions", model="poet", prompt=PROMPT, max_tokens=6))
        await settle()
        unloaded = await router.http.post(UNLOAD, json={"lora_name": "poet"})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
        assert await adapters(router) == []
        assert (await router.http.post("/v1/completions", json={"model": "poet", "prompt": "a"})).status_code == 404
        router.fakes["decode-0"].resume()
        assert (await stream)[-1]["choices"][0]["finish_reason"] == "length"

    serve(test, prefill=2, allow_runtime_lora_updating=True)


def test_bad_changes_of_adapters_are_refused_and_leave_nothing(serve: Serve) -> None:
    async def test(router: Router) -> None:
        await router.http.post(LOAD, json=POET)
        router.fakes["decode-0"].no_adapters = {"/adapters/huge"}
        for path, body, status, word in (
            (LOAD, POET, 400, "in use"),
            (LOAD, {**POET, "lora_name": "tiny"}, 400, "in use"),
            (LOAD, {"lora_name": "a"}, 400, "lora_path"),
            (LOAD, {"lora_name": "", "lora_path": "a"}, 400, "lora_name"),
            (LOAD, {**POET, "lora_name": "tiny", "load_inplace": True}, 400, "in use"),
            (LOAD, {**POET, "load_inplace": "yes"}, 400, "load_inplace"),
            (LOAD, {**POET, "lora_path": "/adapters/huge", "load_inplace": True}, 400, "decode-0: a rank too high"),
            (LOAD, {"lora_name": "huge", "lora_path": "/adapters/huge"}, 400, "decode-0: a rank too high"),
            (UNLOAD, {"lora_name": "nobody"}, 404, "nobody"),
        ):
            answer = await router.http.post(path, json=body)
            assert (answer.status_code, word in answer.text) == (status, True), answer.text
        replaced = ["LoadAdapter poet"] * 2  # a replacement that an instance refuses is not unloaded elsewhere
        assert changes(router, "prefill-0") == [*replaced, "LoadAdapter huge", "UnloadAdapter huge"]
        assert await adapters(router) == ["poet"]

    serve(test, allow_runtime_lora_updating=True)


def test_load_inplace_replaces_an_adapter_of_the_same_name_or_loads_a_new_one(serve: Serve) -> None:
    async def test(router: Router) -> None:
        for path in ("/adapters/first", "/adapters/second"):
            body = {"lora_name": "poet", "lora_path": path, "load_inplace": True}
            assert (await router.http.post(LOAD, json=body)).status_code == 200
            await router.complete(model="poet", prompt=PROMPT, max_tokens=3)
        assert await adapters(router) == ["poet"]
        sent = [m for m in router.fakes["decode-0"].received if isinstance(m, LoadAdapter)]
        assert [(message.path, message.in_place) for message in sent] == [
            ("/adapters/first", True),
            ("/adapters/second", True),
        ]
        works = [message.work for message in router.fakes["prefill-0"].assignments()]
        assert [work.lora for work in works] == ["/adapters/first", "/adapters/second"]
        assert works[0].root != works[1].root

    serve(test, allow_runtime_lora_updating=True)


def test_adapters_do_not_change_unless_that_is_allowed_and_the_key_is_given(serve: Serve) -> None:
    async def refused(router: Router) -> None:
        answer = await router.http.post(LOAD, json=POET)
        assert (answer.status_code, "--allow-runtime-lora-updating" in answer.text) == (404, True)

    async def without_key(router: Router) -> None:
        assert (await router.http.post(LOAD, json=POET)).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await router.http.post(LOAD, json=POET, headers=key)).status_code == 200

    serve(refused)
    serve(without_key, keys=["secret"], allow_runtime_lora_updating=True)


def test_a_new_instance_loads_the_adapters_that_were_loaded_over_http_and_no_others(serve: Serve) -> None:
    async def test(router: Router) -> None:
        await router.http.post(LOAD, json=POET)
        by_settings = adapter("clerk")
        load(router, "prefill-0", *router.fakes["prefill-0"].record.adapters, by_settings)
        router.fakes.add(record("prefill-1", "prefill"))
        await settle()
        assert changes(router, "prefill-1") == ["LoadAdapter poet"]
        router.fakes["prefill-0"].die()
        router.fakes.forget("prefill-0")
        await settle()
        assert (await router.complete(model="poet", prompt=PROMPT, max_tokens=3))["model"] == "poet"

    serve(test, allow_runtime_lora_updating=True)


def test_an_instance_that_is_lost_while_an_adapter_is_loaded_is_not_waited_for(serve: Serve) -> None:
    async def test(router: Router) -> None:
        router.fakes["decode-1"].no_adapters = None
        loading = asyncio.create_task(router.http.post(LOAD, json=POET))
        await settle()
        assert not loading.done()
        router.fakes["decode-1"].die()
        assert (await loading).status_code == 200
        assert (await router.complete(model="poet", prompt=PROMPT, max_tokens=3))["model"] == "poet"

    serve(test, decode=2, allow_runtime_lora_updating=True)


def put_adapter(folder: Path, name: str) -> str:
    (folder / name).mkdir(parents=True)
    (folder / name / "adapter_config.json").write_text('{"r": 2}')
    return str(folder / name)


def test_an_unknown_model_is_looked_up_in_the_folder_of_adapters_and_loaded_once(serve: Serve, tmp_path: Path) -> None:
    path = put_adapter(tmp_path / "adapters", "poet")

    async def test(router: Router) -> None:
        asked = [router.complete(model="poet", prompt=PROMPT, max_tokens=3) for _ in range(4)]
        assert [answer["model"] for answer in await asyncio.gather(*asked)] == ["poet"] * 4
        assert changes(router, "prefill-0") == changes(router, "decode-0") == ["LoadAdapter poet"]
        assert router.fakes["decode-0"].record.adapters[0].path == path

    serve(test, lora_resolver_folder=str(tmp_path / "adapters"))


def test_no_name_of_a_model_leaves_the_folder_of_adapters(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    put_adapter(folder, "inner/nested")
    outside = put_adapter(tmp_path, "outside")

    async def test(router: Router) -> None:
        for name in ("../outside", outside, "..", ".", "inner/nested", "inner", "a\0b", "nobody"):
            answer = await router.http.post("/v1/completions", json={"model": name, "prompt": PROMPT})
            assert answer.status_code in (400, 404), (name, answer.text)
        assert changes(router, "prefill-0") == []

    serve(test, lora_resolver_folder=str(folder))


def test_an_adapter_of_the_folder_that_instances_refuse_is_not_loaded_for_every_request(
    serve: Serve, tmp_path: Path
) -> None:
    path = put_adapter(tmp_path, "huge")

    async def test(router: Router) -> None:
        router.fakes["decode-0"].no_adapters = {path}
        for _ in range(3):
            answer = await router.http.post("/v1/completions", json={"model": "huge", "prompt": PROMPT})
            assert (answer.status_code, "a rank too high" in answer.text) == (400, True)
        assert changes(router, "prefill-0") == ["LoadAdapter huge", "UnloadAdapter huge"]

    serve(test, lora_resolver_folder=str(tmp_path))


def test_the_least_recently_used_adapter_of_the_folder_makes_room_for_another(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_serve.services.router.http.adapter_endpoints.MAX_ADAPTERS", 3)
    for name in ("one", "two", "three"):
        put_adapter(tmp_path, name)

    async def test(router: Router) -> None:
        for instance in ("prefill-0", "decode-0"):
            load(router, instance, adapter("fixed"))
        for name in ("one", "two", "one", "three", "two"):
            assert (await router.complete(model=name, prompt=PROMPT, max_tokens=3))["model"] == name
        assert changes(router, "prefill-0") == [
            "LoadAdapter one",
            "LoadAdapter two",
            "UnloadAdapter two",
            "LoadAdapter three",
            "UnloadAdapter one",
            "LoadAdapter two",
        ]
        assert await adapters(router) == ["fixed", "three", "two"]

    serve(test, lora_resolver_folder=str(tmp_path))
