"""Errors as clients see them: OpenAI's shape, the right status, the cause by name, nothing internal."""

import json
from typing import Any

import pytest

from baton_serve.contracts.instance import Load
from tests.unit.router.conftest import Router, Serve, settle
from tests.unit.router.fakes import record

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

BAD: list[tuple[str, Any, str | None, str]] = [
    (COMPLETIONS, "{not json", None, "JSON"),
    (COMPLETIONS, "", None, "JSON"),
    (COMPLETIONS, [1, 2], None, "object"),
    (COMPLETIONS, {}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "string"),
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [1, -1]}, "prompt", "-1"),
    (COMPLETIONS, {"prompt": [9_999_999]}, "prompt", "9999999"),
    (COMPLETIONS, {"prompt": [104] * 256}, "prompt", "256 tokens"),
    (COMPLETIONS, {"prompt": "a " * 100_000}, None, "256 tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 256}, "max_tokens", "256 tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p", "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "top_k"),
    (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p", "min_p"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "presence_penalty"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "n"),
    (COMPLETIONS, {"prompt": "a", "n": 1000}, "n", "limit"),
    (COMPLETIONS, {"prompt": "a", "best_of": 1, "n": 2}, "best_of", "best_of"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "limit is 20"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"97": 101}}, "logit_bias", "100"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [-5]}, "stop_token_ids", "-5"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, "stop", "64"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 300}, "truncate_prompt_tokens", "256"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "limit is 20"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -2}, "prompt_logprobs", "-1"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs", "limit is 20"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "limit is 20"),
    (COMPLETIONS, {"prompt": "a", "logprob_token_ids": [97]}, "logprob_token_ids", "needs logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": []}, "logprob_token_ids", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [-1]}, "logprob_token_ids", "-1"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": list(range(21))}, "logprob_token_ids", "20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 0, "logprob_token_ids": [97], "use_beam_search": True},
     "logprob_token_ids", "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "seed": "x"}, "seed", "seed"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "top_p": 0.5}, "top_p", "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {"type": "thing"}}, "guided_json", "thing"),
    (COMPLETIONS, {"prompt": "a", "stream_options": 5}, "stream_options", "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (CHAT, {"messages": HELLO, "stream": False, "stream_options": {"include_usage": True}},
     "stream_options", "stream: true"),
    (COMPLETIONS, {"prompt": "a", "temperature": 3}, "temperature", "less than or equal to 2"),
    (CHAT, {"messages": HELLO, "temperature": 2.1}, "temperature", "less than or equal to 2"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages", "content"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages", "content"),
    (CHAT, {}, "messages", "messages"),
    (CHAT, {"messages": []}, "messages", "messages"),
    (CHAT, {"messages": "hi"}, "messages", "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages", "role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "limit is 20"),
    (CHAT, {"messages": HELLO, "logprobs": 2}, "logprobs", "logprobs"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format", "yaml"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "tool_choice"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities", "modalities"),
    (CHAT, {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", "exclude"),
    ("/tokenize", {}, "prompt", "prompt"),
    ("/detokenize", {"tokens": ["a"]}, "tokens", "tokens"),
]  # fmt: skip


def test_bad_requests_are_400_and_name_their_cause(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for path, body, param, named in BAD:
            content = body if isinstance(body, str) else json.dumps(body)
            answer = await router.http.post(path, content=content, headers={"content-type": "application/json"})
            case = f"{path} {str(body)[:80]}: {answer.text[:300]}"
            assert answer.status_code == 400, case
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, case
            assert error["type"] == "invalid_request_error", case
            assert error["param"] == param, case
            assert named in error["message"], case
            assert "Traceback" not in answer.text, case
        assert (await router.complete(prompt="hello", max_tokens=2))["choices"]

    serve(scenario)


def test_help_with_transfers_is_not_needed_and_the_log_says_so(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(router: Router) -> None:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = await router.complete(prompt="hello", max_tokens=2, kv_transfer_params=params)
        assert answer["kv_transfer_params"] is None
        assert "ignoring kv_transfer_params of a request: the router plans" in caplog.text

    with caplog.at_level("INFO"):
        serve(scenario)


@pytest.mark.parametrize(
    "extra",
    [
        {"suffix": None},
        {"suffix": ""},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"best_of": 1},
        {"response_format": {"type": "text"}},
        {"unknown_to_all": 5},
        {"user": "me"},
        {"metadata": {"run": "7"}},
        {"top_k": 0},
        {"logit_bias": None},
    ],
    ids=str,
)
def test_parameters_that_ask_for_nothing_are_accepted(serve: Serve, extra: dict[str, Any]) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.complete(prompt="hello", max_tokens=2, **extra))["choices"]

    serve(scenario)


def test_unknown_models_paths_and_methods(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(COMPLETIONS, json={"model": "other", "prompt": "a"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "other" in error["message"] and "tiny" in error["message"]
        nowhere = await router.http.get("/v1/nowhere")
        assert (nowhere.status_code, "error" in nowhere.json()) == (404, True)
        assert (await router.http.get(CHAT)).status_code == 405

    serve(scenario)


def test_a_body_over_the_limit_is_413(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(COMPLETIONS, json={"prompt": "x" * 5000})
        assert answer.status_code == 413
        assert "2000 bytes" in answer.json()["error"]["message"]

    serve(scenario, max_request_bytes=2000)


def test_keys_are_asked_for_except_where_probes_look(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"prompt": "hello", "max_tokens": 2}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}, {"authorization": ""}):
            refused = await router.http.post(COMPLETIONS, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await router.http.get("/v1/models")).status_code == 401
        for key in ("right", "also"):
            accepted = await router.http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
            assert accepted.status_code == 200
        for path in ("/health", "/ping", "/metrics"):
            assert (await router.http.get(path)).status_code == 200

    serve(scenario, keys=["right", "also"])


def test_too_many_at_once_is_429_with_a_time_to_try_again(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "max_tokens": 2})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await router.complete(prompt=["a", "b"], max_tokens=2))["choices"]

    serve(scenario, max_concurrent_requests=2)


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (1, 0)])
def test_an_empty_pool_is_503_and_named(serve: Serve, prefill: int, decode: int) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5})
        assert answer.status_code == 503
        assert "decode" in answer.json()["error"]["message"]
        health = await router.http.get("/health")
        assert health.status_code == 503
        assert "decode" in health.json()["reason"]

    serve(scenario, prefill=prefill, decode=decode)


