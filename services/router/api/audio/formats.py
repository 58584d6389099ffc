"""Build the answers to transcriptions and translations: JSON, text, subtitles, and chunks of streams."""

from collections.abc import Sequence
from math import ceil
from typing import Literal

import msgspec

from baton_serve.services.router.api.audio.schema import TranscriptionRequest
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.speech.speech_profile import SpeechProfile, Task
from baton_serve.services.router.text.speech.transcript import (
    Segment,
    TranscribedWindow,
    segments_of,
    srt,
    text_tokens,
    vtt,
)

_encoder = msgspec.json.Encoder()


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The field `usage` of a transcription: the length of the audio in seconds, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class PlainTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer with `response_format: json`."""

    text: str
    usage: DurationUsage


class VerboseTranscript(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an answer with `response_format: verbose_json`. `duration` is the length of the audio in seconds."""

    task: Task
    language: str | None
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage


class ContentDelta(msgspec.Struct, frozen=True):
    """The new text in one chunk of a streamed transcription."""

    content: str


class TranscriptChoice(msgspec.Struct, frozen=True):
    """The only element of `choices` in a chunk of a streamed transcription."""

    delta: ContentDelta
    finish_reason: str | None = None
    stop_reason: None = None


class TranscriptChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chunk of a streamed transcription, with the field names of vLLM."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TranscriptChoice] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | None = None

    def event(self) -> bytes:
        """Return the chunk as a server-sent event, encoded."""
        return b"data: " + _encoder.encode(self) + b"\n\n"


class WholeAnswer(msgspec.Struct, frozen=True):
    """The body of an HTTP response, encoded, and its media type (`content-type`)."""

    content_type: bytes
    body: bytes


def whole_answer(
    request: TranscriptionRequest,
    windows: Sequence[TranscribedWindow],
    profile: SpeechProfile,
    detokenizer: Detokenizer,
    *,
    task: Task,
    language: str | None,
    duration_s: float,
) -> WholeAnswer:
    """Return the answer to a transcription request that is not streamed, in the request's `response_format`.

    `windows` are the parts of the audio file with their tokens, in order; `duration_s` is the length of the file.
    """
    # Windows follow each other as tokens of words do: each begins with its own space.
    text = "".join(detokenizer.text(text_tokens(window.token_ids, profile)) for window in windows).strip()
    usage = DurationUsage(seconds=ceil(duration_s))
    if request.response_format == "text":
        return WholeAnswer(b"text/plain; charset=utf-8", f"{text}\n".encode())
    if request.response_format == "json":
        return WholeAnswer(b"application/json", _encoder.encode(PlainTranscript(text=text, usage=usage)))
    segments = segments_of(windows, profile, detokenizer)
    if request.response_format == "srt":
        return WholeAnswer(b"text/plain; charset=utf-8", srt(segments).encode())
    if request.response_format == "vtt":
        return WholeAnswer(b"text/vtt; charset=utf-8", vtt(segments).encode())
    verbose = VerboseTranscript(
        task=task, language=language, duration=round(duration_s, 2), text=text, segments=segments, usage=usage
    )
    return WholeAnswer(b"application/json", _encoder.encode(verbose))
