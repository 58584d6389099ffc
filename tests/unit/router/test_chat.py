"""/v1/chat/completions over a fake cluster."""

import asyncio
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from baton_serve.services.router.text import served_model
from tests.unit.router.conftest import Router, Serve, events_of

BOS = 262
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def ask(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.http.post(PATH, json={"seed": 0, "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def prompt_of(router: Router, index: int = -1) -> str:
    work = router.fakes["prefill-0"].assignments()[index].work
    return router.service.model.tokenizer.decode(work.token_ids, skip_special_tokens=False)


def test_a_chat_is_rendered_and_answered(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, max_tokens=5)
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"] == "ahovc"
        assert "tool_calls" not in choice["message"], "as in OpenAI's API and vLLM"
        assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
        assert "baton" not in answer
        assert prompt_of(router) == "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"

    serve(scenario)


def test_the_tokens_of_a_chat_are_counted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        answer = await ask(router, max_tokens=1)
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "stream": True}
        for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
            counted = (await router.http.post(path, json=body)).json()
            assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["prompt_tokens"]}
        assert (await router.http.post(path, json=body | {"model": "nobody"})).status_code == 404
        assert len(router.fakes["prefill-0"].assignments()) == 1

    serve(scenario)


def test_streamed_and_whole_answers_are_equal(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body: dict[str, Any] = {"max_completion_tokens": 7, "n": 2, "logprobs": True, "top_logprobs": 2}
        whole = await ask(router, **body)
        chunks = await router.stream(PATH, messages=HELLO, **body, stream_options={"include_usage": True})
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for i in range(2):
            mine = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == i]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(c["delta"].get("content", "") for c in mine)
            assert text == whole["choices"][i]["message"]["content"]
            assert mine[-1]["finish_reason"] == whole["choices"][i]["finish_reason"]
            logprobs = [entry for c in mine if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert logprobs == whole["choices"][i]["logprobs"]["content"]
        assert chunks[-1]["usage"] == whole["usage"]
        first = whole["choices"][0]["logprobs"]["content"][0]
        assert first == {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.5, "bytes": [98]},
            ],
        }

    serve(scenario)


def test_the_last_message_may_be_continued_and_echoed(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "well, "}]
        answer = await ask(
            router,
            messages=messages,
            max_tokens=2,
            echo=True,
            continue_final_message=True,
            add_generation_prompt=False,
        )
        assert prompt_of(router).endswith("<|im_start|>assistant\nwell, ")
        assert answer["choices"][0]["message"]["content"] == "well, ah"
        chunks = await router.stream(PATH, messages=messages, max_tokens=2, echo=True, continue_final_message=True)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "well, ah"

    serve(scenario)


def test_parts_of_text_are_joined_for_a_template_that_takes_strings(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await ask(router, messages=[{"role": "user", "content": parts}], max_tokens=2)
        assert "user\none\ntwo<|im_end|>" in prompt_of(router)
        image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
        refused = await router.http.post(PATH, json={"messages": [{"role": "user", "content": image}]})
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]

    serve(scenario)


def test_templates_of_requests_run_only_when_trusted(serve: Serve) -> None:
    async def refused(router: Router) -> None:
        # As in vLLM, also in the variables of the model's template.
        for path in (PATH, "/tokenize"):
            for given in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}):
                answer = await router.http.post(path, json={"messages": HELLO, **given})
                assert answer.status_code == 400
                assert "--trust-request-chat-template" in answer.json()["error"]["message"]

    serve(refused)


def test_templates_of_requests_and_their_variables(serve: Serve, model_folder: Any, monkeypatch: Any) -> None:
    async def scenario(router: Router) -> None:
        monkeypatch.setattr(router.service.model, "_trusts_requests", True)
        template = "{{ bos_token }}{{ who }}:{{ messages[0].content }}"
        await ask(router, max_tokens=2, chat_template=template, chat_template_kwargs={"who": "me"})
        assert prompt_of(router) == "<s>me:hello"
        broken = await router.http.post(PATH, json={"messages": HELLO, "chat_template": "{% if %}"})
        assert broken.status_code == 400

    serve(scenario)


