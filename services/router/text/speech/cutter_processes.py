"""Sends audio files to processes that decode and cut them, with limits of time. See `baton_serve.audio_cutter`."""

import asyncio
import contextlib
import importlib.util
import logging
import subprocess
from collections.abc import Awaitable, Callable

import msgspec

from baton_serve.child_command import module_command
from baton_serve.contracts.audio import HEADER_BYTES, SAMPLE_BYTES, Cut, CutStart, CutterLimits, Window
from baton_serve.services.router.protocol.errors import BadRequestError, RateLimitError, UnavailableError
from baton_serve.services.router.text.thread_pools import AUDIO

logger = logging.getLogger(__name__)

NUM_PROCESSES = 2
"""Largest number of files that are decoded at a time."""
WAIT_S = 10.0
"""Longest time that a file waits for a process, in seconds."""
FILE_S = 120.0
"""Longest time for one file, in seconds, after which its process is killed. Processor time is bounded before."""
_MODULE = "baton_serve.audio_cutter"
_SIZE_BYTES = 8
_MAX_START_BYTES = 64 * 1024
_START = msgspec.msgpack.Decoder(CutStart)
_WINDOW = msgspec.msgpack.Decoder(Window)

_Child = subprocess.Popen[bytes]
Reserve = Callable[[int], Awaitable[None]]
"""Reserves a number of bytes of memory, or raises `RateLimitError`."""


class AudioCutter:
    """Decodes audio files and cuts them into windows for a speech model, in processes of its own. Use it from one event
    loop at a time, and `close` it.
    """

    def __init__(self, limits: CutterLimits) -> None:
        self.limits = limits
        self._idle: list[_Child] = []
        self._slots = asyncio.Semaphore(NUM_PROCESSES)
        # A process that sends more than the longest file needs has been taken over by a file.
        # A sample has two bytes. The rest is room for the headers of the windows.
        self._max_answer_bytes = int(limits.max_s * limits.rate_hz * 4) + (1 << 20)

    async def cut(self, file: bytes, reserve: Reserve) -> Cut:
        """Decode an audio file and return its windows. The file may have any format that `baton_serve.audio_cutter`
        accepts. Wait at most `WAIT_S` seconds for a free process. `reserve` is called with the number of bytes of all
        windows before any of them is taken, and its errors are raised.

        Raises `BadRequestError` if the file cannot be used, `RateLimitError` if too many files wait, and
        `UnavailableError` if no process can be started.
        """
        cut = await self.decode(file, reserve)
        if cut.error:
            raise BadRequestError(f"the audio file cannot be used: {cut.error}", param="file", code="invalid_audio")
        return cut

    @property
    def max_file_bytes(self) -> int:
        """Return the largest size of one window as a file."""
        longest_s = self.limits.window_s if self.limits.heard_s is None else self.limits.heard_s
        return int(longest_s * self.limits.rate_hz) * SAMPLE_BYTES + HEADER_BYTES

    async def decode(self, file: bytes, reserve: Reserve | None = None) -> Cut:
        """Do what `cut` does, but return the reason why a file cannot be used as `Cut.error`."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self._slots.acquire()
        except TimeoutError:
            raise RateLimitError(
                "too many audio files wait to be decoded: try again later", retry_after_s=1.0
            ) from None
        try:
            return await self._cut(file, reserve)
        finally:
            self._slots.release()

    def close(self) -> None:
        """End all decoding processes that are idle."""
        while self._idle:
            _end(self._idle.pop())

    async def _cut(self, file: bytes, reserve: Reserve | None) -> Cut:
        child = self._idle.pop() if self._idle else self._start()
        try:
            async with asyncio.timeout(FILE_S):
                start = await AUDIO.run(_ask, child, file, self._max_answer_bytes)
                if reserve is not None and not start.error:
                    await reserve(start.num_bytes)
                windows = await AUDIO.run(_read_windows, child, start, self._max_answer_bytes)
        except (TimeoutError, OSError, msgspec.DecodeError) as exc:
            logger.warning("an audio file of %d bytes ended the process that decodes it: %r", len(file), exc)
            _end(child)
            return Cut(error="its decoder failed, or took too much time or memory")
        except BaseException:
            # A request that is cancelled leaves half an answer in the pipe. The thread that reads it ends with the
            # process.
            _end(child)
            raise
        self._idle.append(child)
        return Cut(start.duration_s, windows, start.error)

    def _start(self) -> _Child:
        # The process imports it; a router without a worker beside it may have been installed without.
        if importlib.util.find_spec("numpy") is None:
            raise UnavailableError("this router cannot decode audio: pip install 'baton-serve[audio]'")
        command = module_command(_MODULE, msgspec.json.encode(self.limits).decode())
        try:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as exc:
            raise UnavailableError(f"no process that decodes audio can be started: {exc}", retry_after_s=5.0) from exc


def _ask(child: _Child, file: bytes, max_answer_bytes: int) -> CutStart:
    """Send an audio file to a decoding process and return the first message of its answer. It blocks, so it runs in a
    thread. Raises `OSError` if the process ends, or if its windows are longer than `max_answer_bytes`.
    """
    assert child.stdin is not None
    child.stdin.write(len(file).to_bytes(_SIZE_BYTES, "little") + file)
    child.stdin.flush()
    start = _START.decode(_read_message(child, _MAX_START_BYTES))
    if not 0 <= start.num_bytes <= max_answer_bytes:
        raise OSError(f"its windows have {start.num_bytes} bytes")
    return start


def _read_windows(child: _Child, start: CutStart, max_answer_bytes: int) -> list[Window]:
    """Return the windows that a decoding process sends after `start`. It blocks, and raises the errors of `_ask`."""
    windows: list[Window] = []
    num_left = max_answer_bytes
    for _ in range(start.num_windows):
        message = _read_message(child, num_left)
        num_left -= len(message)
        # One at a time: decoding copies the file, and holds the interpreter's lock, which the event loop needs.
        windows.append(_WINDOW.decode(message))
    return windows


def _read_message(child: _Child, max_bytes: int) -> bytes:
    assert child.stdout is not None
    size = int.from_bytes(child.stdout.read(_SIZE_BYTES), "little")
    if not 0 < size <= max_bytes:
        raise OSError(f"its answer has {size} bytes")
    message = child.stdout.read(size)
    if len(message) < size:
        raise OSError("its answer is cut")
    return message


def _end(child: _Child) -> None:
    """Kill a decoding process, which also ends the wait of a thread for its answer."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        # Closing writes what is left of a file to a process that has ended.
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
