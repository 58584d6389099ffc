"""Decodes one video file for a router or an instance, in a process with limits of memory and time.

    python -m baton_serve.video_decoder TASK

TASK is `VideoTask` in JSON. The file comes on the standard input. Decoders of videos are C code that reads files from
clients: here a crash costs one request, and memory and processor time are bounded. Each message on the standard output
is its length in eight bytes, little-endian, and its content: `VideoFile` in MessagePack; then each wanted frame as RGB
bytes [height, width, 3]; and at the end, if there were frames, `VideoFile` again, whose error says what was wrong.
"""

import importlib
import importlib.util
import resource
import signal
import sys
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import msgspec

from baton_serve.contracts.media import MAX_ASPECT, MAX_FRAME_SIDE, VideoFile, VideoTask, is_strip

FORMATS = ("mov", "matroska", "avi", "gif", "mpegts", "mpeg", "ogg")
"""Accepted containers, as FFmpeg names them. Playlists, which name other files and hosts, are not among them."""
CODECS = (
    "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,mpeg4,msmpeg4v3,mpeg1video,mpeg2video,mjpeg,theora,gif,png,ffv1"
)
"""Accepted decoders, as FFmpeg names them."""
MAX_FPS = 1000.0
_MIN_FPS = 0.01
_MOST_MISSING = 0.1
"""Largest part of the frames that may be missing at the end: some containers count frames that are never shown."""
_OPTIONS = {"codec_whitelist": CODECS, "protocol_whitelist": "none", "enable_drefs": "0", "use_absolute_path": "0"}
"""Options of FFmpeg: a file can name no other files."""


class VideoError(Exception):
    """The file cannot be used; the message is for the client."""


def main() -> None:
    """Decode the file on the standard input, and write its description and frames to the standard output."""
    task = msgspec.json.decode(sys.argv[1], type=VideoTask)
    if importlib.util.find_spec("av") is None:
        _send(msgspec.msgpack.encode(VideoFile(error="it needs the package av (pip install 'baton-serve[video]')")))
        return
    av = _prepare(task)
    data = sys.stdin.buffer.read()
    try:
        container = _opened(av, data)
        found = _described(container, task)
        found = _with_size(_opened(av, data), task, found)
        _send(msgspec.msgpack.encode(found))
        if task.indexes:
            for frame in _frames(_opened(av, data), task, found):
                _send(frame)
            _send(msgspec.msgpack.encode(found))
    except VideoError as exc:
        _send(msgspec.msgpack.encode(VideoFile(error=str(exc))))
    except MemoryError:
        _send(msgspec.msgpack.encode(VideoFile(error="it needs too much memory")))
    # FFmpeg reports all that it finds wrong by exceptions of this kind and of Python's own.
    except (av.FFmpegError, ValueError, OSError, EOFError, IndexError) as exc:
        _send(msgspec.msgpack.encode(VideoFile(error=f"it is damaged, or not a video: {_reason(exc)}")))


def _reason(exc: Exception) -> str:
    # FFmpeg's errors carry a number and a file's name, which say nothing to a client.
    return str(getattr(exc, "strerror", None) or exc)[:100]


def _prepare(task: VideoTask) -> Any:
    """Load the decoder, then bound memory and processor time in addition to what is used already."""
    av: Any = importlib.import_module("av")
    av.logging.set_level(av.logging.PANIC)
    if task.indexes:
        importlib.import_module("numpy")
    # Its parent ends this process. Ctrl-C in a terminal also reaches this process, and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGPROF ends the process, even within a C function that never returns to Python.
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)
    # A crash of a decoder must not fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # The first number is the size of the address space in pages, and RLIMIT_AS bounds the same size.
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + task.memory_bytes, used + task.memory_bytes))
    return av


def _send(message: bytes | memoryview) -> None:
    out = sys.stdout.buffer
    out.write(len(message).to_bytes(8, "little"))
    out.write(message)
    out.flush()


