"""Serve `POST /v1/chat/completions`, and decide the form of its answer, such as the finish reason `tool_calls`."""

from collections.abc import Sequence

import msgspec

from baton_serve.contracts.prompt_logprobs import decode_logprobs
from baton_serve.services.router.api.answer_writer import ResponseHeader, answer
from baton_serve.services.router.api.chat_preparation import begin_chat, count_tokens
from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import Receive, RequestContext, Scope, Send, read_body, send_json
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.protocol.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessageAnswer,
    Explanation,
    InputTokens,
    PromptTokenIds,
    Usage,
)
from baton_serve.services.router.protocol.request_parsing import is_long, parsed
from baton_serve.services.router.text.logprobs import LogprobWriter
from baton_serve.services.router.text.message_reader import MessageFormat, MessageReader
from baton_serve.services.router.text.text_output import TextDelta


class ChatEndpoint:
    """Answers `POST /v1/chat/completions`, streamed or as a whole. It is a plain ASGI application."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, RequestContext.of(scope)
        body = await read_body(scope, receive)
        request = await parsed(body, ChatCompletionRequest)
        # From here on `service` is that of the model that the request names, which may be another one.
        service = await service.serving(request.model)
        api_id = f"chatcmpl-{request.request_id or context.request_id}"
        begun = await begin_chat(service, request, context, api_id, is_long=is_long(body))
        with begun:
            head = ResponseHeader(api_id, "chat.completion.chunk", service.now(), begun.model)
            writer = LogprobWriter(service.model.detokenizer, tokens_as_ids=begun.rules.tokens_as_ids)
            shape = ChatShape(request, begun.message_format, role=service.settings.response_role)
            form = ChatFormat(shape, head, begun.generation, writer)
            await answer(request, begun.generation, form, head, context=context, receive=receive, send=send)


class ChatInputTokensEndpoint:
    """Answers a request that only counts the prompt tokens of a chat, as llama.cpp's server does. Nothing is sent to an
    instance. It is a plain ASGI application.
    """

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        request = await parsed(body, ChatCompletionRequest)
        await send_json(send, InputTokens(await count_tokens(self._service, request, is_long=is_long(body))))


class ChatShape:
    """The parameters of a chat request that decide the form of its answer: role, echo, logprobs, token ids, and whether
    the text is split into reasoning and tool calls.
    """

    def __init__(self, request: ChatCompletionRequest, message_format: MessageFormat, *, role: str) -> None:
        """Read these parameters from the request. `message_format` says how the model's text is parsed; `role` is the
        value of `--response-role`.
        """
        last = request.messages[-1]
        # If the model continues the last message instead of starting a new one, the answer has that message's role.
        continues = bool(request.continue_final_message) or request.add_generation_prompt is False
        self.message_format = message_format
        self.role = last.role if continues else role
        self.wants_logprobs = bool(request.logprobs)
        self.wants_token_ids = bool(request.return_token_ids)
        # As in vLLM: `echo` repeats the last message only if the answer continues its role.
        is_same_role = last.role == self.role and isinstance(last.content, str)
        self.echo = last.content if request.echo and is_same_role and isinstance(last.content, str) else ""


class ChatFormat:
    """The `AnswerFormat` of OpenAI's chat API: converts text deltas to chunks or to a whole chat completion."""

    object_name = "chat.completion"

    def __init__(
        self, shape: ChatShape, head: ResponseHeader, generation: TextGeneration, logprobs: LogprobWriter
    ) -> None:
        self._head = head
        self._generation = generation
        self._logprobs = logprobs
        self._shape = shape
        self.echoes_logprobs = False
        self.sends_tokens = shape.wants_token_ids
        self.has_only_text = shape.message_format.is_plain and not (shape.wants_logprobs or self.sends_tokens)
        # One `MessageReader` per choice, because it keeps the state of a partly parsed text. None: nothing to parse.
        self._readers: list[MessageReader] | None = None
        if not shape.message_format.is_plain:
            self._readers = [shape.message_format.reader() for _ in range(generation.num_choices)]

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        """Return the first element of a chunk's `choices` for a choice: as in OpenAI's API it has the role, and here
        also the echoed message if the client wants it (`echo`).
        """
        return (ChatDeltaChoice(index=choice, delta=ChatDelta(role=self._shape.role, content=self._shape.echo)),)

    def beside_opening(self) -> msgspec.Struct | None:
        """Return the prompt's token ids, which are sent beside the first chunk, or None if the client does not want
        token ids.
        """
        return PromptTokenIds(self._generation.lifecycles[0].request.token_ids) if self.sends_tokens else None

    def delta(self, choice: int, text_delta: TextDelta) -> msgspec.Struct | None:
        """Return the element of a chunk's `choices` for a delta.

        Return None while its text is held back because it may become a tool call or reasoning.
        """
        is_last = text_delta.finish_reason is not None
        delta: ChatDelta | None = ChatDelta(content=text_delta.text)
        if self._readers is not None:
            delta = self._readers[choice].delta(text_delta.text, is_last=is_last)
        logprobs = self._chat_logprobs(text_delta)
        if delta is None and logprobs is None and not is_last and not self.sends_tokens:
            return None
        return ChatDeltaChoice(
            index=choice,
            delta=delta or ChatDelta(),
            logprobs=logprobs,
            finish_reason=self._finish_reason(choice, text_delta),
            stop_reason=text_delta.stop_reason if text_delta.finish_reason is not None else msgspec.UNSET,
            token_ids=text_delta.token_ids if self.sends_tokens else msgspec.UNSET,
        )

    def whole(
        self, text_deltas: Sequence[TextDelta], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct:
        """Return the complete chat completion, for a request without streaming. `text_deltas` has the whole text of
        each choice.
        """
        choices = [
            ChatChoice(
                index=i,
                message=self._message(i, text_delta),
                logprobs=self._chat_logprobs(text_delta),
                finish_reason=self._finish_reason(i, text_delta),
                stop_reason=text_delta.stop_reason,
                token_ids=text_delta.token_ids if self.sends_tokens else msgspec.UNSET,
            )
            for i, text_delta in enumerate(text_deltas)
        ]
        lifecycle = self._generation.lifecycles[0]
        encoded = lifecycle.prompt_logprobs
        prompt_logprobs = None if encoded is None else self._logprobs.prompt(decode_logprobs(encoded))
        return ChatAnswer(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=lifecycle.request.token_ids if self.sends_tokens else msgspec.UNSET,
            baton=baton,
        )

    def _message(self, choice: int, text_delta: TextDelta) -> ChatMessageAnswer:
        role, echo = self._shape.role, self._shape.echo
        if self._readers is None:
            return ChatMessageAnswer(role=role, content=echo + text_delta.text)
        message = self._readers[choice].whole(text_delta.text)
        return ChatMessageAnswer(
            role=role,
            content=echo + (message.content or "") if echo else message.content,
            # Two names for one text: vLLM renamed the field, and clients of both versions exist.
            reasoning_content=message.reasoning,
            reasoning=message.reasoning,
            tool_calls=message.tool_calls or msgspec.UNSET,
        )

    def _finish_reason(self, choice: int, text_delta: TextDelta) -> str | None:
        # A named function that the client forced ends with "stop", as in OpenAI's API (`ends_with_calls`).
        has_calls = self._readers is not None and self._readers[choice].has_calls
        ends_with_calls = has_calls and self._shape.message_format.ends_with_calls
        return "tool_calls" if ends_with_calls and text_delta.finish_reason == "stop" else text_delta.finish_reason

    def _chat_logprobs(self, text_delta: TextDelta) -> ChatLogprobs | None:
        return self._logprobs.chat(text_delta.logprobs or []) if self._shape.wants_logprobs else None
