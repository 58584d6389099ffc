import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.quota.api_keys import RECHECK_S, ApiKeys
from baton_serve.services.router.quota.usage_limits import UsageLedger, WindowUsage
from tests.unit.router.conftest import Router, Serve

NOW = 86_400.0 * 20_000 + 90
CALLER = Caller(name="a", requests_per_minute=2, tokens_per_minute=100, tokens_per_day=150)


def test_requests_of_a_minute_are_counted_and_the_next_minute_begins_anew() -> None:
    ledger = UsageLedger()
    assert ledger.admit(CALLER, tokens=1, now=NOW) is None
    assert ledger.admit(CALLER, tokens=1, now=NOW + 1) is None
    over = ledger.admit(CALLER, tokens=1, now=NOW + 10)
    assert over is not None and over.retry_after_s == pytest.approx(20.0) and "2 requests per minute" in over.message
    assert ledger.admit(Caller(name="b", requests_per_minute=1), tokens=1, now=NOW + 10) is None
    assert ledger.admit(CALLER, tokens=1, now=NOW + 30) is None


def test_generated_tokens_count_too_and_a_day_is_longer_than_a_minute() -> None:
    ledger = UsageLedger()
    assert ledger.admit(CALLER, tokens=60, now=NOW) is None
    ledger.add(CALLER, tokens=40, now=NOW)
    over = ledger.admit(CALLER, tokens=1, now=NOW)
    assert over is not None and "100 tokens per minute" in over.message
    assert ledger.admit(CALLER, tokens=50, now=NOW + 60) is None
    over = ledger.admit(CALLER, tokens=1, now=NOW + 120)
    assert over is not None and "150 tokens per day" in over.message and over.retry_after_s > 80_000


def test_two_routers_count_together_and_nothing_twice() -> None:
    one, two = UsageLedger(), UsageLedger()
    assert one.admit(CALLER, tokens=30, now=NOW) is None
    assert two.admit(CALLER, tokens=20, now=NOW) is None
    for _ in range(3):
        one.merge_others(two.own(NOW))
        two.merge_others(one.own(NOW))
    for ledger in (one, two):
        assert [(u.requests, u.tokens) for u in ledger.used(CALLER, NOW)] == [(2, 50), (2, 50)]
        assert ledger.admit(CALLER, tokens=1, now=NOW) is not None


def test_a_store_that_was_emptied_makes_nobody_forget() -> None:
    ledger = UsageLedger()
    assert ledger.admit(CALLER, tokens=30, now=NOW) is None
    minute, day = ledger.own(NOW)
    ledger.merge_others([WindowUsage(minute.window, 1, 10)])
    ledger.merge_others([WindowUsage(minute.window, 0, 0)])
    assert [u.requests for u in ledger.used(CALLER, NOW)] == [2, 1]
    assert ledger.own(NOW + 3 * 86_400) == [], "old windows are forgotten"
    assert day.window.span_s == 86_400


def write(file: Path, text: str, at: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(at, at))


def test_keys_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "keys"
    write(file, "old\n", 1)
    keys = ApiKeys(file=str(file), clock=lambda: now)
    assert keys.caller("Bearer old") is not None
    write(file, "old\nnew name=team-a tokens_per_minute=5 weight=2\n", 2)
    assert keys.caller("Bearer new") is None, "looked at a moment ago"
    now = RECHECK_S
    caller = keys.caller("Bearer new")
    assert caller is not None and caller.cache_salt
    assert replace(caller, cache_salt="") == Caller(name="team-a", tokens_per_minute=5, weight=2.0, is_operator=False)
    write(file, "new tokens_per_minute=many\n", 3)
    now = 2 * RECHECK_S
    assert keys.caller("Bearer old") is not None, "a broken file changes nothing"
    file.unlink()
    now = 3 * RECHECK_S
    assert keys.caller("Bearer old") is not None
    write(file, "new\n", 4)
    now = 4 * RECHECK_S
    assert keys.caller("Bearer old") is None and keys.caller("bearer new") is not None
    assert keys.caller("Basic new") is None and keys.caller(None) is None


@pytest.mark.parametrize(
    "line", ["k tokens_per_day=-1", "k weight=0", "k weight=x", "k colour=red", "k word", "k cache_group="]
)
def test_a_line_that_says_nonsense_stops_the_start(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(line)
    with pytest.raises(ConfigurationError, match="line 1"):
        ApiKeys(file=str(tmp_path / "keys"))


def test_a_key_over_its_limit_gets_a_retry_after_header(serve: Serve) -> None:
    async def test(router: Router) -> None:
        body = {"prompt": "abcd", "max_tokens": 2}
        router.app.keys = ApiKeys(["one", "two"], defaults=Caller(requests_per_minute=1))
        statuses = []
        for key in ("one", "one", "two"):
            answer = await router.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            statuses.append(answer.status_code)
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert statuses == [200, 429, 200]

    serve(test)
