"""Serve `POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

import msgspec

from baton_serve.contracts.audio import Cut
from baton_serve.services.router.api.audio.formats import ContentDelta, TranscriptChoice, TranscriptChunk, whole_answer
from baton_serve.services.router.api.audio.schema import TranscriptionRequest, read_request
from baton_serve.services.router.api.audio.windows import FileTranscriber, OrderedText
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import (
    DONE,
    EventStream,
    Receive,
    RequestContext,
    Scope,
    Send,
    header,
    read_form,
)
from baton_serve.services.router.protocol.errors import ApiError, BadRequestError, ClientGoneError
from baton_serve.services.router.protocol.form_data import check_origin, parse_form
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.multimodal.image_memory import ImageReservation
from baton_serve.services.router.text.speech.speech_profile import SpeechProfile, Task
from baton_serve.services.router.text.speech.transcript import text_tokens
from baton_serve.services.router.text.text_output import TextDelta


class TranscriptionEndpoint:
    """Answers `POST /v1/audio/transcriptions` or `/v1/audio/translations` (`task` says which), streamed or as a whole.
    It is a plain ASGI application.
    """

    def __init__(self, service: ModelService, schema: type[TranscriptionRequest], task: Task) -> None:
        self._service = service
        self._schema = schema
        self._task: Task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, context = self._service, RequestContext.of(scope)
        # The origin is checked before the body is read, so that a foreign page cannot make the router hold files.
        check_origin(header(scope, b"origin"), header(scope, b"host"), service.settings.allowed_origins)
        form = parse_form(
            header(scope, b"content-type"), await read_form(scope, receive, service.settings.max_audio_bytes)
        )
        request = read_request(form, self._schema)
        if form.file is None:
            raise BadRequestError("file: the form has no file", param="file")
        service = await service.serving(request.model)
        model = service.view.model_name(request.model)
        profile, cutter = service.model.speech, service.audio_cutter
        if profile is None or cutter is None:
            raise BadRequestError(
                f"the model {model} does not transcribe audio: serve a Whisper model", code="unsupported_endpoint"
            )
        service.limits()  # called for its errors, before the file is decoded
        profile.check_language(request.language)
        with ImageReservation(service.image_memory, context.caller.name) as memory:
            # The windows stay in memory until the answer ends, and share the limit of images.
            cut = await cutter.cut(form.file, memory.reserve)
            form.file = None  # the windows are kept instead, for replays
            head = TranscriptChunk(
                id=f"{self._task}-{context.request_id}",
                object=f"{'transcription' if self._task == 'transcribe' else 'translation'}.chunk",
                created=service.now(),
                model=model,
            )
            transcriber = FileTranscriber(service, profile, request, cut, api_id=head.id, context=context)
            answer = _Answer(service, profile, request, cut, transcriber, self._task)
            try:
                with transcriber.watch(receive):
                    if request.stream:
                        exchange, seconds = context.exchange, context.limits.slow_client_s
                        await answer.stream(EventStream(send, slow_client_s=seconds, exchange=exchange), head)
                    else:
                        await answer.send(send)
            except ClientGoneError:
                return


class _Answer:
    """The answer to one request to transcribe or translate an audio file. It knows the request, the file's windows and
    the `FileTranscriber` that computes their text.
    """

    def __init__(
        self,
        service: ModelService,
        profile: SpeechProfile,
        request: TranscriptionRequest,
        cut: Cut,
        transcriber: FileTranscriber,
        task: Task,
    ) -> None:
        self._service = service
        self._profile = profile
        self._request = request
        self._cut = cut
        self._transcriber = transcriber
        self._task: Task = task

    async def send(self, send: Send) -> None:
        """Compute the text of the whole file and send it as one HTTP response. Raises `ApiError` if it cannot be
        computed.
        """
        language = await self._language()
        windows = await self._transcriber.transcribe(language, self._task)
        answer = whole_answer(
            self._request,
            windows,
            self._profile,
            self._service.model.detokenizer,
            task=self._task,
            language=language,
            duration_s=self._cut.duration_s,
        )
        fields = [(b"content-type", answer.content_type), (b"content-length", str(len(answer.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": answer.body})

    async def stream(self, events: EventStream, head: TranscriptChunk) -> None:
        """Send the text as it is generated, window after window of the audio file. `head` has the fields that all
        chunks share. Raises `ApiError` before the first event; later errors are sent as the last event.
        """
        texts = _WindowTexts(self._service.model.detokenizer, self._profile, len(self._cut.windows))
        ordered = OrderedText(len(self._cut.windows), texts.push)
        reason: str | None = "stop"
        try:
            language = await self._language()
            async for number, delta in self._transcriber.deltas(language, self._task):
                # If one window was cut off, the whole text is incomplete.
                reason = delta.finish_reason if delta.finish_reason == "length" else reason
                if text := ordered.push(number, delta):
                    await events.write(_chunk(head, text).event())
            last = _chunk(head, "", reason).event()
            if self._request.stream_include_usage:
                last += msgspec.structs.replace(head, choices=[], usage=self._transcriber.usage).event()
        except ApiError as exc:
            # After the first event the status is 200, and the error is the last event before `[DONE]`, as in vLLM.
            if not events.is_started:
                raise
            last = b"data: " + msgspec.json.encode(exc.body()) + b"\n\n"
        await events.end(last + DONE)

    async def _language(self) -> str | None:
        """Return the code of the audio's language (such as `en`): the one that the client states, or else the one that
        the model detects. Return None if the model knows only one language.
        """
        if not self._profile.languages:
            return None
        return (self._request.language or await self._transcriber.detect_language()).lower()


class _WindowTexts:
    """Converts the tokens of each window of an audio file to text as they arrive, without the timestamp tokens."""

    def __init__(self, detokenizer: Detokenizer, profile: SpeechProfile, num_windows: int) -> None:
        self._profile = profile
        self._streams = [detokenizer.stream() for _ in range(num_windows)]

    def push(self, number: int, delta: TextDelta) -> str:
        """Return the new text of window `number` that the tokens of `delta` complete; it may be empty."""
        text = self._streams[number].push(text_tokens(delta.token_ids, self._profile))
        return text if delta.finish_reason is None else text + self._streams[number].finish()


def _chunk(head: TranscriptChunk, text: str, reason: str | None = None) -> TranscriptChunk:
    return msgspec.structs.replace(head, choices=[TranscriptChoice(ContentDelta(text), reason)])
