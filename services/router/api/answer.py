"""Sends a generation to its client, streamed or whole. The shape of the API is the format's concern."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.api.sse import SseDeltaWriter
from baton_serve.services.router.protocol.asgi import (
    DONE,
    DisconnectWatch,
    EventStream,
    Receive,
    RequestContext,
    Send,
    send_json,
)
from baton_serve.services.router.protocol.errors import ApiError, ClientGoneError
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.text.text_output import TextAccumulator, TextDelta

_encoder = msgspec.json.Encoder()
_NUL = _encoder.encode("\0")


class AnswerFormat(Protocol):
    """One API's shape. `text_deltas` of a whole answer are merged: one a choice."""

    object_name: str
    has_only_text: bool
    """A delta before a choice's last one says nothing but its text."""
    tells_tokens: bool
    """Deltas without text say something if tokens came."""

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        """Choices to send before a choice's first piece."""
        ...

    def beside_opening(self) -> msgspec.Struct | None:
        """Fields of the chunks that bring an `opening`."""
        ...

    def delta(self, choice: int, text_delta: TextDelta) -> msgspec.Struct | None:
        """None when there is nothing to send yet."""
        ...

    def whole(
        self, text_deltas: Sequence[TextDelta], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct: ...


class ResponseHeader(msgspec.Struct, frozen=True):
    """What every chunk of a stream begins with."""

    id: str
    object: str
    created: int
    model: str


class SseEncoder:
    """Encodes chunks. The head is encoded once; each chunk adds its choice, and usage where it was asked for."""

    def __init__(self, head: ResponseHeader) -> None:
        self._start = b"data: " + _encoder.encode(head)[:-1] + b',"choices":['

    def choice(self, choice: msgspec.Struct, usage: bytes, beside: msgspec.Struct | None = None) -> bytes:
        extra = b"," + _encoder.encode(beside)[1:-1] if beside is not None else b""
        return b"".join((self._start, _encoder.encode(choice), b"]", extra, usage, b"}\n\n"))

    def last(self, usage: Usage, baton: Explanation | list[Explanation] | None) -> bytes:
        extra = b',"baton":' + _encoder.encode(baton) if baton is not None else b""
        return b"".join((self._start, b'],"usage":', _encoder.encode(usage), extra, b"}\n\n"))


async def answer(
    request: GenerationRequest,
    generation: TextGeneration,
    form: AnswerFormat,
    head: ResponseHeader,
    *,
    context: RequestContext,
    receive: Receive,
    send: Send,
) -> None:
    """Raises `ApiError` as long as nothing was sent. A client that goes away ends the generation; the caller ends it in
    any case (`generation.ended`)."""
    try:
        with DisconnectWatch(receive, generation.abandon, context.exchange):
            if request.stream:
                events = EventStream(send, slow_client_s=context.limits.slow_client_s, exchange=context.exchange)
                await _stream(request, generation, form, SseEncoder(head), events, explain=context.explain)
            else:
                await _send_whole(generation, form, send, explain=context.explain)
    except ClientGoneError:
        return


async def _send_whole(generation: TextGeneration, form: AnswerFormat, send: Send, *, explain: bool) -> None:
    gathered = [TextAccumulator() for _ in range(generation.num_choices)]
    while not generation.is_done:
        for choice, text_delta in await generation.take():
            gathered[choice].add(text_delta)
    baton = generation.explain() if explain else msgspec.UNSET
    await send_json(send, form.whole([one.whole() for one in gathered], generation.usage(), baton))


async def _stream(
    request: GenerationRequest,
    generation: TextGeneration,
    form: AnswerFormat,
    chunks: SseEncoder,
    events: EventStream,
    *,
    explain: bool,
) -> None:
    encoder = _DeltaEncoder(request, generation, form, chunks)
    try:
        last = await SseDeltaWriter(events, encoder.encode).copy(generation)
        if encoder.wants_usage or explain:
            last += chunks.last(generation.usage(), generation.explain() if explain else None)
    except ApiError as exc:
        if not events.is_started:
            raise
        last = b"data: " + _encoder.encode(exc.body()) + b"\n\n"
    await events.end(last + DONE)


class _DeltaEncoder:
    """Pieces to chunks."""

    __slots__ = ("_around", "_chunks", "_form", "_generation", "_is_continuous", "_opened", "wants_usage")

    def __init__(
        self, request: GenerationRequest, generation: TextGeneration, form: AnswerFormat, chunks: SseEncoder
    ) -> None:
        options = request.stream_options
        self.wants_usage = options is not None and bool(options.include_usage)
        self._is_continuous = self.wants_usage and options is not None and bool(options.continuous_usage_stats)
        self._generation = generation
        self._form = form
        self._chunks = chunks
        self._opened = [False] * generation.num_choices
        self._around: list[tuple[bytes, bytes]] = []
        """What stands before and after the text of each choice's deltas, where that is all that differs."""
        if form.has_only_text and not self._is_continuous:
            self._around = [self._around_text(choice) for choice in range(generation.num_choices)]

    def encode(self, choice: int, text_delta: TextDelta) -> bytes:
        if self._around and text_delta.finish_reason is None and self._opened[choice]:
            before, after = self._around[choice]
            return b"%b%b%b" % (before, _encoder.encode(text_delta.text), after) if text_delta.text else b""
        usage = self._usage() if self.wants_usage else b""
        opening = b"" if self._opened[choice] else self._opening(choice, usage)
        has_news = text_delta.text or text_delta.logprobs or (text_delta.token_ids and self._form.tells_tokens)
        if not has_news and text_delta.finish_reason is None:
            return opening
        delta = self._form.delta(choice, text_delta)
        return opening if delta is None else opening + self._chunks.choice(delta, usage)

    def _opening(self, choice: int, usage: bytes) -> bytes:
        self._opened[choice] = True
        beside = self._form.beside_opening()
        return b"".join([self._chunks.choice(first, usage, beside) for first in self._form.opening(choice)])

    def _around_text(self, choice: int) -> tuple[bytes, bytes]:
        delta = self._form.delta(choice, TextDelta("\0", []))
        assert delta is not None
        before, _, after = self._chunks.choice(delta, self._usage() if self.wants_usage else b"").rpartition(_NUL)
        return before, after

    def _usage(self) -> bytes:
        return b',"usage":' + (_encoder.encode(self._generation.usage()) if self._is_continuous else b"null")
