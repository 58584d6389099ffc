"""The list of instances that `baton rotate` reads from a router, with and without API keys."""

import asyncio

import httpx
import pytest

from baton_serve.services.rotate.admin_client import AdminRequestError, RouterSource

INSTANCE = {"instance": "decode-0", "generation": 7, "role": "decode", "http_address": "10.0.0.1:7004"}


def names(api_key: str | None) -> list[str]:
    """Return the instances that a router with the API key "secret" lists."""

    def answer(request: httpx.Request) -> httpx.Response:
        body: dict[str, object] = {"status": "ok", "pools": {"decode": 1}}
        if request.headers.get("authorization") == "Bearer secret":
            body["instances"] = [{**INSTANCE, "draining": False}]
        return httpx.Response(200, json=body)

    async def read() -> list[str]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            source = RouterSource(client, "http://router:8000/", api_key)
            return [one.instance for one in await source.instances()]

    return asyncio.run(read())


def test_a_router_with_keys_lists_its_instances_to_a_client_with_one() -> None:
    assert names("secret") == ["decode-0"]


@pytest.mark.parametrize("api_key", [None, "wrong"])
def test_without_a_valid_key_the_error_names_the_remedies(api_key: str | None) -> None:
    with pytest.raises(AdminRequestError, match=r"http://router:8000 lists .*--api-key, or the registry as --registry"):
        names(api_key)
