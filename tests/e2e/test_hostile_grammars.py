"""Grammars that overflowed the router's stack, sent to a cluster: each is refused, and no process ends."""

from typing import Any

import pytest

from tests import grammar_bombs as bombs
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
HOSTILE: dict[str, dict[str, Any]] = {
    "3,000 references": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": bombs.references(3_000)}}
    },
    "6,000 rules": {"guided_grammar": bombs.rules(6_000)},
    "10,000 properties": {"guided_json": bombs.properties(10_000)},
    "seconds of work": {"guided_json": bombs.slow(999_983)},
    "gigabytes": {"guided_regex": bombs.hungry(20_000)},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_grammar_costs_its_own_request_alone(cluster: Cluster, kind: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    refused = cluster.client.post("/v1/chat/completions", json={"messages": messages, **HOSTILE[kind]})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "invalid_grammar"
    answer = cluster.client.post(
        "/v1/chat/completions", json={"messages": messages, "guided_json": SCHEMA, "max_tokens": 30}
    )
    assert answer.status_code == 200, answer.text
    assert "has died" not in cluster.log()


def test_grammars_close_to_the_bounds_are_followed_by_all_instances(cluster: Cluster) -> None:
    for kind in ("references", "objects", "rules", "terminals"):
        grammar = bombs.GRAMMARS[kind](900)  # the router adds rules of its own
        answer = cluster.client.post(
            "/v1/completions", json={"prompt": "a", "guided_grammar": grammar, "max_tokens": 3}
        )
        assert answer.status_code == 200, answer.text
    assert "has died" not in cluster.log()
