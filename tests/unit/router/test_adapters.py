"""Adapters: names of their own, blocks of their own, and instances that have them."""

import msgspec

from contracts.identity import InstanceId
from contracts.instance import AdapterRecord
from contracts.messages import Decode, Prefill
from services.router.adapters import most_held
from tests.unit.router.conftest import Router, Serve, settle

PROMPT = "abcdefgh" * 4


def adapter(name: str, fingerprint: str = "") -> AdapterRecord:
    return AdapterRecord(name=name, fingerprint=fingerprint or f"of {name}", path=f"/adapters/{name}")


def load(router: Router, instance: str, *adapters: AdapterRecord) -> None:
    """As a renewed record tells it."""
    fakes, name = router.fakes, InstanceId(instance)
    fakes.registered[name] = msgspec.structs.replace(fakes.registered[name], adapters=list(adapters))
    fakes.on_change()


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
    assert most_held([[old], [new, other], [new]]) == {"clerk": other, "poet": new}
    assert most_held([[old], [new]]) == most_held([[new], [old]])