def test_what_no_cache_can_hold_is_400(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.add(record("decode-0", "decode", load=Load(free_blocks=3, total_blocks=3)))
        await settle()
        answer = await router.http.post(COMPLETIONS, json={"prompt": [104] * 40, "max_tokens": 5})
        assert answer.status_code == 400
        assert "12" in answer.json()["error"]["message"]

    serve(scenario, prefill=0, decode=0)


def test_an_error_of_an_instance_that_replays_cannot_mend(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        expected = {"invalid": 400, "too_long": 400, "timeout": 504, "draining": 503, "handoff_failed": 503}
        for code, status in expected.items():
            for instance in router.fakes.instances.values():
                instance.refuses = code  # type: ignore[assignment]
            answer = await router.http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5})
            assert answer.status_code == status, (code, answer.text)
            await settle()
            router.check_idle()
        for instance in router.fakes.instances.values():
            instance.refuses = None
        assert (await router.complete(prompt="hello", max_tokens=2))["choices"]

    serve(scenario, max_replays=2)


def test_internal_errors_are_logged_and_not_sent_to_clients(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(router: Router) -> None:
        def broken(*args: object, **kwargs: object) -> None:
            raise ZeroDivisionError("secret detail")

        monkeypatch.setattr(router.dispatcher, "submit", broken)
        answer = await router.http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5})
        assert answer.status_code == 500
        assert "secret" not in answer.text

    serve(scenario)
