"""Values that no message, tensor or stack can carry, in every field: no answer is a 500, and nothing stays behind.

Integers of 30 or 4,000 digits, infinities, half a character, JSON nested deep: each is refused, or has no effect.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from baton_serve.services.router.text.served_model import ServedModel
from tests.contract.api import test_every_field as fields
from tests.unit.router.conftest import Router, Serve, settle

HUGE = "1" + 30 * "0"
VALUES = {
    "an integer of 31 digits": HUGE,
    "a negative one": f"-{HUGE}",
    "one of 4001 digits": "1" + 4000 * "0",
    "one of 64 bits": str(2**63),
    "infinity": "1e400",
    "NaN": "NaN",
    "a boolean": "true",
    "half a character": '"\\ud800"',
    "half a character in a text of JSON": json.dumps('{"type": "\\ud800"}'),
    "lists, 190 deep": 190 * "[" + 190 * "]",
    "objects, 190 deep": 190 * '{"type":' + "1" + 190 * "}",
    "lists, 100,000 deep": 100_000 * "[" + 100_000 * "]",
    "a text of lists, 100,000 deep": json.dumps(100_000 * "[" + 100_000 * "]"),
    "a list of such integers": f"[{HUGE}]",
    "a list of lists of them": f"[[{HUGE}]]",
    "an object of one": f'{{"type":{HUGE},"97":{HUGE},"schema":{HUGE}}}',
    "a key of 5,000 digits": f'{{"{5000 * "9"}":1}}',
    "a schema with such limits": f'{{"type":"json_schema","json_schema":{{"schema":{{"maxItems":{HUGE}}}}}}}',
    "a schema that is nested deep": 180 * '{"type":"object","properties":{"a":' + "true" + 180 * "}}",
}
PATHS = [path for paths, _ in fields.GROUPS for path in paths if path not in ("/v1/score", "/v1/rerank", "/v2/rerank")]
POOLING = {path: pooling for paths, pooling in fields.GROUPS for path in paths}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fields.make_folder(tmp_path_factory.mktemp("hostile") / "tiny")


@pytest.fixture(scope="session")
def model(model_folder: Path) -> ServedModel:
    return fields.make_model(model_folder)


def body(base: dict[str, Any], name: str, value: str) -> bytes:
    return json.dumps(base | {name: "@value@"}).replace('"@value@"', value).encode()


async def post(router: Router, path: str, content: bytes) -> tuple[int, str]:
    answer = await router.http.post(path, content=content, headers={"content-type": "application/json"})
    return answer.status_code, answer.text


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("path", PATHS)
def test_no_value_of_any_field_is_an_error_of_the_server(serve: Serve, path: str, kind: str) -> None:
    async def scenario(router: Router) -> None:
        wrong: list[str] = []
        for name, stated in (fields.FIELDS[path] | fields.NO_EFFECT.get(path, {})).items():
            given = stated if isinstance(stated, fields.Given) else fields.Given(stated)
            base = {key: value for key, value in (fields.BASES[path] | given.beside).items() if value is not None}
            status, text = await post(router, path, body(base, name, VALUES[kind]))
            if status not in (200, 400, 404) or '"server_error"' in text:
                wrong.append(f"{name}: {status} {text[:200]}")
        assert not wrong
        await settle()
        router.check_idle()
        assert (await router.http.get("/health")).status_code == 200
        status, text = await post(router, path, json.dumps(fields.BASES[path]).encode())
        assert status == 200, text

    pooling = POOLING[path]
    serve(scenario, pooling=pooling, **fields.FLAGS, **({} if pooling is None else {"decode": 0}))


DEEP = 10_000 * '{"a":' + "1" + 10_000 * "}"
"""No more objects than a request may have."""
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "@value@"}}
WITHIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "arguments of a call": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]},
        json.dumps(DEEP),
    ),
    "arguments of an input item": (
        "/v1/responses",
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "@value@"}]},
        json.dumps(DEEP),
    ),
    "a schema as a text": (
        "/v1/chat/completions",
        {"messages": fields.HELLO, "guided_json": "@value@"},
        json.dumps(DEEP),
    ),
    "two schemas as texts": (
        "/v1/completions",
        {"prompt": "a", "guided_json": {"type": "object"}, "json_schema": "@value@"},
        json.dumps(DEEP),
    ),
    "parameters within a namespace": (
        "/v1/responses",
        {
            "input": "a",
            "tools": [
                {
                    "type": "namespace",
                    "name": "n",
                    "tools": [{"type": "function", "name": "f", "parameters": "@value@"}],
                }
            ],
        },
        DEEP,
    ),
    "the form of a message": (
        "/v1/messages",
        {
            "messages": fields.HELLO,
            "max_tokens": 5,
            "output_config": {"format": {"type": "json_schema", "schema": "@value@"}},
        },
        DEEP,
    ),
    "a structural tag as a text": (
        "/v1/completions",
        {"prompt": "a", "structured_outputs": {"structural_tag": "@value@"}},
        json.dumps(DEEP),
    ),
    "a tool's parameters": (
        "/v1/chat/completions",
        {"messages": fields.HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": "@value@"}}]},
        DEEP,
    ),
    "input of a block": (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "@value@"}]}
            ],
            "max_tokens": 5,
        },
        DEEP,
    ),
    "metadata": ("/v1/completions", {"prompt": "a", "metadata": "@value@"}, DEEP),
    "any request": ("/invocations", {"prompt": "a", "metadata": "@value@"}, DEEP),
}


@pytest.mark.parametrize("where", WITHIN)
def test_json_that_is_nested_10000_deep_is_refused_wherever_it_stands(serve: Serve, where: str) -> None:
    async def scenario(router: Router) -> None:
        path, base, value = WITHIN[where]
        status, text = await post(router, path, json.dumps(base).replace('"@value@"', value).encode())
        assert status == 400, text
        assert "recursion" in text or "200 levels" in text

    serve(scenario, **fields.FLAGS)


@pytest.mark.parametrize("depth", [1, 100, 190])
def test_json_that_is_nested_less_deep_is_read(serve: Serve, depth: int) -> None:
    async def scenario(router: Router) -> None:
        path, base, _ = WITHIN["arguments of a call"]
        value = json.dumps(depth * '{"a":' + "1" + depth * "}")
        status, text = await post(router, path, json.dumps(base).replace('"@value@"', value).encode())
        assert status == 200, text

    serve(scenario)


@pytest.mark.parametrize("value", ["1e400", "-1e400", "nan", "1e-320", "0", HUGE, "1" + 4000 * "0"])
@pytest.mark.parametrize("name", ["x-baton-itl-ms", "x-baton-ttft-ms"])
def test_an_slo_has_bounds_too(serve: Serve, name: str, value: str) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post("/v1/completions", json={"prompt": "a"}, headers={name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name

    serve(scenario)
