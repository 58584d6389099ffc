"""Send a chat answer as content blocks, streamed (SSE) or as a whole, for the Messages and Responses APIs.

A `Dialect` (in `messages.endpoint` and `responses.endpoint`) converts blocks and their changes to the events and
answers of its API.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from baton_serve.services.router.api.answer_writer import SseDeltaWriter
from baton_serve.services.router.api.chat_preparation import BegunChat
from baton_serve.services.router.api.content_blocks import Block, Change, ContentBlockBuilder
from baton_serve.services.router.protocol.asgi import (
    DisconnectWatch,
    EventStream,
    Receive,
    RequestContext,
    Send,
    send_encoded,
)
from baton_serve.services.router.protocol.errors import ApiError, ClientGoneError
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.text.message_reader import MessageReader
from baton_serve.services.router.text.scanning.message_parts import Content, Part
from baton_serve.services.router.text.text_output import TextDelta
from baton_serve.services.router.text.thread_pools import ANSWERS

_encoder = msgspec.json.Encoder()
_LOGPROBS_INLINE = 100
"""Largest number of tokens with logprobs of an answer that is formatted on the event loop."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """Describes the end of an answer: its token counts, and why it ended."""

    usage: Usage
    has_calls: bool
    """True if the model called tools."""
    is_cut: bool
    """True if the answer reached the limit of tokens."""
    stop: str | None
    """The stop string that ended the answer, or None."""


class SseEvent(msgspec.Struct, frozen=True):
    """A server-sent event with a name, as the Messages and Responses APIs have it; events of OpenAI's chat API have no
    name.
    """

    name: str
    data: msgspec.Struct


class Dialect(Protocol):
    """Converts one answer to the events and response objects of one API (Responses or Messages)."""

    def begin(self, usage: Usage) -> Sequence[SseEvent]:
        """Return the events with which a stream begins, before the first content block. `usage` has the prompt's token
        counts.
        """
        ...

    def change(self, change: Change) -> Sequence[SseEvent]:
        """Return the events for one change of the answer: a content block was opened, got more text or was closed."""
        ...

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> Sequence[SseEvent]:
        """Return the events after the last content block. `blocks` are all blocks of the answer; `end` says why it
        ended.
        """
        ...

    def failure(self, error: ApiError) -> Sequence[SseEvent]:
        """Return the last events of a stream whose generation failed with `error`."""
        ...

    def whole(self, blocks: Sequence[Block], end: AnswerEnd) -> msgspec.Struct:
        """Return the complete answer, for a request without streaming. `blocks` are its content blocks, complete."""
        ...


Keep = Callable[[bytes], Awaitable[None]]
"""Stores a complete answer, encoded as JSON. It must not raise: the client gets its answer in any case."""


async def serve(
    begun: BegunChat,
    dialect: Dialect,
    *,
    stream: bool,
    context: RequestContext,
    receive: Receive,
    send: Send,
    keep: Keep | None = None,
) -> None:
    """Send the answer of a chat in the format of `dialect`, and return once it is sent or the client has disconnected.

    Raises `ApiError` as long as nothing has been sent; later errors are sent as events of the stream. A disconnected
    client cancels the generation. The caller must end the generation in any case (`generation.ended`). `keep`, if
    given, stores the complete answer as JSON before the client gets the end of it, so that the client can refer to it
    at once.
    """
    try:
        with DisconnectWatch(receive, begun.generation.abandon, context.exchange):
            if stream:
                events = EventStream(send, slow_client_s=context.limits.slow_client_s, exchange=context.exchange)
                await _stream(begun, dialect, events, keep)
            else:
                encoded = await whole_answer(begun, dialect)
                if keep is not None:
                    await keep(encoded)
                await send_encoded(send, encoded)
    except ClientGoneError:
        return


async def whole_answer(begun: BegunChat, dialect: Dialect, on_delta: Callable[[], None] = lambda: None) -> bytes:
    """Wait for the complete answer to a chat and return it in the format of `dialect`, as JSON. `on_delta` is called
    each time that new tokens have arrived.

    Raises the `ApiError` that ended the generation, or `ClientGoneError`.
    """
    answer = _Answer(begun)
    while not begun.generation.is_done:
        answer.changes([text_delta for _, text_delta in await begun.generation.take()])
        on_delta()
    return await _encoded_whole(answer, dialect)


async def _encoded_whole(answer: "_Answer", dialect: Dialect) -> bytes:
    blocks, end = answer.blocks.blocks, answer.end()
    if sum([len(block.logprobs) for block in blocks]) <= _LOGPROBS_INLINE:
        return _encoder.encode(dialect.whole(blocks, end))
    # Formatting takes 2 us for each logprob, which would delay all streams.
    return await ANSWERS.run(lambda: _encoder.encode(dialect.whole(blocks, end)))


async def _stream(begun: BegunChat, dialect: Dialect, events: EventStream, keep: Keep | None) -> None:
    generation, answer = begun.generation, _Answer(begun)
    has_begun = False

    def encode(_: int, text_delta: TextDelta) -> bytes:
        nonlocal has_begun
        # The first events are sent with the first delta and not before: until then an error gets its own HTTP status.
        out = [] if has_begun else list(dialect.begin(generation.usage()))
        has_begun = True
        for change in answer.changes([text_delta]):
            out += dialect.change(change)
        return _encoded(out)

    try:
        last = await SseDeltaWriter(events, encode).copy(generation)
        last += _encoded(dialect.end(answer.blocks.blocks, answer.end()))
        if keep is not None:
            await keep(await _encoded_whole(answer, dialect))
    except ApiError as exc:
        if not events.is_started:
            raise
        last = _encoded(dialect.failure(exc))
    await events.end(last)


class _Answer:
    """Builds the content blocks of an answer from its text deltas. The Messages and Responses APIs have one choice, so
    all deltas are of one sequence.
    """

    def __init__(self, begun: BegunChat) -> None:
        self.blocks = ContentBlockBuilder()
        self._generation = begun.generation
        # Without tool calls and reasoning nothing in the text needs to be parsed.
        self._reader: MessageReader | None = None if begun.message_format.is_plain else begun.message_format.reader()
        self._last: TextDelta | None = None

    def changes(self, text_deltas: Sequence[TextDelta]) -> list[Change]:
        """Add the deltas to the content blocks of the answer and return what has changed in the blocks, in order."""
        changes: list[Change] = []
        for text_delta in text_deltas:
            changes += self.blocks.push(self._parts(text_delta), text_delta.logprobs or ())
            if text_delta.finish_reason is not None:
                self._last = text_delta
                changes += self.blocks.finish()
        return changes

    def end(self) -> AnswerEnd:
        """Return the token counts of the answer and why it ended. Call it only after the last delta was given to
        `changes`.
        """
        assert self._last is not None, "the answer has not ended"
        # `stop_reason` may also be the id of a stop token, which these APIs cannot express.
        stop = self._last.stop_reason
        return AnswerEnd(
            usage=self._generation.usage(),
            has_calls=any(block.kind == "call" for block in self.blocks.blocks),
            is_cut=self._last.finish_reason == "length",
            stop=stop if isinstance(stop, str) else None,
        )

    def _parts(self, text_delta: TextDelta) -> list[Part]:
        if self._reader is None:
            return [Content(text_delta.text)] if text_delta.text else []
        return self._reader.parts(text_delta.text, is_last=text_delta.finish_reason is not None)


def _encoded(events: Sequence[SseEvent]) -> bytes:
    return b"".join(
        b"event: " + event.name.encode() + b"\ndata: " + _encoder.encode(event.data) + b"\n\n" for event in events
    )