def container_of(data: bytes) -> str | None:
    """Return which of `FORMATS` a file has by its first bytes; None: none of them."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[:1] == b"\x47" and data[188:189] == b"\x47":
        return "mpegts"
    return {b"GIF8": "gif", b"\0\0\x01\xba": "mpeg", b"OggS": "ogg"}.get(data[:4])


def _opened(av: Any, data: bytes) -> Any:
    # FFmpeg would try all its formats. The first bytes say which one it may use.
    name = container_of(data)
    if name is None:
        raise VideoError("its format is not MP4, WebM, MKV, AVI, MPEG, OGG or GIF")
    return av.open(BytesIO(data), format=name, options=_OPTIONS)


def _described(container: Any, task: VideoTask) -> VideoFile:
    """Return the number of frames and their rate, without decoding any. Raises `VideoError` if a limit is exceeded."""
    if not container.streams.video:
        raise VideoError("it has no video stream")
    stream = container.streams.video[0]
    _check_size(stream.codec_context.width, stream.codec_context.height, task)
    rate = stream.average_rate or stream.guessed_rate
    fps = float(rate) if rate else 0.0
    if not _MIN_FPS <= fps <= MAX_FPS:
        raise VideoError(f"it states {fps:g} frames per second")
    # A header may state any number of frames and any duration. The packets are what there is.
    count, last_s = 0, 0.0
    most = int(task.max_s * fps)
    for packet in container.demux(stream):
        count += packet.size > 0
        if packet.pts is not None and packet.time_base is not None:
            last_s = max(last_s, float(packet.pts * packet.time_base - (stream.start_time or 0) * stream.time_base))
        if count > most or last_s > task.max_s:
            raise VideoError(f"it is longer than {task.max_s:g} s (--max-video-s)")
    if not count:
        raise VideoError("it has no frames")
    return VideoFile(num_frames=count, fps=fps)


def _with_size(container: Any, task: VideoTask, found: VideoFile) -> VideoFile:
    """Return the description of a file with the size of its first frame. Raises `VideoError`."""
    frame = next(container.decode(_stream(container, task)), None)
    if frame is None:
        raise VideoError("none of its frames can be decoded")
    # The size in the header of the file may be another one than that of its frames.
    _check_size(frame.width, frame.height, task)
    return msgspec.structs.replace(found, width=frame.width, height=frame.height)


def _stream(container: Any, task: VideoTask) -> Any:
    """Return the stream to decode, whose decoder allocates no larger frames than it may."""
    stream = container.streams.video[0]
    stream.codec_context.options = {"max_pixels": str(task.max_pixels)}
    return stream


def _check_size(width: int, height: int, task: VideoTask) -> None:
    """Raise `VideoError` unless a frame has pixels, not too many of them, and sides of which both may be processed."""
    if width < 1 or height < 1:
        raise VideoError("its frames have no size")
    if width * height > task.max_pixels:
        raise VideoError(
            f"its frames have {width * height} pixels, the limit is {task.max_pixels} (--max-image-pixels)"
        )
    if is_strip(width, height) or max(width, height) > MAX_FRAME_SIDE:
        raise VideoError(
            f"its frames have {width} x {height} pixels: the longer side may be at most {MAX_ASPECT} times the shorter,"
            f" and have {MAX_FRAME_SIDE} pixels"
        )


def _frames(container: Any, task: VideoTask, found: VideoFile) -> Iterator[memoryview]:
    """Yield the wanted frames. Raises `VideoError` if some of them do not exist."""
    # `_prepare` has loaded it, before memory was bounded. A process that only describes a file does not need it.
    numpy: Any = importlib.import_module("numpy")
    stream = _stream(container, task)
    stream.thread_type = "AUTO"
    wanted = iter(task.indexes)
    due = next(wanted, None)
    last: memoryview | None = None
    number = 0
    for number, frame in enumerate(container.decode(stream), 1):
        if (frame.width, frame.height) != (found.width, found.height):
            raise VideoError("its frames have several sizes")
        if due != number - 1:
            continue
        # Rows of some widths have padding behind them.
        last = numpy.ascontiguousarray(frame.to_ndarray(format="rgb24")).data.cast("B")
        while due == number - 1:
            yield last
            due = next(wanted, None)
        if due is None:
            return
    if last is None or number < (1 - _MOST_MISSING) * found.num_frames:
        raise VideoError(f"only {number} of its {found.num_frames} frames can be decoded")
    while due is not None:
        yield last
        due = next(wanted, None)


if __name__ == "__main__":
    main()
