"""Tokens of transcribed windows become segments, and segments subtitles."""

from typing import Any

from baton_serve.services.router.text.speech.speech_profile import SpeechProfile
from baton_serve.services.router.text.speech.transcript import Segment, compression_ratio, srt, timed_tokens, vtt

PROFILE = SpeechProfile(
    window_s=30.0,
    rate_hz=16_000,
    source_tokens=1500,
    start_token=50,
    end_token=49,
    previous_token=52,
    no_timestamps_token=99,
    languages={"en": 51},
    tasks={"transcribe": 53, "translate": 54},
    suppressed=[],
    first_suppressed=[],
    max_first_timestamp=None,
    max_previous_tokens=3,
)


def at(seconds: float) -> int:
    return 100 + round(seconds * 50)


def times(tokens: list[int], duration_s: float = 8.0) -> list[tuple[float, float, list[int]]]:
    return [(one.start_s, one.end_s, one.token_ids) for one in timed_tokens(tokens, duration_s, PROFILE)]


def test_pairs_of_timestamps_bound_the_text_between_them() -> None:
    tokens = [at(0), 1, 2, at(2.5), at(3), 3, at(4), 49]
    assert times(tokens) == [(0.0, 2.5, [1, 2]), (3.0, 4.0, [3])]


def test_text_without_an_end_lasts_until_the_window_ends() -> None:
    assert times([at(1), 1, at(2), at(2), 5]) == [(1.0, 2.0, [1]), (2.0, 8.0, [5])]
    assert times([1, 2]) == [(0.0, 8.0, [1, 2])]
    assert times([at(0), at(0), 49]) == []


def test_prompts_have_the_language_the_task_and_the_last_tokens_of_earlier_text() -> None:
    assert PROFILE.prompt("EN", "translate", [1, 2, 3, 4], has_timestamps=False) == [52, 2, 3, 4, 50, 51, 54, 99]
    assert PROFILE.prompt("en", "transcribe", has_timestamps=True) == [50, 51, 53]


def test_subtitles() -> None:
    values: dict[str, Any] = {
        "seek": 0,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": -0.1,
        "compression_ratio": 1.0,
    }
    segments = [
        Segment(id=0, start=0.0, end=2.5, text=" One.", **values),
        Segment(id=1, start=3661.02, end=3662.0, text=" a --> b", **values),
    ]
    second = "01:01:01{0}020 --> 01:01:02{0}000\na -> b\n\n"
    assert srt(segments) == "1\n00:00:00,000 --> 00:00:02,500\nOne.\n\n2\n" + second.format(",")
    assert vtt(segments) == "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nOne.\n\n" + second.format(".")


def test_text_that_repeats_itself_has_a_high_ratio() -> None:
    assert compression_ratio("again and " * 40) > 2.4 > compression_ratio("A sentence that says something once.")
