"""Limits of audio that router and instances agree on, and the messages of the process that decodes files.

A window of audio travels to an instance as a WAV file with 16-bit samples, at the rate that the model reads: what is
lost by rounding is less than what lossy formats lose, and instances need no other decoder.
"""

import msgspec

SAMPLE_BYTES = 2
"""Bytes of one sample of one channel."""
HEADER_BYTES = 44
"""Bytes before the samples of a WAV file that this project writes."""
MAX_RATE_HZ = 96_000
"""Highest sample rate of a file."""
RATE_STEP_HZ = 25
"""Sample rates are multiples of this, as all usual ones are: the tables for resampling others would be very large."""
MAX_CHANNELS = 8
"""Largest number of channels of a file. They are averaged."""


class CutterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How audio files are cut into windows, and the limits for one file. `rate_hz` and `window_s` are what the speech
    model takes.

    With `heard_s`, a file has a single window instead, whose length in seconds is at most this; what follows is left
    out. `max_s` bounds the length of the audio, `cpu_s` the processor time for it, and `memory_bytes` the address space
    in addition to that of the process itself.
    """

    rate_hz: int
    window_s: float
    heard_s: float | None = None
    max_s: float = 7200.0
    cpu_s: float = 60.0
    memory_bytes: int = 2 * 1024 * 1024 * 1024


def is_wav(data: bytes | memoryview) -> bool:
    """Return whether a file is a WAV file, by its first bytes. No image format and no header of media has them."""
    return bytes(data[:4]) == b"RIFF" and bytes(data[8:12]) == b"WAVE"


class Window(msgspec.Struct, frozen=True):
    """One window of an audio file, as the speech model takes it: its start and length in seconds, and its samples as a
    WAV file."""

    start_s: float
    duration_s: float
    file: bytes


class CutStart(msgspec.Struct, frozen=True):
    """The first message about a file that was decoded: how long it is, how many windows follow, and how many bytes
    their files have together; or in `error` the reason why it cannot be used. Each window follows as a message of its
    own, so that a router never copies all of a long file at once.
    """

    duration_s: float = 0.0
    num_windows: int = 0
    num_bytes: int = 0
    error: str = ""


class Cut(msgspec.Struct, frozen=True):
    """The result of cutting an audio file: its windows in order, or in `error` the reason why it cannot be used."""

    duration_s: float = 0.0
    windows: list[Window] = []
    error: str = ""
