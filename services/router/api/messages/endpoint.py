"""Serve `POST /v1/messages` and `/v1/messages/count_tokens` (Anthropic), and decide their events and stop reasons."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from baton_serve.services.router.api.chat_preparation import begin_chat, count_tokens
from baton_serve.services.router.api.content_block_writer import AnswerEnd, SseEvent, serve
from baton_serve.services.router.api.content_blocks import Block, BlockClosed, BlockGrown, BlockOpened, Change
from baton_serve.services.router.api.messages.answer_schema import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageDelta,
    MessagesAnswer,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopDelta,
    StopReason,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
    error_answer,
)
from baton_serve.services.router.api.messages.request_to_chat import as_chat
from baton_serve.services.router.api.messages.schema import CountTokensRequest, MessagesRequest
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import Receive, RequestContext, Scope, Send, read_body, send_json
from baton_serve.services.router.protocol.body_scan import parsed
from baton_serve.services.router.protocol.errors import ApiError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.protocol.request_parsing import beside_loop, is_long, parse


class MessagesEndpoint:
    """Answers `POST /v1/messages` (Anthropic's API), streamed or as a whole. It is a plain ASGI application."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, RequestContext.of(scope)
        body = await read_body(scope, receive)
        request, chat = await beside_loop(body, _request)
        api_id = f"msg_{context.request_id}"
        service = await service.serving(request.model)
        begun = await begin_chat(service, chat, context, api_id, is_long=is_long(body))
        with begun:
            dialect = MessagesDialect(api_id, begun.model)
            await serve(begun, dialect, stream=bool(request.stream), context=context, receive=receive, send=send)


class CountTokensEndpoint:
    """Answers `POST /v1/messages/count_tokens`: counts the prompt tokens of a conversation without sending it to an
    instance. It is a plain ASGI application.
    """

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        chat = await beside_loop(body, lambda given: as_chat(parse(given, CountTokensRequest)))
        await send_json(send, TokenCount(await count_tokens(self._service, chat, is_long=is_long(body))))


def _request(body: bytes) -> tuple[MessagesRequest, ChatCompletionRequest]:
    """Parse the body of a Messages request. Return it and the chat request with the same meaning. Raises
    `BadRequestError`.
    """
    request = parse(body, MessagesRequest)
    return request, as_chat(request)


class MessagesDialect:
    """Converts one answer to the events and objects of Anthropic's Messages API; implements `api_format.Dialect`."""

    def __init__(self, api_id: str, model: str) -> None:
        self._id = api_id
        self._model = model
        # The events of a block and the whole answer must carry the same id.
        self._call_ids: dict[Block, str] = {}

    def begin(self, usage: Usage) -> Sequence[SseEvent]:
        """Return the event `message_start`, which contains the answer without content and with the prompt's token
        counts.
        """
        message = MessagesAnswer(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(usage),
        )
        return [SseEvent("message_start", MessageStart(message))]

    def change(self, change: Change) -> Sequence[SseEvent]:
        """Return the event for a content block that was opened, got more text or was closed."""
        match change:
            case BlockOpened(block):
                return [SseEvent("content_block_start", BlockStart(block.index, self._block(block, is_new=True)))]
            case BlockGrown(block, text):
                return [SseEvent("content_block_delta", BlockDelta(block.index, _delta(block, text)))]
            case BlockClosed(block):
                return [SseEvent("content_block_stop", BlockStop(block.index))]

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> Sequence[SseEvent]:
        """Return the last events of a stream: the stop reason with the token counts, then `message_stop`."""
        delta = MessageDelta(StopDelta(_stop_reason(end), end.stop), _usage(end.usage))
        return [SseEvent("message_delta", delta), SseEvent("message_stop", MessageStop())]

    def failure(self, error: ApiError) -> Sequence[SseEvent]:
        """Return the error event; no `message_stop` follows it, as in Anthropic's API."""
        return [SseEvent("error", error_answer(error))]

    def whole(self, blocks: Sequence[Block], end: AnswerEnd) -> msgspec.Struct:
        """Return the complete answer, for a request without streaming. `blocks` are its content blocks, complete."""
        return MessagesAnswer(
            id=self._id,
            model=self._model,
            content=[self._block(block) for block in blocks],
            stop_reason=_stop_reason(end),
            stop_sequence=end.stop,
            usage=_usage(end.usage),
        )

    def _block(self, block: Block, *, is_new: bool = False) -> AnswerBlock:
        # `content_block_start` always has an empty block; its text follows in deltas.
        text = "" if is_new else block.text
        if block.kind == "text":
            return TextBlock(text=text)
        if block.kind == "reasoning":
            return ThinkingBlock(thinking=text)
        call_id = self._call_ids.setdefault(block, f"toolu_{secrets.token_hex(12)}")
        return ToolUseBlock(id=call_id, name=block.name, input=arguments_of(text))


def _delta(block: Block, text: str) -> TextBlockDelta | ThinkingDelta | InputDelta:
    match block.kind:
        case "text":
            return TextBlockDelta(text)
        case "reasoning":
            return ThinkingDelta(text)
        case "call":
            return InputDelta(text)


def arguments_of(text: str) -> dict[str, Any]:
    """Parse the arguments that the model generated for a tool call, and return them as a JSON object.

    If `text` is not a JSON object, return an object with this text under the name `arguments`.
    """
    # The API has no place for arguments that do not parse. An error here would lose the whole answer.
    try:
        arguments = parsed(text) if text.strip() else {}
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _stop_reason(end: AnswerEnd) -> StopReason:
    # In this order: a tool call that was cut is not complete, so the client must not run it.
    if end.is_cut:
        return "max_tokens"
    if end.has_calls:
        return "tool_use"
    return "end_turn" if end.stop is None else "stop_sequence"


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