def test_a_template_of_a_request_that_does_not_end_is_given_up_while_others_are_served(
    serve: Serve, monkeypatch: Any
) -> None:
    monkeypatch.setattr(served_model, "_REQUEST_TEMPLATE_S", 0.1)

    async def scenario(router: Router) -> None:
        monkeypatch.setattr(router.service.model, "_trusts_requests", True)
        endless = "{% for a in range(99999) %}{% for b in range(99) %}{% endfor %}{% endfor %}"
        body = {"messages": HELLO, "chat_template": endless}
        slow = asyncio.create_task(router.http.post(PATH, json=body))
        await asyncio.sleep(0)
        await ask(router, max_tokens=1)
        assert not slow.done()
        answer = await slow
        assert answer.status_code == 400 and "was not rendered within 0.1 s" in answer.text

    serve(scenario)


@pytest.mark.parametrize(
    "template", ["{{" + "(" * 2000 + "1" + ")" * 2000 + "}}", "{{ 10**300000 }}", "{{ messages[0].content * 10**14 }}"]
)
def test_a_template_of_a_request_that_cannot_be_computed_is_an_error_of_the_client(
    serve: Serve, monkeypatch: Any, template: str
) -> None:
    async def scenario(router: Router) -> None:
        monkeypatch.setattr(router.service.model, "_trusts_requests", True)
        answer = await router.http.post(PATH, json={"messages": HELLO, "chat_template": template})
        assert answer.status_code == 400, answer.text

    serve(scenario)


def test_an_answer_explains_itself_on_request(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"messages": HELLO, "max_tokens": 3, "seed": 0}
        explain = {"x-baton-explain": "1"}
        baton = (await router.http.post(PATH, json=body, headers=explain)).json()["baton"]
        assert (baton["decision"], baton["prefill"], baton["decode"]) == ("disaggregated", "prefill-0", "decode-0")
        assert (baton["queue_s"], baton["prefill_s"], baton["handoff_s"]) == (0.25, 0.5, 0.125)
        assert (baton["transport"], baton["handoff_bytes_per_s"]) == ("memory", 8000)
        assert baton["cached_tokens"] == {"device": 4}
        assert baton["ttft_s"] > 0
        assert baton["predicted_ttft_s"] > 0
        streamed = await router.http.post(PATH, json={**body, "stream": True}, headers=explain)
        assert events_of(streamed.text)[-1]["baton"]["decision"] == "disaggregated"

    serve(scenario)


def test_every_request_has_an_id(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        body = {"messages": HELLO, "max_tokens": 2}
        mine = await router.http.post(PATH, json=body, headers={"x-request-id": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1"
        assert mine.json()["id"] == "chatcmpl-mine-1"
        drawn = await router.http.post(PATH, json=body)
        assert drawn.json()["id"] == f"chatcmpl-{drawn.headers['x-request-id']}"
        first, second = (m.work.request_id for m in router.fakes["prefill-0"].assignments())
        assert first != second

    serve(scenario)


def test_tools_reach_the_template_when_no_call_is_wanted(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await ask(router, tools=tools, tool_choice="none", max_tokens=2))["choices"]
        refused = await router.http.post(PATH, json={"messages": HELLO, "tools": tools})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools"

    serve(scenario)


def test_special_tokens_are_added_where_they_are_asked_for(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        tokenizer = router.service.model.tokenizer
        tokenizer.backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        try:
            await ask(router, max_tokens=2, add_special_tokens=True)
            assert prompt_of(router).startswith("<s><s><|im_start|>")
            await router.complete(prompt="hello", max_tokens=2)
            assert prompt_of(router) == "<s>hello"
            await router.complete(prompt="hello", max_tokens=2, add_special_tokens=False)
            assert prompt_of(router) == "hello"
        finally:
            tokenizer.backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])

    serve(scenario)


def test_reasoning_effort_and_verbosity_reach_the_template(serve: Serve, monkeypatch: Any) -> None:
    async def scenario(router: Router) -> None:
        monkeypatch.setattr(router.service.model, "_trusts_requests", True)
        template = "{{ reasoning_effort }} {{ enable_thinking }} {{ verbosity }}: {{ messages[0].content }}"
        await ask(router, max_tokens=2, chat_template=template, reasoning_effort="low", verbosity="high")
        assert prompt_of(router) == "low True high: hello"
        for more, shown in (({}, False), ({"chat_template_kwargs": {"enable_thinking": True}}, True)):
            await ask(router, max_tokens=2, chat_template=template, reasoning_effort="none", **more)
            assert prompt_of(router) == f"none {shown} : hello"

    serve(scenario)
