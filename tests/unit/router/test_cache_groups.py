"""Requests with API keys of different owners get different block hashes, so that they cannot share cached prefixes."""

from pathlib import Path
from typing import Any

import pytest

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.identity import BlockHash
from baton_serve.contracts.messages import Prefill
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.main import api_keys
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.quota.api_keys import RECHECK_S, ApiKeys, CacheSharing
from baton_serve.services.router.requests.prompt_request import PromptBlockHashes
from baton_serve.services.router.settings import RouterSettings
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.fakes import LAYOUT

PROMPT = [104] * 40
MESSAGES = [{"role": "user", "content": "hello"}]
GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
    "several prompts": ("/v1/completions", {"prompt": [PROMPT, PROMPT], "max_tokens": 4}),
    "best_of": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "best_of": 2}),
    "beam search": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "n": 2, "use_beam_search": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}),
}


def of_file(tmp_path: Path, *lines: str, sharing: CacheSharing = "per-key", **settings: Any) -> ApiKeys:
    (tmp_path / "keys").write_text("\n".join(lines))
    return ApiKeys(file=str(tmp_path / "keys"), sharing=sharing, **settings)


def salt(keys: ApiKeys, key: str) -> str:
    caller = keys.caller(f"Bearer {key}")
    assert caller is not None
    return caller.cache_salt


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def roots(router: Router, path: str, body: dict[str, Any], key: str) -> set[BlockHash]:
    """Root hashes of the messages that a request causes at the prefill instance."""
    prefill = router.fakes["prefill-0"]
    before = len(prefill.assignments())
    answer = await router.http.post(path, json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    found = {message.work.root for message in prefill.assignments()[before:] if isinstance(message, Prefill)}
    assert found, "the prefill instance got no prompt"
    return found


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_generation_api_separates_the_owners_of_keys(serve: Serve, name: str) -> None:
    path, body = GENERATIONS[name]

    async def separate(router: Router) -> None:
        (one,) = await roots(router, path, body, "one")
        (two,) = await roots(router, path, body, "two")
        assert one != two
        assert await roots(router, path, body, "one") == {one}

    serve(separate, keys=["one", "two"])


def test_a_requests_own_salt_is_mixed_with_that_of_its_key(serve: Serve) -> None:
    async def mixed(router: Router) -> None:
        path, body = GENERATIONS["completions"]
        found = [
            await roots(router, path, body | salts, key)
            for key in ("one", "two")
            for salts in ({}, {"cache_salt": "x"}, {"cache_salt": "y"})
        ]
        assert len(set.union(*found)) == 6
        assert await roots(router, path, body | {"cache_salt": "x"}, "one") == found[1]

    serve(mixed, keys=["one", "two"])


@pytest.mark.parametrize("keys", [[], ["one"]])
def test_with_one_key_or_none_the_block_hashes_are_those_of_the_request(serve: Serve, keys: list[str]) -> None:
    async def unsalted(router: Router) -> None:
        path, body = GENERATIONS["completions"]
        for own in ("", "x"):
            expected = PromptBlockHashes(PROMPT, own).root(LAYOUT)
            assert await roots(router, path, body | ({"cache_salt": own} if own else {}), "one") == {expected}

    serve(unsalted, keys=keys)


def test_placement_does_not_find_blocks_of_another_key(serve: Serve) -> None:
    async def placed(router: Router) -> None:
        path, body = GENERATIONS["completions"]
        # The root hash does not depend on the prompt, so another prompt shows it without leaving blocks of this one.
        (one,) = await roots(router, path, body | {"prompt": [105] * 40}, "one")
        (two,) = await roots(router, path, body | {"prompt": [105] * 40}, "two")
        assert holders(router, one) == holders(router, two) == set()
        await roots(router, path, body, "one")
        router.fakes["prefill-0"].store(hash_blocks(one, PROMPT, LAYOUT.block_tokens))
        assert "prefill-0" in holders(router, one)
        assert holders(router, two) == set()

    serve(placed, keys=["one", "two"])


def holders(router: Router, root: BlockHash) -> set[str]:
    """Instances where placement finds a cached prefix of PROMPT."""
    hashes = hash_blocks(root, PROMPT, LAYOUT.block_tokens)
    view = router.cluster.view(lambda _: hashes)
    return {one.instance for one in view.candidates if one.cached_tokens or one.held_tokens}


def test_keys_of_one_name_or_one_cache_group_share_cached_prefixes(tmp_path: Path) -> None:
    keys = of_file(
        tmp_path,
        "a name=alice",
        "b name=alice",
        "c name=carol cache_group=alice",
        "d name=dave",
        "e",
        "f cache_group=e",
    )
    assert salt(keys, "a") == salt(keys, "b") == salt(keys, "c")
    assert len({salt(keys, key) for key in "adef"}) == 4


def test_keys_that_all_belong_to_one_owner_get_no_salt(tmp_path: Path) -> None:
    keys = of_file(tmp_path, "a name=alice", "b name=alice")
    assert salt(keys, "a") == salt(keys, "b") == ""


def test_a_salt_is_the_same_on_every_router_and_reveals_no_key(tmp_path: Path) -> None:
    keys = of_file(tmp_path, "sk-hush", "sk-hush-2 name=alice")
    # Written out, because cached blocks outlive routers: another release must derive the same salts.
    assert salt(keys, "sk-hush-2") == "72ac4411f7db028e45e7d81b52efe284"
    assert salt(keys, "sk-hush") == "01f8667a7e71d5593814c0b48b8975b6"


def test_a_reload_of_the_file_salts_the_keys_anew(tmp_path: Path) -> None:
    now = 0.0
    keys = of_file(tmp_path, "a", clock=lambda: now)
    assert salt(keys, "a") == ""
    (tmp_path / "keys").write_text("a\nb\n")
    now = RECHECK_S
    assert salt(keys, "b") != salt(keys, "a") != ""


def test_all_callers_share_cached_prefixes_if_the_setting_says_so(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb name=bob cache_group=b\n")
    settings = RouterSettings(model="m", api_key=["c"], api_key_file=str(tmp_path / "keys"), prefix_cache_sharing="all")
    assert {salt(api_keys(settings), key) for key in "abc"} == {""}
    isolated = RouterSettings(model="m", api_key=["c"], api_key_file=str(tmp_path / "keys"))
    assert len({salt(api_keys(isolated), key) for key in "abc"}) == 3


def test_a_cache_group_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 1: cache_group needs a name"):
        of_file(tmp_path, "a cache_group=")


def test_no_choice_of_a_requests_salt_makes_it_that_of_another_group() -> None:
    one, two = Caller(cache_salt="1" * 32), Caller(cache_salt="2" * 32)
    guesses = [None, "2" * 32, f"{'2' * 32}:", ":", two.salt_of(None), two.salt_of("x")]
    assert {one.salt_of(guess) for guess in guesses}.isdisjoint({two.salt_of(guess) for guess in guesses})
