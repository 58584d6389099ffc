"""Serve `POST /v1/completions`: one or several prompts as texts or token ids, `echo`, and prompt logprobs."""

from collections.abc import Sequence
from functools import partial

import msgspec

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.contracts.prompt_logprobs import decode_logprobs
from baton_serve.services.router.api.answer_writer import ResponseHeader, answer
from baton_serve.services.router.api.generation import TextGeneration, ended
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import Receive, RequestContext, Scope, Send, read_body
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import CompletionRequest
from baton_serve.services.router.protocol.openai_responses import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    Explanation,
    PromptLogprobs,
    Usage,
)
from baton_serve.services.router.protocol.request_parsing import parsed
from baton_serve.services.router.requests.lifecycle import RequestLifecycle
from baton_serve.services.router.text.grammar import read_grammar_spec
from baton_serve.services.router.text.logprobs import LogprobWriter
from baton_serve.services.router.text.multimodal.image_tokens import TokenizedPrompt
from baton_serve.services.router.text.prompt_length import check_num_tokens, check_prompt, truncation_of
from baton_serve.services.router.text.sampling_params import (
    ModelLimits,
    check_token_ids,
    sequence_counts,
    text_rules,
    wanted_logprobs,
)
from baton_serve.services.router.text.text_output import TextDelta
from baton_serve.services.router.text.tokenization import beside_loop


