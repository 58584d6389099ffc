"""Converts the tokens of transcribed windows to segments with times, and segments to subtitles; measures repetition."""

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.services.router.text.detokenizer import Detokenizer
from baton_serve.services.router.text.speech.speech_profile import SpeechProfile


class TranscribedWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A window of an audio file and the tokens that were generated for it. `start_s` is the window's start in the
    file.
    """

    start_s: float
    duration_s: float
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    temperature: float = 0.0


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a transcript, with the names of OpenAI's API. Times are in seconds since the start of the file."""

    id: int
    seek: int
    """Start of the window, in hundredths of a second."""
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None
    """It is None: the token for silence is not asked for."""


class TimedTokens(msgspec.Struct, frozen=True):
    """The text tokens between two timestamps of a window. `start_s` and `end_s` are in seconds since the start of the
    window.
    """

    start_s: float
    end_s: float
    token_ids: list[int]


def text_tokens(token_ids: Iterable[int], profile: SpeechProfile) -> list[int]:
    """Return only those tokens that are text, without timestamps and the end-of-sequence token."""
    return [token for token in token_ids if token < profile.first_timestamp and token != profile.end_token]


def timed_tokens(token_ids: Sequence[int], duration_s: float, profile: SpeechProfile) -> list[TimedTokens]:
    """Divide the tokens of a window with timestamps into segments; empty for a window without text. `duration_s` is the
    window's length. Text whose end has no timestamp lasts until the window ends.
    """
    found: list[TimedTokens] = []
    start_s, text = 0.0, list[int]()
    for token in token_ids:
        if token < profile.first_timestamp:
            text += [token] if token != profile.end_token else []
            continue
        at_s = (token - profile.first_timestamp) * profile.seconds_per_timestamp
        # A timestamp ends the text before it, and begins the text after it.
        if text:
            found.append(TimedTokens(start_s, at_s, text))
            text = []
        start_s = at_s
    if text:
        # The model sees the last window filled with silence, so a time may lie behind the window's end.
        found.append(TimedTokens(start_s, max(start_s, duration_s), text))
    return found


def segments_of(
    windows: Iterable[TranscribedWindow], profile: SpeechProfile, detokenizer: Detokenizer
) -> list[Segment]:
    """Return the segments of all windows of an audio file as text, in order."""
    found: list[Segment] = []
    for window in windows:
        quality = {
            "temperature": window.temperature,
            "avg_logprob": average_logprob(window),
            "compression_ratio": compression_ratio(detokenizer.text(text_tokens(window.token_ids, profile))),
        }
        for timed in timed_tokens(window.token_ids, window.duration_s, profile):
            found.append(
                Segment(
                    id=len(found),
                    seek=round(window.start_s * 100),
                    start=round(window.start_s + timed.start_s, 2),
                    end=round(window.start_s + timed.end_s, 2),
                    text=detokenizer.text(timed.token_ids),
                    tokens=timed.token_ids,
                    **quality,
                )
            )
    return found


def average_logprob(window: TranscribedWindow) -> float:
    """Return the mean log-probability of a window's tokens, or 0 if the window has no logprobs."""
    chosen = [one.chosen.logprob for one in window.logprobs]
    return sum(chosen) / len(chosen) if chosen else 0.0


def compression_ratio(text: str) -> float:
    """Return the size of a text divided by its compressed size. Text that repeats itself has a high ratio."""
    # Whisper measures it with zlib too, and its limit is meant for zlib.
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def srt(segments: Iterable[Segment]) -> str:
    """Return segments as the text of a subtitle file in the format SubRip."""
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """Return segments as the text of a subtitle file in the format WebVTT."""
    lines = (f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_line(one)}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(lines)


def _line(segment: Segment) -> str:
    # An arrow within the text would be read as a time.
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, separator: str) -> str:
    """Return a time as `HH:MM:SS` and milliseconds; `separator` stands before the milliseconds."""
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{separator}{thousandths:03d}"
