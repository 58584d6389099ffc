"""Decodes audio files for a router in a process with limits of memory and time, and cuts them into windows.

    python -m baton_serve.audio_cutter LIMITS

LIMITS are `CutterLimits` in JSON. Decoders of audio are C code that reads files from clients: here a crash costs one
request, memory and processor time are bounded, and no key or prompt is in reach. A message in either direction is its
length in eight bytes, little-endian, and its content: the file; then `CutStart` and each `Window` in MessagePack. The
process ends with its standard input.
"""

import importlib.util
import resource
import signal
import sys
import wave
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_serve.audio_samples import Samples, cuts, mono, resampled, wav_of
from baton_serve.contracts.audio import (
    HEADER_BYTES,
    MAX_CHANNELS,
    MAX_RATE_HZ,
    RATE_STEP_HZ,
    SAMPLE_BYTES,
    CutStart,
    CutterLimits,
    Window,
)

FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64"})
"""Accepted formats, as libsndfile names them. Its other decoders never see files from clients."""
READ_FRAMES = 1 << 16
"""Number of frames that are decoded at a time."""


class AudioError(Exception):
    """The file cannot be used; the message is for the client."""


def main() -> None:
    """Serve files until the standard input ends."""
    limits = msgspec.json.decode(sys.argv[1], type=CutterLimits)
    _prepare(limits)
    while (size := sys.stdin.buffer.read(8)) and len(size) == 8:
        data = sys.stdin.buffer.read(int.from_bytes(size, "little"))
        # SIGPROF ends the process, even within a C function that never returns to Python.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        start, windows = begin_cut(data, limits)
        _write(start)
        for window in windows:
            _write(window)
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _write(message: CutStart | Window) -> None:
    content = msgspec.msgpack.encode(message)
    sys.stdout.buffer.write(len(content).to_bytes(8, "little") + content)
    sys.stdout.buffer.flush()


def _prepare(limits: CutterLimits) -> None:
    """Load the decoder, and then bound the memory in addition to what is used already."""
    if importlib.util.find_spec("soundfile") is not None:
        importlib.import_module("soundfile")
    # The router ends this process when it stops. Ctrl-C in a terminal also reaches this process, and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A crash of a decoder must not fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first number is the size of the address space in pages, and RLIMIT_AS bounds the same size.
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_bytes, used + limits.memory_bytes))


def begin_cut(data: bytes, limits: CutterLimits) -> tuple[CutStart, Iterator[Window]]:
    """Decode a file. Return what is known of it, and its windows, whose files are made one after the other."""
    try:
        samples = decoded(data, limits)
        if not len(samples):
            raise AudioError("the file has no audio")
        bounds = _bounds(samples, limits)
    except AudioError as exc:
        return CutStart(error=str(exc)), iter(())
    except MemoryError:
        return CutStart(error="the file needs too much memory"), iter(())
    num_bytes = (bounds[-1] - bounds[0]) * SAMPLE_BYTES + (len(bounds) - 1) * HEADER_BYTES
    start = CutStart(len(samples) / limits.rate_hz, num_windows=len(bounds) - 1, num_bytes=num_bytes)
    return start, (
        Window(begin / limits.rate_hz, (end - begin) / limits.rate_hz, wav_of(samples[begin:end], limits.rate_hz))
        for begin, end in pairwise(bounds)
    )


def _bounds(samples: Samples, limits: CutterLimits) -> list[int]:
    """Return the positions at which audio is cut, its begin and its end among them."""
    if limits.heard_s is None:
        return cuts(samples, limits.rate_hz, limits.window_s)
    return [0, min(len(samples), int(limits.heard_s * limits.rate_hz))]


def decoded(data: bytes, limits: CutterLimits) -> Samples:
    """Return the samples of a file at the wanted rate. Raises `AudioError`."""
    opened = _opened(data)
    rate, channels, frames = opened.rate_hz, opened.channels, opened.frames
    # Files state their size in the header, which is checked before anything is decoded; MP3 files may state none.
    if not 0 < rate <= MAX_RATE_HZ or rate % RATE_STEP_HZ:
        raise AudioError(f"its sample rate is {rate} Hz: use a multiple of {RATE_STEP_HZ} up to {MAX_RATE_HZ}")
    if not 0 < channels <= MAX_CHANNELS:
        raise AudioError(f"it has {channels} channels, the limit is {MAX_CHANNELS}")
    longest = int(limits.max_s * rate)
    parts: list[Samples] = []
    count = 0
    for block in opened.blocks() if frames <= longest else ():
        count += len(block)
        # Each block is averaged at once, so that memory holds one channel of the whole file and not all.
        parts.append(mono(block))
        if count > longest:
            break
    if max(count, frames) > longest:
        raise AudioError(f"it is longer than {limits.max_s:g} s, the limit of this server")
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    return resampled(whole, rate, limits.rate_hz)


class _Wav:
    """A WAV file with 16-bit samples, read without a library."""

    def __init__(self, data: bytes) -> None:
        self._file = wave.Wave_read(BytesIO(data))
        if self._file.getsampwidth() != SAMPLE_BYTES:
            raise wave.Error("its samples do not have 16 bits")
        self.rate_hz, self.channels = self._file.getframerate(), self._file.getnchannels()
        self.frames = self._file.getnframes()

    def blocks(self) -> Iterator[NDArray[np.int16]]:
        while data := self._file.readframes(READ_FRAMES):
            yield np.frombuffer(data, dtype="<i2").reshape(-1, self.channels)


class _Sound:
    """A file in any of `FORMATS`, read by libsndfile."""

    def __init__(self, library: Any, data: bytes) -> None:
        file: BinaryIO = BytesIO(data)
        self._library = library
        self._file = library.SoundFile(file)
        # Opening a file reads its header only. A decoder of another format never gets its samples.
        if self._file.format not in FORMATS:
            raise AudioError(f"its format is {self._file.format}: send WAV, FLAC, OGG or MP3")
        self.rate_hz, self.channels, self.frames = self._file.samplerate, self._file.channels, self._file.frames

    def blocks(self) -> Iterator[NDArray[np.int16]]:
        try:
            while len(block := self._file.read(READ_FRAMES, dtype="int16", always_2d=True)):
                yield block
        except self._library.LibsndfileError as exc:
            raise AudioError("it is damaged: only a part of it can be decoded") from exc


def _opened(data: bytes) -> _Wav | _Sound:
    """Open a file. Raises `AudioError`."""
    if importlib.util.find_spec("soundfile") is None:
        try:
            return _Wav(data)
        except (wave.Error, EOFError) as exc:
            raise AudioError(
                f"it is not a WAV file with 16-bit samples ({exc}); for other formats the server needs the package"
                " soundfile (pip install 'baton-serve[audio]')"
            ) from exc
    library: Any = importlib.import_module("soundfile")
    try:
        return _Sound(library, data)
    except (library.LibsndfileError, RuntimeError, TypeError, ValueError) as exc:
        raise AudioError("it cannot be decoded: send WAV, FLAC, OGG (Vorbis or Opus) or MP3") from exc


if __name__ == "__main__":
    main()
