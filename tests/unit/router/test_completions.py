"""/v1/completions over a fake cluster: shapes, prompts of every kind, and what the engine is asked for."""

from typing import Any

import pytest

from baton_serve.contracts.messages import Decode, Prefill
from tests.unit.router.conftest import Router, Serve

# The text that the fake cluster generates for seed 0: letters 7 apart.
LETTERS = "ahovcjqxelszgnubipwdkryfmt"


def test_a_prompt_is_prefilled_handed_off_and_answered(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello world", max_tokens=6)
        (choice,) = answer["choices"]
        assert choice["text"] == LETTERS[:6]
        assert choice["finish_reason"] == "length"
        assert choice["stop_reason"] is None
        assert choice["logprobs"] is None
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        prompt = router.service.model.tokenizer.encode("hello world", add_special_tokens=True)
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 6,
            "total_tokens": len(prompt) + 6,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        (prefill,) = router.fakes["prefill-0"].assignments()
        (decode,) = router.fakes["decode-0"].assignments()
        assert isinstance(prefill, Prefill) and isinstance(decode, Decode)
        assert prefill.work == decode.work
        assert prefill.work.token_ids == prompt
        assert prefill.ticket == decode.ticket
        assert (decode.ticket.source, decode.ticket.sink) == ("prefill-0", "decode-0")
        assert router.fakes["decode-0"].cancels() == []

    serve(scenario)


def test_streamed_and_whole_answers_are_equal(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "n": 2, "logprobs": 2}
        whole = await router.complete(**body)
        chunks = await router.stream("/v1/completions", **body, stream_options={"include_usage": True})
        for i in range(2):
            mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == i]
            assert "".join(c["text"] for c in mine) == whole["choices"][i]["text"]
            assert mine[-1]["finish_reason"] == whole["choices"][i]["finish_reason"] == "length"
            for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                streamed = [value for c in mine for value in c["logprobs"][field]]
                assert streamed == whole["choices"][i]["logprobs"][field]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert {c["usage"] is None for c in chunks[:-1]} == {True}
        assert whole["choices"][0]["text"] != whole["choices"][1]["text"]

    serve(scenario)


