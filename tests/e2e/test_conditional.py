"""With an ITL SLO, a decode instance computes prompts that would wait for prefill, in real processes."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow
AT_ONCE = 8
SLO_HEADERS = {"x-baton-itl-ms": "60000"}
"""An SLO that is met however busy the machine is."""


class RefusedError(Exception):
    """The router refused the request, because it cannot meet the SLO."""


def ask(
    cluster: Cluster, number: int, headers: dict[str, str], max_tokens: int = 20
) -> tuple[list[int], dict[str, Any]]:
    """Tokens of the answer, and what became of the request. Raises `RefusedError`.

    Numbers less than 200 have prompts of their own; what another test has asked for is cached, and read by decode."""
    body = {
        "prompt": [7 + (13 * i + 31 * number * i + number) % 200 for i in range(1500)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }
    answer = cluster.client.post("/v1/completions", json=body, headers={"x-baton-explain": "1", **headers})
    if answer.status_code == 429:
        raise RefusedError(answer.text)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    tokens = [int(token.removeprefix("token_id:")) for token in found["choices"][0]["logprobs"]["tokens"]]
    return tokens, found["baton"]


def ask_together(cluster: Cluster, first: int, headers: dict[str, str]) -> list[tuple[list[int], dict[str, Any]]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda number: ask(cluster, number, headers), range(first, first + AT_ONCE)))


def test_with_an_itl_slo_the_decode_instance_computes_prompts_that_would_wait(cluster: Cluster) -> None:
    ask(cluster, 90, {})  # how fast prefill reads is known then, and decode, which has read nothing, may be as fast
    with_slo = ask_together(cluster, 0, SLO_HEADERS)
    assert {reported["decision"] for _, reported in with_slo} == {"disaggregated", "decode_only"}
    here = [reported for _, reported in with_slo if reported["decision"] == "decode_only"]
    assert all(
        reported["prefill"] is None and reported["predicted_ttft_s"] < reported["other_ttft_s"] for reported in here
    )
    plain = ask_together(cluster, 100, {})
    assert {reported["decision"] for _, reported in plain} == {"disaggregated"}
    assert all("other_ttft_s" not in reported for _, reported in plain)
    alone = [ask(cluster, number, {})[0] for number in range(AT_ONCE)]
    assert [tokens for tokens, _ in with_slo] == alone


def test_a_first_token_that_waits_for_the_second_changes_no_answer(cluster: Cluster) -> None:
    """The ITL SLO is little more than a decode step, and the gap after a handed-off first token is longer. Prompts are
    handed off, because a TTFT SLO requires it."""
    reported = ask(cluster, 30, {})[1]
    found: dict[int, tuple[list[int], dict[str, Any]]] = {}
    for number, factor in enumerate((1.5, 2.0, 2.5, 3.0, 4.0), start=31):
        slo = {"x-baton-itl-ms": str(factor * reported["predicted_itl_s"] * 1e3), "x-baton-ttft-ms": "600000"}
        with suppress(RefusedError):  # steps are predicted to be longer by now
            found[number] = ask(cluster, number, slo)
    assert {reported["decision"] for _, reported in found.values()} == {"disaggregated"}
    held = [reported for _, reported in found.values() if "held_s" in reported]
    assert held and all(0 < reported["held_s"] <= reported["ttft_s"] for reported in held)
    for number, (tokens, _) in found.items():
        assert tokens == ask(cluster, number, {})[0]
