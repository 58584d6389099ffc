"""Calls of tools through OpenAI's official client, over a fake cluster."""

from typing import Any, cast

import openai

from tests.unit.router.conftest import Router, Serve
from tests.unit.router.test_message_reader import CALL, HELLO, HERMES, TOOLS, writes


def test_the_official_client_puts_streamed_calls_together(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        router.fakes.token_of = writes("<think>Hm.</think>" + CALL.format("f") + CALL.format("g"))
        client = openai.AsyncOpenAI(base_url="http://router/v1", api_key="any", http_client=cast(Any, router.http))
        stream = client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS)  # type: ignore[arg-type]
        async with stream as events:
            final = (await events.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        called = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
        assert called == [("f", '{"city": "Paris"}'), ("g", '{"city": "Paris"}')]

    serve(scenario, **HERMES)
