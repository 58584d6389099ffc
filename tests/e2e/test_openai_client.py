"""The official OpenAI client against a real cluster."""

from collections.abc import Iterator
from typing import Any, cast

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.slow


class Opinion(BaseModel):
    is_good: bool


QUESTION = [{"role": "user", "content": "Tell me about blocks and batons, please, and take your time."}]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="secret", max_retries=0) as connected:
        yield connected


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    assert {model.object for model in client.models.list().data} == {"model"}


def test_chat_streamed_equals_chat_at_once(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    common = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**common)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    streamed = chunks[-1].usage
    assert streamed is not None
    assert (streamed.prompt_tokens, streamed.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_streamed_equal_completions_at_once(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    common = {"model": model, "prompt": "once upon a time", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**common)  # type: ignore[call-overload]
    text = "".join(c.choices[0].text for c in client.completions.create(**common, stream=True))  # type: ignore[call-overload]
    assert text == whole.choices[0].text


def test_responses_streamed_equal_responses_at_once(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    common = {"model": model, "input": QUESTION[0]["content"], "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**common)  # type: ignore[call-overload]
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    assert whole.output_text == chat.choices[0].message.content
    events = list(client.responses.create(**common, stream=True))  # type: ignore[call-overload]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_anthropics_client_gets_the_same_answer(client: openai.OpenAI, cluster: Cluster) -> None:
    model = client.models.list().data[0].id
    chat = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    body: Any = {"model": model, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=cluster.url, api_key="secret", max_retries=0) as other:
        whole = other.messages.create(**body)
        with other.messages.stream(**body) as events:
            streamed = events.get_final_message()
    for answer in (whole, streamed):
        assert [cast(Any, block).text for block in answer.content] == [chat.choices[0].message.content]


def test_two_sequences_differ_and_a_seed_repeats_both(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id

    def two() -> list[str]:
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=16,
            temperature=1.0,
            n=2,
            seed=11,
        )
        return [choice.message.content or "" for choice in answer.choices]

    first = two()
    assert first[0] != first[1]
    assert two() == first


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert answer.usage is not None and len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs)


def test_named_alternatives_have_the_logprobs_of_the_most_likely_ones(client: openai.OpenAI) -> None:
    common = {"model": client.models.list().data[0].id, "prompt": "the baton", "max_tokens": 1, "temperature": 0}
    first = client.completions.create(**common, logprobs=5, extra_body={"return_tokens_as_token_ids": True})  # type: ignore[call-overload]
    (likely,) = first.choices[0].logprobs.top_logprobs
    token_ids = [int(name.removeprefix("token_id:")) for name in likely][1:3]
    extra = {"logprob_token_ids": token_ids, "return_tokens_as_token_ids": True}
    named = client.completions.create(**common, logprobs=0, extra_body=extra)  # type: ignore[call-overload]
    (found,) = named.choices[0].logprobs.top_logprobs
    chosen = named.choices[0].logprobs.tokens[0]
    assert found.keys() == {chosen, *(f"token_id:{token_id}" for token_id in token_ids)}
    assert found == pytest.approx({name: likely[name] for name in found}, abs=1e-4)


def test_logprobs_of_a_response_are_those_of_the_chat(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    chat = client.chat.completions.create(
        model=model,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    answer = client.responses.create(
        model=model,
        input=QUESTION[0]["content"],
        max_output_tokens=6,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    (item,) = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    assert chat.choices[0].logprobs is not None and item.content[0].logprobs is not None
    wanted, found = chat.choices[0].logprobs.content or [], item.content[0].logprobs
    assert [one.token for one in found] == [one.token for one in wanted]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in wanted], abs=1e-4)


def test_an_answer_in_a_stated_form_is_parsed_by_anthropics_client(cluster: Cluster) -> None:
    with anthropic.Anthropic(base_url=cluster.url, api_key="secret", max_retries=0) as connected:
        answer = connected.messages.parse(
            model=connected.models.list().data[0].id,
            messages=cast(Any, QUESTION),
            max_tokens=100,
            output_format=Opinion,
        )
    assert isinstance(answer.parsed_output, Opinion)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, cluster: Cluster) -> None:
    model = client.models.list().data[0].id
    full = client.completions.create(model=model, prompt="stop here", max_tokens=30, temperature=0).choices[0].text
    stop = full[8:11]
    answer = client.completions.create(model=model, prompt="stop here", max_tokens=30, temperature=0, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == full[: full.index(stop)]


def test_a_client_that_disconnects_leaves_nothing(client: openai.OpenAI, cluster: Cluster) -> None:
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt="a long story", max_tokens=400, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.response.close()
    cluster.wait_idle()


def test_errors_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)  # type: ignore[arg-type]
    wrong_key = openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong_key.models.list()
    wrong_key.close()
