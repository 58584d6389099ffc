"""Send an answer of OpenAI's chat and completion endpoints, streamed (SSE) or as a whole; decides `stream_options`.

An `AnswerFormat` (in `chat` and `completions`) gives the answer the shape of its endpoint.

`SseDeltaWriter` writes the deltas of a generation to the client as server-sent events.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from baton_serve.services.router.api.generation import TextGeneration
from baton_serve.services.router.protocol.asgi import (
    DONE,
    DisconnectWatch,
    EventStream,
    Receive,
    RequestContext,
    Send,
    send_encoded,
    send_json,
)
from baton_serve.services.router.protocol.errors import ApiError, ClientGoneError
from baton_serve.services.router.protocol.openai_requests import GenerationRequest
from baton_serve.services.router.protocol.openai_responses import Explanation, Usage
from baton_serve.services.router.text.sampling_params import check_num_logprobs
from baton_serve.services.router.text.text_output import TextAccumulator, TextDelta
from baton_serve.services.router.text.thread_pools import ANSWERS


class SseDeltaWriter:
    """Writes the text deltas of one API call to its client as server-sent events (SSE). Implements
    `generation.DeltaConsumer`, so that a delta can be written in the same call that receives its tokens.
    """

    __slots__ = ("_encode", "_events", "_exchange", "_is_direct", "_num_logprobs")

    def __init__(
        self,
        events: EventStream,
        encode: Callable[[int, TextDelta], bytes],
        *,
        num_logprobs: Callable[[int, TextDelta], int] | None = None,
        is_direct: bool = True,
    ) -> None:
        """Create the writer for the stream `events`. `encode` takes the index of a choice and its next delta, and
        returns the events as bytes, or empty bytes if there is nothing to send.

        `num_logprobs` returns how many logprobs `encode` would format for the same arguments: many are encoded in a
        thread. If `is_direct` is False, deltas are never encoded in the call that receives their tokens, but only in
        `copy`.
        """
        self._events = events
        self._exchange = events.exchange
        self._encode = encode
        self._num_logprobs = num_logprobs
        self._is_direct = is_direct and events.exchange is not None

    async def copy(self, generation: TextGeneration) -> bytes:
        """Write the events of all deltas of `generation` to the client until it has ended. Return the bytes of the last
        events without writing them, so that the caller sends them together with the end of the stream. Raises the
        `ApiError` that ended a request, or `ClientGoneError` if the client has disconnected.
        """
        while True:
            # Without an exchange (another server, or a middleware of the operator) every write must be awaited.
            text_deltas = await generation.take(self if self._is_direct else None)
            count = self._num_logprobs
            if count is not None and sum([count(*text_delta) for text_delta in text_deltas]) > _LOGPROBS_INLINE:
                data = await ANSWERS.run(self._encode_all, text_deltas)
            else:
                data = self._encode_all(text_deltas)
            if generation.is_done:
                return data
            if data:
                await self._events.write(data)

    def _encode_all(self, text_deltas: Sequence[tuple[int, TextDelta]]) -> bytes:
        return b"".join([self._encode(choice, text_delta) for choice, text_delta in text_deltas])

    def can_write(self) -> bool:
        """Return whether the client has received everything that was written so far."""
        assert self._exchange is not None, "copy passes no consumer without an exchange"
        return self._exchange.is_writable

    def write_delta(self, choice: int, text_delta: TextDelta) -> None:
        """Write the events of the next delta of a choice to the client immediately. Call it only if `can_write`
        returned True.
        """
        assert self._exchange is not None, "copy passes no consumer without an exchange"
        if data := self._encode(choice, text_delta):
            self._exchange.write(data)


_encoder = msgspec.json.Encoder()
_NUL = _encoder.encode("\0")
_LOGPROBS_INLINE = 500
"""Largest number of logprobs that is formatted on the event loop. Formatting one takes 2 us."""


class AnswerFormat(Protocol):
    """Converts the text deltas of one answer to the response objects of one endpoint (chat or completions)."""

    object_name: str
    has_only_text: bool
    """True if all deltas of a choice but its last contain only text, so that they can be encoded without structs."""
    sends_tokens: bool
    """True if the client wants token ids: a delta with tokens but without text is then sent too."""
    echoes_logprobs: bool
    """True if the result of `opening` contains the logprobs of the prompt."""

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        """Return the elements of a chunk's `choices` that a stream sends for a choice before its first delta, such as
        the role or the echoed prompt; empty if there is nothing to send.
        """
        ...

    def beside_opening(self) -> msgspec.Struct | None:
        """Return further top-level fields for the chunks that `opening` returns, such as the prompt's token ids; None
        for no further fields.
        """
        ...

    def delta(self, choice: int, text_delta: TextDelta) -> msgspec.Struct | None:
        """Return the element of a chunk's `choices` for one delta, or None if there is nothing to send yet."""
        ...

    def whole(
        self, text_deltas: Sequence[TextDelta], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct:
        """Return the complete answer to a request without streaming. `text_deltas` has one delta for each choice, with
        all its text; `baton` is how the requests were placed and timed, or unset if the client did not ask for it.
        """
        ...


class ResponseHeader(msgspec.Struct, frozen=True):
    """The fields that are equal in all chunks of a stream: id, object, time of creation and model."""

    id: str
    object: str
    created: int
    model: str


class SseEncoder:
    """Encodes the chunks of one stream as server-sent events.

    The fields that all chunks share (`ResponseHeader`) are encoded once; each chunk then adds its choice, and the token
    counts (`usage`) if the client wants them.
    """

    def __init__(self, head: ResponseHeader) -> None:
        # Cut off the closing brace of the JSON object: every chunk continues it and closes it itself.
        self._start = b"data: " + _encoder.encode(head)[:-1] + b',"choices":['

    def choice(self, choice: msgspec.Struct, usage: bytes, beside: msgspec.Struct | None = None) -> bytes:
        """Return the event with one choice. `usage` is the JSON of the field `usage` with a leading comma, or empty;
        `beside` holds further top-level fields of the chunk, or is None.
        """
        extra = b"," + _encoder.encode(beside)[1:-1] if beside is not None else b""
        return b"".join((self._start, _encoder.encode(choice), b"]", extra, usage, b"}\n\n"))

    def last(self, usage: Usage, baton: Explanation | list[Explanation] | None) -> bytes:
        """Return the event after the last choice: it has no choices, only the token counts (`usage`) and how the
        requests were placed and timed (`baton`, left out if it is None).
        """
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
    """Send the answer of a generation, streamed or whole, and return once it is sent or the client has disconnected.

    `form` converts the text to the endpoint's format; `head` has the fields that are equal in all chunks. Raises
    `ApiError` as long as nothing has been sent; later errors are sent as an event of the stream. A disconnected client
    cancels the generation. The caller must end the generation in any case (`generation.ended`).
    """
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
    accumulators = [TextAccumulator() for _ in range(generation.num_choices)]
    num_logprobs = 0
    while not generation.is_done:
        for choice, text_delta in await generation.take():
            accumulators[choice].add(text_delta)
            num_logprobs += text_delta.num_logprobs
        check_num_logprobs(num_logprobs, remedy="stream it, or ask for fewer tokens or alternatives")
    baton = generation.explain() if explain else msgspec.UNSET
    text_deltas, usage = [choice.whole() for choice in accumulators], generation.usage()
    found = [one.prompt_logprobs for one in generation.lifecycles]
    num_prompt = sum([one.num_logprobs for one in found if one is not None]) * generation.num_choices
    if num_logprobs + num_prompt <= _LOGPROBS_INLINE:
        await send_json(send, form.whole(text_deltas, usage, baton))
        return
    # Formatting all of them here would delay all streams.
    encoded = await ANSWERS.run(lambda: _encoder.encode(form.whole(text_deltas, usage, baton)))
    await send_encoded(send, encoded)


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
        num_logprobs = None if form.has_only_text else encoder.num_logprobs
        writer = SseDeltaWriter(events, encoder.encode, num_logprobs=num_logprobs, is_direct=not form.echoes_logprobs)
        last = await writer.copy(generation)
        if encoder.wants_usage or explain:
            last += chunks.last(generation.usage(), generation.explain() if explain else None)
    except ApiError as exc:
        # Before the first event the gateway can still answer with the error's status. After it the status is 200, and
        # the error is the last event before `[DONE]`, as in vLLM.
        if not events.is_started:
            raise
        last = b"data: " + _encoder.encode(exc.body()) + b"\n\n"
    await events.end(last + DONE)


class _DeltaEncoder:
    """Converts the deltas of one generation to chunks, encoded as server-sent events. It is called for every token, so
    it does as little as possible.
    """

    __slots__ = (
        "_around",
        "_chunks",
        "_form",
        "_generation",
        "_is_continuous",
        "_num_counted",
        "_opened",
        "wants_usage",
    )

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
        self._num_counted = 0
        """Number of generated tokens in the usage of the last chunk."""
        self._around: list[tuple[bytes, bytes]] = []
        """Bytes before and after the text in the chunks of each choice, if these chunks differ in nothing else."""
        # With continuous usage the numbers change with every chunk, so they cannot be encoded in advance.
        if form.has_only_text and not self._is_continuous:
            self._around = [self._around_text(choice) for choice in range(generation.num_choices)]

    def encode(self, choice: int, text_delta: TextDelta) -> bytes:
        """Return the chunks for the next delta of a choice, as bytes of the stream; empty bytes if there is nothing to
        send.
        """
        # The fast path of most tokens: only the text itself is encoded.
        if self._around and text_delta.finish_reason is None and self._opened[choice]:
            before, after = self._around[choice]
            return b"%b%b%b" % (before, _encoder.encode(text_delta.text), after) if text_delta.text else b""
        opening = b"" if self._opened[choice] else self._opening(choice)
        usage = self._usage() if self.wants_usage else b""
        # The text of a token may still be incomplete: a character of several tokens, or the start of a stop string.
        has_content = text_delta.text or text_delta.logprobs or (text_delta.token_ids and self._form.sends_tokens)
        if not has_content and text_delta.finish_reason is None:
            return opening
        delta = self._form.delta(choice, text_delta)
        return opening if delta is None else opening + self._chunks.choice(delta, usage)

    def num_logprobs(self, choice: int, text_delta: TextDelta) -> int:
        """Return the number of logprobs that `encode` would format for a delta, with those of an echoed prompt."""
        if self._opened[choice] or not self._form.echoes_logprobs:
            return text_delta.num_logprobs
        encoded = self._generation.lifecycle(choice).prompt_logprobs
        return text_delta.num_logprobs + (0 if encoded is None else encoded.num_logprobs)

    def _opening(self, choice: int) -> bytes:
        self._opened[choice] = True
        # The role and the echoed prompt come before the first token of the choice, which is not counted, as in vLLM.
        usage = self._usage(is_opening=True) if self.wants_usage else b""
        beside = self._form.beside_opening()
        return b"".join([self._chunks.choice(first, usage, beside) for first in self._form.opening(choice)])

    def _around_text(self, choice: int) -> tuple[bytes, bytes]:
        """Encode a chunk of a choice with a placeholder as its text. Return the bytes before and after the placeholder,
        between which the text of a later delta is put.
        """
        # NUL can stand nowhere else in the chunk: ids and names of models contain no control characters. The search is
        # from the right, because the text comes after them.
        delta = self._form.delta(choice, TextDelta("\0", []))
        assert delta is not None
        before, _, after = self._chunks.choice(delta, self._usage() if self.wants_usage else b"").rpartition(_NUL)
        return before, after

    def _usage(self, *, is_opening: bool = False) -> bytes:
        # If the client wants usage, chunks before the last have `"usage": null`, as in OpenAI's API.
        if not self._is_continuous:
            return b',"usage":null'
        usage = self._generation.usage()
        if is_opening:
            counted = self._num_counted
            usage = msgspec.structs.replace(
                usage, completion_tokens=counted, total_tokens=usage.prompt_tokens + counted
            )
        self._num_counted = usage.completion_tokens
        return b',"usage":' + _encoder.encode(usage)
