"""The pages at / and /docs, and what the first one reads of the last requests."""

import re
from base64 import b64encode
from hashlib import sha256

import httpx

from tests.unit.router.conftest import Router, Serve, settle

HELLO = [{"role": "user", "content": "hello"}]


MAX_ASSET_BYTES = 600_000
"""Bound of what the pages add to each wheel and image."""


def sources(page: httpx.Response) -> dict[str, list[str]]:
    """Return the sources of each directive of a page's Content-Security-Policy."""
    directives = [directive.split() for directive in page.headers["content-security-policy"].split(";")]
    return {name: allowed for name, *allowed in directives}


def hash_source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def test_the_page_is_one_file_that_loads_nothing_else(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        page = await router.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"src=|<link (?!rel=\"icon\" href=\"data:,\")", page.text)
        assert re.findall(r"<a href=\"(.*?)\"", page.text) == ["docs", "metrics"]
        assert not re.search(r"https?://", page.text)
        assert "innerHTML" not in page.text

    serve(scenario)
    serve(scenario, keys=["secret"])


def test_the_policy_of_each_page_allows_its_own_parts_alone(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path in ("/", "/docs"):
            page = await router.http.get(path)
            allowed = sources(page)
            assert allowed["default-src"] == ["'none'"] and allowed["connect-src"] == ["'self'"]
            for tag in ("script", "style"):
                inline = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
                assert allowed[f"{tag}-src"] == ["'self'", *map(hash_source, inline)]
            for directive in ("form-action", "frame-ancestors", "base-uri"):
                assert allowed[directive] == ["'none'"]

    serve(scenario, keys=["secret"])


def test_all_that_the_description_of_the_api_loads_comes_from_this_server(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        page = await router.http.get("/docs")
        assert not re.search(r"https?://", page.text)
        loaded = re.findall(r"<(?:script src|link rel=\"stylesheet\" href)=\"(.*?)\"", page.text)
        assert loaded == ["docs/swagger-ui.css", "docs/swagger-ui.js"]
        assert "validatorUrl: null" in page.text  # the default loads an image of another host
        for path in [*loaded, "openapi.json"]:
            assert (await router.http.get(f"/{path}")).status_code == 200

    serve(scenario, keys=["secret"])


def test_the_files_of_swagger_ui_are_small_and_served_with_and_without_compression(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        total = 0
        for name, kind, start in (("js", "text/javascript", b"/*! For license"), ("css", "text/css", b".swagger-ui")):
            packed = await router.http.get(f"/docs/swagger-ui.{name}", headers={"accept-encoding": "gzip"})
            plain = await router.http.get(f"/docs/swagger-ui.{name}", headers={"accept-encoding": "identity"})
            assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
            assert packed.headers["content-type"].startswith(kind)
            assert packed.content == plain.content and plain.content.startswith(start)
            total += int(packed.headers["content-length"])
        assert total < MAX_ASSET_BYTES

    serve(scenario)


def test_the_cluster_is_shown_only_with_a_key_and_probes_need_none(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await router.http.get("/health", headers=headers)
            assert answer.status_code == 200
            assert answer.json() == {
                "status": "ok",
                "reason": None,
                "pools": {"prefill": 1, "decode": 1, "unified": 0},
                "registry_connected": True,
            }
        for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            shown = (await router.http.get("/health", headers=headers)).json()
            assert [one["instance"] for one in shown["instances"]] == ["decode-0", "prefill-0"]
        router.fakes["decode-0"].die()
        await settle()
        hidden = await router.http.get("/health")
        assert hidden.status_code == 503
        assert hidden.json()["reason"] == "no instance can generate an answer: empty pools are decode, unified"
        shown = (await router.http.get("/health", headers={"authorization": "Bearer secret"})).json()
        assert "decode-0" in shown["reason"]

    serve(scenario, keys=["secret"])


def test_the_last_requests_show_where_their_time_went_and_no_text(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.http.get("/recent")).json() == []
        for max_tokens in (3, 4):
            body = {"messages": HELLO, "max_tokens": max_tokens, "seed": 0}
            await router.http.post("/v1/chat/completions", json=body)
        newest, oldest = (await router.http.get("/recent")).json()
        assert (newest["generated_tokens"], oldest["generated_tokens"]) == (4, 3)
        assert newest["finish_reasons"] == ["length"]
        baton = newest["baton"]
        assert (baton["decision"], baton["prefill"], baton["decode"]) == ("disaggregated", "prefill-0", "decode-0")
        assert (baton["queue_s"], baton["prefill_s"], baton["handoff_exposed_s"]) == (0.25, 0.5, 0.0625)
        assert 0 < baton["tokenize_s"] < baton["e2e_s"]
        assert set(newest) == {"prompt_tokens", "generated_tokens", "finish_reasons", "baton"}

    serve(scenario)


def test_the_owner_of_a_key_sees_only_its_own_last_requests(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for key, max_tokens in (("alice", 3), ("bob", 4)):
            body = {"messages": HELLO, "max_tokens": max_tokens}
            head = {"authorization": f"Bearer {key}"}
            assert (await router.http.post("/v1/chat/completions", json=body, headers=head)).status_code == 200
        for key, tokens in (("alice", [3]), ("bob", [4])):
            found = (await router.http.get("/recent", headers={"authorization": f"Bearer {key}"})).json()
            assert [one["generated_tokens"] for one in found] == tokens

    serve(scenario, keys=["alice", "bob"])


def test_the_last_requests_need_a_key_where_others_do(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.http.get("/recent")).status_code == 401

    serve(scenario, keys=["secret"])
