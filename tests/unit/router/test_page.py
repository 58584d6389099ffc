"""The page at / and what it reads of the last requests."""

import re

from tests.unit.router.conftest import Router, Serve

HELLO = [{"role": "user", "content": "hello"}]


def test_the_page_is_one_file_that_loads_nothing_else(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        page = await router.http.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"(src|href)=\"(?!data:)", page.text)
        assert not re.search(r"https?://", page.text)
        assert "innerHTML" not in page.text

    serve(scenario)
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