def test_continuous_usage_counts_up(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await router.stream("/v1/completions", prompt="hello", max_tokens=4, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "n": 2}
        chunks = await router.stream("/v1/chat/completions", **body, stream_options=options)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        first = chunks[0]["usage"]
        assert (first["completion_tokens"], first["total_tokens"]) == (0, first["prompt_tokens"]), "as in vLLM"
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 8

    serve(scenario)


def test_several_prompts_are_answered_in_order(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt=["hello", "world"], n=2, max_tokens=3)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert answer["choices"][0]["text"] == answer["choices"][2]["text"] == LETTERS[:3]
        assert answer["usage"]["completion_tokens"] == 12
        ids = await router.complete(prompt=[[104, 105], [106]], max_tokens=2)
        assert ids["usage"]["prompt_tokens"] == 3
        one = await router.complete(prompt=[104, 105], max_tokens=2)
        assert one["usage"]["prompt_tokens"] == 2

    serve(scenario)


def test_a_completion_without_max_tokens_has_sixteen_tokens_and_with_null_may_fill_the_context(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert (await router.complete(prompt=[104] * 200))["usage"]["completion_tokens"] == 16
        assert (await router.complete(prompt=[104] * 250))["usage"]["completion_tokens"] == 6
        assert (await router.complete(prompt=[104] * 200, max_tokens=None))["usage"]["total_tokens"] == 256
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        answer = await router.http.post("/v1/chat/completions", json=chat)
        assert answer.json()["usage"]["total_tokens"] == 256

    serve(scenario)


def test_echo_puts_the_prompt_before_the_answer(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": "hello world", "max_tokens": 3, "echo": True, "logprobs": 1}
        answer = await router.complete(**body)
        (choice,) = answer["choices"]
        assert choice["text"] == "hello world" + LETTERS[:3]
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"][-1] == len(choice["text"]) - 1
        chunks = await router.stream("/v1/completions", **body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
        offsets = [offset for c in chunks for offset in c["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        only = await router.complete(prompt="hello world", max_tokens=0, echo=True)
        assert only["choices"][0]["text"] == "hello world"

    serve(scenario)


def test_a_stop_string_across_tokens_ends_the_text_and_the_work(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello", max_tokens=100, stop=["vcj", "zz"])
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("aho", "stop", "vcj")
        assert answer["usage"]["completion_tokens"] == 6
        kept = await router.complete(prompt="hello", max_tokens=100, stop="vcj", include_stop_str_in_output=True)
        assert kept["choices"][0]["text"] == "ahovcj"
        assert router.fakes["decode-0"].cancels()
        late = await router.complete(prompt="hello", max_tokens=40, min_tokens=8, stop="vcj")
        assert late["choices"][0]["text"] == (LETTERS + LETTERS)[: 26 + 3]

    serve(scenario)


def test_a_stop_token_is_named_and_not_shown(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello", max_tokens=100, stop_token_ids=[ord("v")])
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("aho", "stop", ord("v"))
        assert answer["usage"]["completion_tokens"] == 4

    serve(scenario)


def test_the_end_of_sequence_is_not_named(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.eos = ord("c")
        answer = await router.complete(prompt="hello", max_tokens=100)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ahov", "stop", None)
        through = await router.complete(prompt="hello", max_tokens=7, ignore_eos=True)
        assert through["choices"][0]["text"] == LETTERS[:7]

    serve(scenario)


def test_an_end_with_the_first_token_frees_both_instances(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.eos = ord("a")
        answer = await router.complete(prompt="hello", max_tokens=100)
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert router.fakes["decode-0"].cancels()

    serve(scenario)


def test_one_token_needs_no_handoff(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello", max_tokens=1)
        assert answer["choices"][0]["text"] == "a"
        assert router.fakes["decode-0"].assignments() == []

    serve(scenario)


def test_all_sampling_parameters_reach_the_engine(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        wanted: dict[str, Any] = {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "allowed_token_ids": [97, 98],
            "stop_token_ids": [3],
            "logprobs": 3,
        }
        await router.complete(
            prompt="hello",
            max_tokens=5,
            logit_bias={"97": 1.5},
            priority=-3,
            cache_salt="tenant",
            **wanted | {"seed": 42},
        )
        (prefill,) = router.fakes["prefill-0"].assignments()
        sampling = prefill.work.sampling
        for name, value in wanted.items():
            assert getattr(sampling, name) == value, name
        assert (sampling.seed, sampling.max_tokens, sampling.logit_bias) == (42, 5, {97: 1.5})
        assert prefill.work.priority == -3
        await router.complete(prompt="hello", max_tokens=5)
        assert router.fakes["prefill-0"].assignments()[1].work.root != prefill.work.root

    serve(scenario)


def test_a_seed_is_drawn_when_none_is_given(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        for seed in (None, None, -1):
            await router.complete(prompt="hello", max_tokens=2, seed=seed)
        seeds = [m.work.sampling.seed for m in router.fakes["prefill-0"].assignments()]
        assert len(set(seeds)) == 3

    serve(scenario)


def test_tokens_may_be_written_as_ids(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt="hello", max_tokens=2, logprobs=0, return_tokens_as_token_ids=True)
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:104"]

    serve(scenario)


def test_alternatives_may_be_named(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(prompt="hello", max_tokens=2, logprobs=3, logprob_token_ids=[98, 97])
        messages = [{"role": "user", "content": "hello"}]
        body = {"messages": messages, "max_tokens": 2, "logprobs": True, "logprob_token_ids": [98, 97]}
        assert (await router.http.post("/v1/chat/completions", json=body)).status_code == 200
        for message in router.fakes["prefill-0"].assignments():
            sampling = message.work.sampling
            assert (sampling.logprob_token_ids, sampling.logprobs) == ([98, 97], 0), "they replace the most likely ones"

    serve(scenario)


def test_all_alternatives_may_be_asked_for_if_the_server_allows_as_many(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        vocab_size = router.service.limits().vocab_size
        await router.complete(prompt="hello", max_tokens=1, logprobs=-1, prompt_logprobs=-1)
        sampling = router.fakes["prefill-0"].assignments()[-1].work.sampling
        assert (sampling.logprobs, sampling.prompt_logprobs) == (vocab_size, vocab_size)

    serve(scenario, max_logprobs=1_000_000)


def test_truncation_keeps_the_last_tokens_or_the_first(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        long = "ab" + "c" * 300
        for prompt, more, kept in (
            (list(range(100, 160)), {"truncate_prompt_tokens": 3}, [157, 158, 159]),
            (list(range(100, 160)), {"truncate_prompt_tokens": 3, "truncation_side": "left"}, [157, 158, 159]),
            (list(range(100, 160)), {"truncate_prompt_tokens": 3, "truncation_side": "right"}, [100, 101, 102]),
            (list(range(100, 160)), {"truncate_prompt_tokens": 0}, list(range(100, 160))),
            (long, {"truncate_prompt_tokens": 3, "truncation_side": "right"}, [97, 98, 99]),
            (long, {"truncate_prompt_tokens": -1}, [99] * 254),
            (long, {"truncate_prompt_tokens": -1, "max_tokens": 50}, [99] * 206),
        ):
            await router.complete(**{"prompt": prompt, "max_tokens": 2, **more})
            assert router.fakes["prefill-0"].assignments()[-1].work.token_ids == kept, more
        messages = [{"role": "user", "content": "c" * 300}]
        body = {"messages": messages, "truncate_prompt_tokens": -1, "max_completion_tokens": 50}
        answer = await router.http.post("/v1/chat/completions", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == 206

    serve(scenario)


@pytest.mark.parametrize(
    ("more", "num_answers"), [({"prompt_logprobs": 20}, 1), ({"echo": True, "logprobs": 20, "n": 2}, 2)]
)
def test_the_logprobs_of_prompts_are_counted_before_they_are_computed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], num_answers: int
) -> None:
    limit = 60 * 21 * 4 * num_answers
    monkeypatch.setattr("baton_serve.services.router.text.sampling_params.MAX_LOGPROBS", limit)

    async def scenario(router: Router) -> None:
        for num_prompts, status in ((4, 200), (5, 400)):
            body = {"prompt": [[97] * 60] * num_prompts, "max_tokens": 1, **more}
            answer = await router.http.post("/v1/completions", json=body)
            assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == "prompt_logprobs"

    serve(scenario)


def test_many_logprobs_of_an_answer_are_formatted_beside_the_event_loop_and_bounded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "logprobs": 20, "n": 3}
        whole = await router.complete(**body)
        assert [len(choice["logprobs"]["tokens"]) for choice in whole["choices"]] == [40] * 3
        monkeypatch.setattr("baton_serve.services.router.api.answer_writer._LOGPROBS_INLINE", 10**6)
        inline = await router.complete(**body)
        assert inline["choices"] == whole["choices"]
        monkeypatch.setattr("baton_serve.services.router.text.sampling_params.MAX_LOGPROBS", 2000)
        refused = await router.http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "stream it" in refused.json()["error"]["message"]
        assert len(await router.stream("/v1/completions", **body)) > 40

    serve(scenario)


def test_prompt_logprobs_come_with_the_answer(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.complete(prompt=[104, 105], max_tokens=2, prompt_logprobs=1)
        first, second = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert second["105"] == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}

    serve(scenario)


@pytest.mark.parametrize("asked", [False, True])
def test_a_prompt_is_logged_only_where_that_was_asked_for(
    serve: Serve, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    async def scenario(router: Router) -> None:
        await router.complete(prompt="hello hello hello", max_tokens=2)

    with caplog.at_level("DEBUG"):
        serve(scenario, enable_log_requests=asked, max_log_len=7)
    prompts = [vars(record)["prompt"] for record in caplog.records if "prompt" in vars(record)]
    assert prompts == (["hello h"] if asked else [])
    assert asked or "hello" not in str([vars(record) for record in caplog.records])
