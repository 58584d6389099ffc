"""Sends a generation to its client, streamed or whole. The shape of the API is the format's concern."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from services.router.asgi import DisconnectWatch, EventStream, Receive, RequestContext, Send, send_json
from services.router.errors import ApiError, ClientGoneError
from services.router.generation import Answering
from services.router.openai_schema import GenerationRequest
from services.router.responses import Usage
from services.router.timeline import Explanation
from services.router.writer import Gathered, Piece

_encoder = msgspec.json.Encoder()


class Format(Protocol):
    """One API's shape. `pieces` of a whole answer are merged: one a choice."""

    object_name: str

    def opening(self, choice: int) -> Sequence[msgspec.Struct]:
        """Choices to send before a choice's first piece."""
        ...

    def delta(self, choice: int, piece: Piece) -> msgspec.Struct | None:
        """None when there is nothing to send yet."""
        ...

    def whole(
        self, pieces: Sequence[Piece], usage: Usage, baton: Explanation | list[Explanation] | msgspec.UnsetType
    ) -> msgspec.Struct: ...


class Head(msgspec.Struct, frozen=True):
    """What every chunk of a stream begins with."""

    id: str
    object: str
    created: int
    model: str


class _Tail(msgspec.Struct, frozen=True):
    choices: list[msgspec.Struct]
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    baton: Explanation | list[Explanation] | msgspec.UnsetType = msgspec.UNSET


class Chunks:
    """Encodes chunks. The head is encoded once; each chunk adds its choice, and usage where it was asked for."""

    def __init__(self, head: Head) -> None:
        self._start = b"data: " + _encoder.encode(head)[:-1] + b',"choices":['

    def choice(self, choice: msgspec.Struct, usage: bytes) -> bytes:
        return b"".join((self._start, _encoder.encode(choice), b"]", usage, b"}\n\n"))

    def last(self, usage: Usage, baton: Explanation | list[Explanation] | None) -> bytes:
        extra = b',"baton":' + _encoder.encode(baton) if baton is not None else b""
        return b"".join((self._start, b'],"usage":', _encoder.encode(usage), extra, b"}\n\n"))


async def answer(
    request: GenerationRequest,
    generation: Answering,
    form: Format,
    head: Head,
    *,
    context: RequestContext,
    receive: Receive,
    send: Send,
) -> None:
    """Raises `ApiError` as long as nothing was sent. A client that goes away ends the generation."""
    try:
        with DisconnectWatch(receive, generation.abandon):
            if request.stream:
                events = EventStream(send, slow_client_s=context.limits.slow_client_s)
                await _stream(request, generation, form, Chunks(head), events, explain=context.explain)
            else:
                await _whole(generation, form, send, explain=context.explain)
    except ClientGoneError:
        return
    finally:
        generation.cancel("its answer has ended")


async def _whole(generation: Answering, form: Format, send: Send, *, explain: bool) -> None:
    gathered = [Gathered() for _ in range(generation.num_choices)]
    while not generation.is_done:
        for choice, piece in await generation.take():
            gathered[choice].add(piece)
    baton = generation.explain() if explain else msgspec.UNSET
    await send_json(send, form.whole([one.whole() for one in gathered], generation.usage(), baton))


async def _stream(
    request: GenerationRequest,
    generation: Answering,
    form: Format,
    chunks: Chunks,
    events: EventStream,
    *,
    explain: bool,
) -> None:
    options = request.stream_options
    wants_usage = options is not None and bool(options.include_usage)
    is_continuous = wants_usage and options is not None and bool(options.continuous_usage_stats)
    opened = [False] * generation.num_choices
    try:
        while not generation.is_done:
            out: list[bytes] = []
            for choice, piece in await generation.take():
                usage = _usage(generation, is_continuous) if wants_usage else b""
                if not opened[choice]:
                    opened[choice] = True
                    out += [chunks.choice(first, usage) for first in form.opening(choice)]
                if piece.text or piece.logprobs or piece.finish_reason is not None:
                    delta = form.delta(choice, piece)
                    out += [chunks.choice(delta, usage)] if delta is not None else []
            if out:
                await events.write(b"".join(out))
        if wants_usage or explain:
            await events.write(chunks.last(generation.usage(), generation.explain() if explain else None))
    except ApiError as exc:
        if not events.is_started:
            raise
        await events.write(b"data: " + _encoder.encode(exc.body()) + b"\n\n")
    await events.end()


def _usage(generation: Answering, is_continuous: bool) -> bytes:
    return b',"usage":' + (_encoder.encode(generation.usage()) if is_continuous else b"null")
