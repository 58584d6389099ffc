"""Computes with samples of audio: mixes to one channel, resamples, and finds the quiet places at which long audio is
cut.

Instances and the router's process that decodes files use these functions; the router itself never imports numpy.
"""

from math import ceil, gcd, pi
from struct import pack, unpack

import numpy as np
from numpy.typing import NDArray

from baton_serve.contracts.audio import HEADER_BYTES, SAMPLE_BYTES, is_wav

Samples = NDArray[np.float32]
"""Samples of one channel, from -1 to 1."""

_HEADER = "<4sI4s4sIHHIIHH4sI"
"""The fields of a WAV file before its samples, as `struct` names them."""
_INTEGERS, _FLOATS = 1, 3
"""The format of a WAV file's samples, as its header states it."""
FILTER_ZEROS = 24
"""Zero crossings of the resampling filter on each side. More make a steeper filter."""
PASS_BAND = 0.94
"""Part of the lower rate's band that the resampling filter passes."""
QUIET_FRAME_S = 0.1
"""Length of the frames whose loudness is compared to find a place for a cut, in seconds."""
SEARCHED_RATIO = 0.1
"""Part of a window, at its end, in which the quietest frame is looked for."""


def mono(samples: NDArray[np.int16]) -> Samples:
    """Return the mean of all channels. `samples` is [count, channels]."""
    # The divisor is 32768 and not 32767: the lowest sample becomes exactly -1.
    return np.asarray(samples.mean(axis=1, dtype=np.float32) / 32768.0, dtype=np.float32)


def wav_of(samples: Samples, rate_hz: int, *, is_exact: bool = False) -> bytes:
    """Return samples as a WAV file with 16-bit integers, or with `is_exact` with floats as they are."""
    if is_exact:
        data, tag, size = samples.astype("<f4").tobytes(), _FLOATS, 4
    else:
        # A sample of exactly 1 would become 32768, which does not fit into 16 bits.
        data = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()
        tag, size = _INTEGERS, SAMPLE_BYTES
    body = HEADER_BYTES - 8 + len(data)
    fields = (b"RIFF", body, b"WAVE", b"fmt ", 16, tag, 1, rate_hz, rate_hz * size, size, 8 * size, b"data", len(data))
    return pack(_HEADER, *fields) + data


def has_floats(data: bytes | memoryview) -> bool:
    """Return whether a file begins like a WAV file with floats that `wav_of` has written."""
    return len(data) > HEADER_BYTES and is_wav(data) and int(unpack(_HEADER, data[:HEADER_BYTES])[5]) == _FLOATS


def read_wav(data: bytes | memoryview) -> tuple[Samples, int]:
    """Return the samples of a WAV file that `wav_of` has written, and its rate in Hz. Raises `ValueError` for any other
    file."""
    if len(data) <= HEADER_BYTES:
        raise ValueError("it has no samples")
    fields = unpack(_HEADER, data[:HEADER_BYTES])
    tag, rate_hz, size, count = fields[5], fields[7], fields[9], fields[12]
    expected = (b"RIFF", HEADER_BYTES - 8 + count, b"WAVE", b"fmt ", 16, tag, 1, rate_hz, rate_hz * size, size)
    is_known = (tag, size) in ((_INTEGERS, SAMPLE_BYTES), (_FLOATS, 4))
    if not is_known or fields[:10] != expected or count != len(data) - HEADER_BYTES or count % size:
        raise ValueError("it is not a WAV file of one channel as instances take it")
    body = data[HEADER_BYTES:]
    if tag == _INTEGERS:
        return mono(np.frombuffer(body, dtype="<i2")[:, None]), rate_hz
    samples = np.frombuffer(body, dtype="<f4").astype(np.float32)
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are no numbers")
    return samples, rate_hz


def resampled(samples: Samples, rate_hz: int, wanted_hz: int) -> Samples:
    """Return the samples at another rate: a band-limited interpolation with a windowed sinc.

    Each phase of the output has a filter of its own, and one product applies all of them.
    """
    if rate_hz == wanted_hz:
        return samples
    # The filters repeat after as many input samples as the two rates have in lowest terms.
    divisor = gcd(rate_hz, wanted_hz)
    step, phases = rate_hz // divisor, wanted_hz // divisor
    # Frequencies above half of the lower rate would be mirrored into the result.
    cutoff = PASS_BAND * min(1.0, wanted_hz / rate_hz)
    reach = ceil(FILTER_ZEROS / cutoff)
    # [taps, phases]: the time from an output sample to each input sample around it, in input samples.
    times = np.arange(-reach, reach + step)[:, None] - np.arange(phases)[None] * step / phases
    window = np.cos(np.clip(times, -reach, reach) * (pi / 2 / reach)) ** 2
    # The factor `cutoff` makes the sum of each filter about 1, so that the volume stays.
    filters = (np.sinc(times * cutoff) * window * cutoff).astype(np.float32)
    # Zeros before and after, so that the first and last samples have as many neighbours as all others.
    padded = np.pad(samples, (reach, reach + step))
    # A view: the product copies one window of it at a time, not all.
    rows = np.lib.stride_tricks.sliding_window_view(padded, len(filters))[::step]
    found: Samples = (rows @ filters).reshape(-1)
    return found[: ceil(len(samples) * wanted_hz / rate_hz)]


def cuts(samples: Samples, rate_hz: int, window_s: float) -> list[int]:
    """Return the positions at which audio is cut into windows of at most `window_s` seconds: 0, the cuts between, and
    the end. A cut lies in the quietest frame near the end of a window, so that few words are divided.
    """
    longest, frame = int(window_s * rate_hz), max(1, int(QUIET_FRAME_S * rate_hz))
    found = [0]
    while len(samples) - found[-1] > longest:
        end = found[-1] + longest
        num_frames = max(1, int(longest * SEARCHED_RATIO) // frame)
        searched = samples[end - num_frames * frame : end].reshape(num_frames, frame)
        # The loudness of a frame is enough: a pause between words is longer than a frame.
        quietest = int(np.square(searched).sum(axis=1).argmin())
        found.append(end - (num_frames - quietest) * frame + frame // 2)
    return [*found, len(samples)]
