"""Serve `POST /v1/responses` and `/v1/responses/input_tokens` (OpenAI), and decide their events, and what may run in
the background.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from baton_serve.services.router.api.chat_preparation import begin_chat, count_tokens
from baton_serve.services.router.api.content_block_writer import AnswerEnd, SseEvent, serve
from baton_serve.services.router.api.content_blocks import Block, BlockClosed, BlockGrown, BlockOpened, Change
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.responses.answer_schema import (
    CallItem,
    DeltaEvent,
    ErrorEvent,
    IncompleteDetails,
    InputDetails,
    ItemEvent,
    MessageItem,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseAnswer,
    ResponseEvent,
    ResponsesUsage,
)
from baton_serve.services.router.api.responses.conversation import continued, input_items
from baton_serve.services.router.api.responses.kept_responses import KeptResponses
from baton_serve.services.router.api.responses.request_to_chat import as_chat, input_as_chat, wants_logprobs
from baton_serve.services.router.api.responses.schema import InputTokensRequest, ResponsesRequest
from baton_serve.services.router.api.responses.tools import ToolName, names_of
from baton_serve.services.router.protocol.asgi import Receive, RequestContext, Scope, Send, read_body, send_json
from baton_serve.services.router.protocol.errors import ApiError, BadRequestError
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.protocol.openai_responses import ChatLogprob, InputTokens, Usage
from baton_serve.services.router.protocol.request_bounds import MAX_REPEATED_LOGPROBS
from baton_serve.services.router.protocol.request_parsing import beside_loop, is_long, parsed
from baton_serve.services.router.text.logprobs import LogprobWriter

_ITEMS_ON_LOOP = 200
"""Largest number of input items that are prepared on the event loop."""
# Prefixes of item ids, as OpenAI's.
_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
_DELTA = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponsesEndpoint:
    """Answers `POST /v1/responses`, streamed, as a whole or in the background. It is a plain ASGI application."""

    def __init__(self, service: ModelService, kept: KeptResponses) -> None:
        self._service = service
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context, kept = self._service, RequestContext.of(scope), self._kept
        body = await read_body(scope, receive)
        request = await parsed(body, ResponsesRequest)
        check_background(request, kept)
        is_kept = kept.is_enabled and request.store is not False
        record = await _previous(request, kept, context)
        longest = max(body, record or b"", key=len)
        is_slow = is_long(longest) or _has_many_items(request)
        request, chat, items = await beside_loop(
            longest, lambda _: _prepared(request, record, context, keeps=is_kept), is_slow=is_slow
        )
        service = await service.serving(request.model)
        api_id = f"resp_{request.request_id or context.request_id}"
        check_num_logprobs(request, service.limits().max_model_len)
        begun = await begin_chat(service, chat, context, api_id, is_long=is_slow)
        empty = empty_answer(request, api_id, begun.model, created_at=service.now(), store=is_kept)
        writer = LogprobWriter(service.model.detokenizer, tokens_as_ids=begun.rules.tokens_as_ids)
        dialect = ResponsesDialect(empty, names_of(request.tools or ()), writer)
        if request.background:
            await send_json(send, await kept.start(context.caller, begun, dialect, empty, items, context.body))
            return
        keep = partial(kept.keep, context.caller, api_id, items=items) if is_kept else None
        with begun:
            stream = bool(request.stream)
            await serve(begun, dialect, stream=stream, context=context, receive=receive, send=send, keep=keep)


class InputTokensEndpoint:
    """Answers `POST /v1/responses/input_tokens`: counts the prompt tokens of a conversation without sending it to an
    instance. It is a plain ASGI application.
    """

    def __init__(self, service: ModelService, kept: KeptResponses) -> None:
        self._service = service
        self._kept = kept

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        body = await read_body(scope, receive)
        request = await parsed(body, InputTokensRequest)
        record = await _previous(request, self._kept, context)
        longest, max_bytes = max(body, record or b"", key=len), context.limits.max_body_bytes
        is_slow = is_long(longest) or _has_many_items(request)
        chat = await beside_loop(
            longest, lambda _: input_as_chat(continued(request, record, max_bytes=max_bytes)), is_slow=is_slow
        )
        await send_json(send, InputTokens(await count_tokens(self._service, chat, is_long=is_slow)))


def _has_many_items(request: InputTokensRequest) -> bool:
    # An item takes 10 us or more: 64 KiB of small ones would block the event loop for 0.1 s.
    return len(request.input) > _ITEMS_ON_LOOP and not isinstance(request.input, str)


async def _previous(request: InputTokensRequest, kept: KeptResponses, context: RequestContext) -> bytes | None:
    """Return the stored record of the answer that a request continues (`previous_response_id`), or None if it continues
    none. Raises `NotFoundError` if that answer is not kept.
    """
    if request.previous_response_id is None:
        return None
    return await kept.record(
        context.caller, request.previous_response_id, memory=context.body, param="previous_response_id"
    )


def _prepared(
    request: ResponsesRequest, record: bytes | None, context: RequestContext, *, keeps: bool
) -> tuple[ResponsesRequest, ChatCompletionRequest, list[msgspec.Raw]]:
    """Return three values: the request with the whole conversation as its input, the chat request made of it, and the
    input items to keep with the answer (none unless `keeps`). `record` is the answer that the request continues, or
    None.

    Raises `BadRequestError` if something in the request is not valid or not served.
    """
    request = continued(request, record, max_bytes=context.limits.max_body_bytes)
    return request, as_chat(request), input_items(request) if keeps else []


def check_background(request: ResponsesRequest, kept: KeptResponses) -> None:
    """Raise `BadRequestError` if a request wants to run in the background but cannot, for example because no answers
    are kept.
    """
    if not request.background:
        return
    if not kept.is_enabled or request.store is False:
        raise BadRequestError(
            "background needs an answer that is stored: leave out store=false"
            if kept.is_enabled
            else "background needs stored answers, which --response-store-ttl-s 0 turns off",
            param="background",
        )
    if request.stream:
        raise BadRequestError(
            "background: a stream ends with its connection, so it is not supported together with stream",
            param="background",
            code="unsupported_parameter",
        )


class ResponsesDialect:
    """Converts one answer to the events and objects of the Responses API; implements `api_format.Dialect`."""

    def __init__(self, empty: ResponseAnswer, names: Mapping[str, ToolName], logprobs: LogprobWriter) -> None:
        """Create the dialect for one answer. `empty` is the answer before anything was generated; `logprobs` formats
        logprobs.

        `names` are the functions that belong to a namespace, by the name under which the model calls them.
        """
        self._empty = empty
        self._names = names
        self._writer = logprobs
        self._logprobs: dict[Block, list[ChatLogprob]] = {}
        """The logprobs of each text that are in the form of the API already."""
        self._num_events = 0
        # The events of a block and the whole answer must carry the same ids.
        self._ids: dict[Block, tuple[str, str]] = {}

    def begin(self, usage: Usage) -> Sequence[SseEvent]:
        """Return the two events with which a stream starts, `response.created` and `response.in_progress`; both carry
        the empty answer.
        """
        return [self._response("response.created", self._empty), self._response("response.in_progress", self._empty)]

    def change(self, change: Change) -> Sequence[SseEvent]:
        """Return the events for a content block that was opened, got more text or was closed. Each block is an item of
        the answer's `output`.
        """
        match change:
            case BlockOpened(block):
                return self._opened(block)
            case BlockGrown(block, text, logprobs):
                return [self._delta(block, "delta", text, self._formatted(block)[-len(logprobs) :] if logprobs else [])]
            case BlockClosed(block):
                return self._closed(block)

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> Sequence[SseEvent]:
        """Return the last event of a stream, which repeats the whole answer."""
        whole = self.whole(blocks, end)
        return [self._response(f"response.{whole.status}", whole)]

    def failure(self, error: ApiError) -> Sequence[SseEvent]:
        """Return the last two events of a stream that failed: the error, and the answer with the status `failed`."""
        detail = error.body().error
        number = self._next()
        event = ErrorEvent(sequence_number=number, code=detail.code, message=detail.message, param=detail.param)
        failed = msgspec.structs.replace(self._empty, status="failed", error=detail)
        return [SseEvent("error", event), self._response("response.failed", failed)]

    def whole(self, blocks: Sequence[Block], end: AnswerEnd) -> ResponseAnswer:
        """Return the complete answer. Each content block is one item of its `output`."""
        usage = end.usage
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
        return msgspec.structs.replace(
            self._empty,
            status="incomplete" if end.is_cut else "completed",
            incomplete_details=IncompleteDetails() if end.is_cut else None,
            output=[self._item(block, _status(block, blocks, end)) for block in blocks],
            usage=ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(cached),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )

    def _opened(self, block: Block) -> list[SseEvent]:
        item_id, _ = self._ids_of(block)
        item = self._item(block, "in_progress", is_new=True)
        events = [self._item_event("response.output_item.added", block, item)]
        # The arguments of a tool call are not a content part, so calls have no part events.
        if block.kind != "call":
            events.append(self._part_event("added", block, item_id))
        return events

    def _closed(self, block: Block) -> list[SseEvent]:
        item_id, _ = self._ids_of(block)
        events = [self._delta(block, "done", block.text, self._formatted(block))]
        if block.kind != "call":
            events.append(self._part_event("done", block, item_id))
        return [*events, self._item_event("response.output_item.done", block, self._item(block, "completed"))]

    def _item(self, block: Block, status: str, *, is_new: bool = False) -> OutputItem:
        # An item is announced without content; its text follows in events.
        item_id, call_id = self._ids_of(block)
        text = "" if is_new else block.text
        if block.kind == "call":
            # Clients such as Codex look a function up by both names; the model knows only the flat one.
            known = self._name_of(block)
            namespace = known.namespace or msgspec.UNSET
            return CallItem(
                id=item_id, call_id=call_id, name=known.name, namespace=namespace, arguments=text, status=status
            )
        if block.kind == "reasoning":
            content = [] if is_new else [ReasoningText(text=text)]
            return ReasoningItem(id=item_id, content=content, status=status)
        return MessageItem(id=item_id, content=[] if is_new else [self._text(block)], status=status)

    def _part_event(self, what: str, block: Block, item_id: str) -> SseEvent:
        name = f"response.content_part.{what}" if block.kind == "text" else f"response.reasoning_part.{what}"
        text = block.text if what == "done" else ""
        part: OutputText | ReasoningText = ReasoningText(text=text)
        if block.kind == "text":
            part = self._text(block) if what == "done" else OutputText(text="")
        number = self._next()
        data = PartEvent(type=name, sequence_number=number, item_id=item_id, output_index=block.index, part=part)
        return SseEvent(name, data)

    def _text(self, block: Block) -> OutputText:
        return OutputText(text=block.text, logprobs=self._formatted(block))

    def _formatted(self, block: Block) -> list[ChatLogprob]:
        """Return the logprobs of a text block so far in the form of the Responses API."""
        done = self._logprobs.setdefault(block, [])
        # Each is formatted once, although a stream repeats all of them at its end.
        if len(done) < len(block.logprobs):
            done += self._writer.chat(block.logprobs[len(done) :]).content
        return done

    def _name_of(self, block: Block) -> ToolName:
        return self._names.get(block.name) or ToolName(block.name)

    def _delta(self, block: Block, what: str, text: str, logprobs: list[ChatLogprob]) -> SseEvent:
        item_id, _ = self._ids_of(block)
        name = f"{_DELTA[block.kind]}.{what}"
        # In the API the field of the final text is named after its kind, that of a delta is not.
        field = "delta" if what == "delta" else "arguments" if block.kind == "call" else "text"
        extra: dict[str, Any] = {field: text}
        if block.kind == "text":
            extra["logprobs"] = logprobs
        if block.kind == "call":
            extra["content_index"] = msgspec.UNSET
            if what == "done":
                extra["name"] = self._name_of(block).name
        number = self._next()
        data = DeltaEvent(type=name, sequence_number=number, item_id=item_id, output_index=block.index, **extra)
        return SseEvent(name, data)

    def _item_event(self, name: str, block: Block, item: OutputItem) -> SseEvent:
        number = self._next()
        return SseEvent(name, ItemEvent(type=name, sequence_number=number, output_index=block.index, item=item))

    def _response(self, name: str, response: ResponseAnswer) -> SseEvent:
        return SseEvent(name, ResponseEvent(type=name, sequence_number=self._next(), response=response))

    def _ids_of(self, block: Block) -> tuple[str, str]:
        """Return two ids for a block: that of its output item, and its `call_id`, which only a tool call has. Later
        calls return the same ids.
        """
        if block not in self._ids:
            self._ids[block] = (f"{_PREFIX[block.kind]}_{secrets.token_hex(12)}", f"call_{secrets.token_hex(12)}")
        return self._ids[block]

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _status(block: Block, blocks: Sequence[Block], end: AnswerEnd) -> str:
    # If the limit of tokens was reached, only the last item was cut.
    return "incomplete" if end.is_cut and block is blocks[-1] else "completed"


def check_num_logprobs(request: ResponsesRequest, max_model_len: int) -> None:
    """Raise `BadRequestError` if the answer may have too many logprobs. The number is limited because a stream repeats
    all of them at its end. `max_model_len` is the model's context in tokens.
    """
    # Checked before the generation, because an error in the middle of a stream would lose the answer so far.
    num_tokens = min(request.max_output_tokens or max_model_len, max_model_len)
    if wants_logprobs(request) and num_tokens * ((request.top_logprobs or 0) + 1) > MAX_REPEATED_LOGPROBS:
        raise BadRequestError(
            f"top_logprobs: {num_tokens} tokens may have more than {MAX_REPEATED_LOGPROBS} logprobs, the limit: set a "
            "smaller max_output_tokens or top_logprobs",
            param="top_logprobs",
            code="too_many_values",
        )


def empty_answer(request: ResponsesRequest, api_id: str, model: str, *, created_at: int, store: bool) -> ResponseAnswer:
    """Return the answer to a request as it is before anything was generated. `created_at` is in seconds since 1970;
    `store` says whether the answer will be kept.
    """
    reasoning = request.reasoning
    return ResponseAnswer(
        id=api_id,
        created_at=created_at,
        status="in_progress",
        background=bool(request.background),
        previous_response_id=request.previous_response_id,
        store=store,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        temperature=request.temperature,
        text={"format": (request.text.format if request.text is not None else None) or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        max_tool_calls=request.max_tool_calls,
        top_p=request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
