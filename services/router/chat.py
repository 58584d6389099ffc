"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

import msgspec

from services.router.answer import Head, answer
from services.router.asgi import Receive, RequestContext, Scope, Send, read_body
from services.router.errors import BadRequestError
from services.router.frontend import Frontend
from services.router.generation import Generation
from services.router.logprobs import LogprobWriter
from services.router.openai_schema import ChatCompletionRequest
from services.router.parameters import chat_logprobs, check_prompt, text_rules, truncated
from services.router.parsing import parse
from services.router.responses import (
    ChatAnswer,
    ChatChoice,
    ChatDelta,
    ChatDeltaChoice,
    ChatLogprobs,
    ChatMessageAnswer,
    Usage,
)
from services.router.timeline import Explanation
from services.router.writer import Piece


class ChatEndpoint:
    """A plain ASGI application."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frontend, context = self._frontend, RequestContext.of(scope)
        request = parse(await read_body(scope, receive), ChatCompletionRequest)
        _check(request)
        model = frontend.model_name(request.model)
        limits = frontend.limits()
        logprobs = chat_logprobs(request)
        text = await frontend.model.render_chat(request)
        token_ids = await frontend.tokenize(
            text, limits, add_special_tokens=bool(request.add_special_tokens), truncate=request.truncate_prompt_tokens
        )
        token_ids = truncated(token_ids, request.truncate_prompt_tokens, limits)
        check_prompt(token_ids, limits, param="messages")
        head = Head(
            f"chatcmpl-{request.request_id or context.request_id}", "chat.completion.chunk", frontend.now(), model
        )
        rules = text_rules(request, logprobs=logprobs, tokens_as_ids=frontend.settings.return_tokens_as_token_ids)
        generation = frontend.generate(request, head.id, [token_ids], rules, limits, arrived_at=context.arrived_at)
        writer = LogprobWriter(frontend.model.detokenizer, tokens_as_ids=rules.tokens_as_ids)
        form = ChatFormat(request, head, generation, writer, role=frontend.settings.response_role)
        await answer(request, generation, form, head, explain=context.explain, receive=receive, send=send)


class ChatFormat:
    object_name = "chat.completion"

    def __init__(
        self,
        request: ChatCompletionRequest,
        head: Head,
        generation: Generation,
        logprobs: LogprobWriter,
        *,
        role: str,
    ) -> None:
        self._head = head
        self._generation = generation
        self._logprobs = logprobs
        last = request.messages[-1]
        continues = bool(request.continue_final_message) or request.add_generation_prompt is False
        self._role = last.role if continues else role
        self._wants_logprobs = bool(request.logprobs)
        is_same_role = last.role == self._role and isinstance(last.content, str)
        self._echo = last.content if request.echo and is_same_role and isinstance(last.content, str) else ""

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        return (ChatDeltaChoice(index=choice, delta=ChatDelta(role=self._role, content=self._echo)),)

    def delta(self, choice: int, piece: Piece) -> msgspec.Struct:
        return ChatDeltaChoice(
            index=choice,
            delta=ChatDelta(content=piece.text),
            logprobs=self._chat_logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason if piece.finish_reason is not None else msgspec.UNSET,
        )

    def whole(
        self, pieces: Sequence[Piece], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct:
        choices = [
            ChatChoice(
                index=i,
                message=ChatMessageAnswer(role=self._role, content=self._echo + piece.text),
                logprobs=self._chat_logprobs(piece),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )
            for i, piece in enumerate(pieces)
        ]
        prompt_logprobs = self._generation.flights[0].prompt_logprobs
        return ChatAnswer(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=None if prompt_logprobs is None else self._logprobs.prompt(prompt_logprobs),
            baton=baton,
        )

    def _chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return self._logprobs.chat(piece.logprobs or []) if self._wants_logprobs else None


def _check(request: ChatCompletionRequest) -> None:
    choice = request.tool_choice
    if request.tools and choice != "none":
        raise BadRequestError(
            "parameter 'tools' is not supported: tool calls are not parsed, only tool_choice 'none' is served",
            param="tools",
            code="unsupported_parameter",
        )
    if choice not in (None, "none", "auto"):
        raise BadRequestError(
            "parameter 'tool_choice' is not supported", param="tool_choice", code="unsupported_parameter"
        )