class CompletionEndpoint:
    """Answers `POST /v1/completions`, streamed or as a whole. It is a plain ASGI application."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, RequestContext.of(scope)
        request = await parsed(await read_body(scope, receive), CompletionRequest)
        service = await service.serving(request.model)
        model = service.view.model_name(request.model)
        limits = service.limits()
        raw_prompts = _prompts(request)
        # Called for its errors: check the number of sequences before any prompt is tokenized.
        sequence_counts(request, len(raw_prompts), limits)
        tokenizing_at = service.clock()
        prompts = await _all_token_ids(service, request, raw_prompts, limits)
        timing = service.timing(context, tokenizing_at=tokenizing_at)
        head = ResponseHeader(
            f"cmpl-{request.request_id or context.request_id}", "text_completion", service.now(), model
        )
        logprobs = wanted_logprobs(request, limits)
        rules = text_rules(request, logprobs=logprobs, tokens_as_ids=service.tokens_as_ids)
        rules = await service.with_grammar(rules, request, read_grammar_spec(request), context)
        echoed = await _echoed(service, request, raw_prompts, prompts)
        generation = service.generate(
            request, head.id, [TokenizedPrompt(ids) for ids in prompts], rules, limits, timing=timing
        )
        with ended(generation):
            writer = LogprobWriter(service.model.detokenizer, tokens_as_ids=rules.tokens_as_ids)
            form = CompletionFormat(request, head, generation, writer, echoed)
            await answer(request, generation, form, head, context=context, receive=receive, send=send)


class CompletionFormat:
    """The `AnswerFormat` of OpenAI's completions API: converts text deltas to chunks or to a whole completion.

    `echoed` holds the text of each prompt if the answers begin with it (`echo`), otherwise it is None.
    """

    object_name = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        head: ResponseHeader,
        generation: TextGeneration,
        logprobs: LogprobWriter,
        echoed: Sequence[str] | None,
    ) -> None:
        self._head = head
        self._generation = generation
        self._logprobs = logprobs
        self._echoed = echoed
        # `echo` with `max_tokens: 0` asks for the prompt's logprobs. Instances compute at least one token, which is
        # then left out of the answer.
        self._is_echo_only = request.echo is True and request.max_tokens == 0
        self._wants_logprobs = request.logprobs is not None
        self.echoes_logprobs = echoed is not None and self._wants_logprobs
        self.sends_tokens = bool(request.return_token_ids)
        self.has_only_text = not (self._wants_logprobs or self._is_echo_only or self.sends_tokens)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        # `text_offset` of the next token of each choice, in characters: it counts from the start of the answer.
        self._offsets = [0] * generation.num_choices
        self._has_begun = [False] * generation.num_choices

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        """Return the first element of a chunk's `choices` for a choice: the echoed prompt with its logprobs. Return
        nothing without `echo`.
        """
        if self._echoed is None:
            return ()
        lifecycle = self._generation.lifecycle(choice)
        text = self._echo_of(choice)
        logprobs = self._completion_logprobs(choice, lifecycle.request.token_ids, self._decoded(lifecycle))
        return (
            CompletionChoice(
                index=choice,
                text=text,
                logprobs=logprobs,
                prompt_token_ids=self._prompt_token_ids(choice),
                token_ids=self._token_ids([]),
            ),
        )

    def beside_opening(self) -> None:
        """Return None: in the completions API each choice carries the token ids of its prompt."""
        return None

    def delta(self, choice: int, text_delta: TextDelta) -> msgspec.Struct:
        """Return the element of a chunk's `choices` for a delta."""
        if self._is_echo_only:
            return CompletionChoice(
                index=choice, text="", finish_reason=text_delta.finish_reason, token_ids=self._token_ids([])
            )
        return CompletionChoice(
            index=choice,
            text=text_delta.text,
            logprobs=self._completion_logprobs(choice, text_delta.token_ids, text_delta.logprobs or []),
            finish_reason=text_delta.finish_reason,
            stop_reason=text_delta.stop_reason,
            prompt_token_ids=self._prompt_token_ids(choice),
            token_ids=self._token_ids(text_delta.token_ids),
        )

    def whole(
        self, text_deltas: Sequence[TextDelta], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct:
        """Return the complete answer, for a request without streaming. `text_deltas` has the whole text of each
        choice.
        """
        return CompletionAnswer(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(i, text_delta) for i, text_delta in enumerate(text_deltas)],
            usage=usage,
            baton=baton,
        )

    def _choice(self, index: int, text_delta: TextDelta) -> CompletionChoice:
        lifecycle = self._generation.lifecycle(index)
        text, token_ids = text_delta.text, text_delta.token_ids
        prompt_logprobs = self._decoded(lifecycle)
        logprobs: list[TokenLogprobs | None] = list(text_delta.logprobs or [])
        if self._is_echo_only:
            text, token_ids, logprobs = "", [], []
        if self._echoed is not None:
            text = self._echo_of(index) + text
            token_ids = lifecycle.request.token_ids + token_ids
            logprobs = [*prompt_logprobs, *logprobs]
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._completion_logprobs(index, token_ids, logprobs),
            finish_reason=text_delta.finish_reason,
            stop_reason=text_delta.stop_reason,
            prompt_logprobs=self._prompt_logprobs(prompt_logprobs),
            prompt_token_ids=self._prompt_token_ids(index),
            token_ids=self._token_ids([] if self._is_echo_only else text_delta.token_ids),
        )

    def _token_ids(self, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
        return token_ids if self.sends_tokens else msgspec.UNSET

    def _prompt_token_ids(self, choice: int) -> list[int] | msgspec.UnsetType | None:
        """Return the token ids of a choice's prompt at the first call for this choice, and None at later calls, because
        they are sent once. Return unset if the client does not want token ids.
        """
        if not self.sends_tokens:
            return msgspec.UNSET
        is_first, self._has_begun[choice] = not self._has_begun[choice], True
        return self._generation.lifecycle(choice).request.token_ids if is_first else None

    def _echo_of(self, choice: int) -> str:
        # All choices of one prompt stand together, and each prompt has the same number of them.
        assert self._echoed is not None
        return self._echoed[choice * len(self._echoed) // len(self._offsets)]

    def _completion_logprobs(
        self, choice: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        formatted = self._logprobs.completion(token_ids, logprobs, offset=self._offsets[choice])
        self._offsets[choice] += sum(len(token) for token in formatted.tokens)
        return formatted

    def _prompt_logprobs(self, logprobs: list[TokenLogprobs | None]) -> PromptLogprobs | None:
        if not self._wants_prompt_logprobs or not logprobs:
            return None
        return self._logprobs.prompt(logprobs)

    def _decoded(self, lifecycle: RequestLifecycle) -> list[TokenLogprobs | None]:
        """Return the logprobs of the prompt of `lifecycle`, one entry for each token, or an empty list if the request
        did not ask for them. An entry is None for a token without logprobs, such as the first one.
        """
        encoded = lifecycle.prompt_logprobs
        return [] if encoded is None else decode_logprobs(encoded)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request as a list.

    The field `prompt` may be a text, a list of texts, token ids, or a list of lists of token ids. Raises
    `BadRequestError` if it is an empty list.
    """
    prompts = request.prompt
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise BadRequestError("prompt: the list is empty, give at least one prompt", param="prompt")
    if isinstance(prompts[0], int):
        return [prompts]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


async def _all_token_ids(
    service: ModelService, request: CompletionRequest, prompts: Sequence[str | list[int]], limits: ModelLimits
) -> list[list[int]]:
    """Return the token ids of each prompt, in order. Raises `BadRequestError` if one prompt is too long for the model,
    or all together are too long for one request.
    """
    result: list[list[int]] = []
    num_tokens = 0
    for prompt in prompts:
        token_ids = await _token_ids(service, request, prompt, limits)
        check_prompt(token_ids, limits, param="prompt")
        # Checked after each prompt, so that tokenizing stops at the limit.
        num_tokens += len(token_ids)
        check_num_tokens(num_tokens, param="prompt")
        result.append(token_ids)
    return result


async def _token_ids(
    service: ModelService, request: CompletionRequest, prompt: str | list[int], limits: ModelLimits
) -> list[int]:
    truncation = truncation_of(request, limits)
    if isinstance(prompt, str):
        add_special_tokens = request.add_special_tokens is not False
        tokens = await service.tokenize(prompt, limits, add_special_tokens=add_special_tokens, truncation=truncation)
        return tokens if truncation is None else truncation.cut(tokens)
    tokens = prompt if truncation is None else truncation.cut(prompt)
    # The length first: the second check looks at every id, which takes long for a list that is too long anyway.
    check_prompt(tokens, limits, param="prompt")
    check_token_ids(tokens, limits, param="prompt")
    return tokens


async def _echoed(
    service: ModelService,
    request: CompletionRequest,
    prompts: Sequence[str | list[int]],
    token_ids: Sequence[list[int]],
) -> list[str] | None:
    """Return the texts that the answers repeat before their own text (`echo`), one for each prompt; None without
    `echo`. The texts are empty if the client gets the prompt as token ids instead.
    """
    if not request.echo:
        return None
    # As in vLLM: the client gets the prompt as token ids, so its text is left out.
    if request.return_token_ids:
        return [""] * len(prompts)
    text = service.model.detokenizer.text
    return [
        prompt if isinstance(prompt, str) else await beside_loop(len(ids), partial(text, ids))
        for prompt, ids in zip(prompts, token_ids, strict=True)
    ]
