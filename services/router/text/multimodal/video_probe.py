"""Reads size, length and rate of video files in processes of their own."""

import asyncio
import contextlib
import logging

import msgspec

from baton_serve.child_command import module_command
from baton_serve.contracts.media import VideoFile, VideoTask
from baton_serve.services.router.protocol.errors import UnavailableError
from baton_serve.services.router.protocol.image_limits import ImageLimits, media_error

logger = logging.getLogger(__name__)

_MODULE = "baton_serve.video_decoder"
_WALL_S = 30.0
"""Longest time for one file, in seconds. Processor time is bounded too."""
_CPU_S = 15.0
_SIZE_BYTES = 8
_MAX_ANSWER_BYTES = 1 << 16


async def probe(file: bytes, limits: ImageLimits) -> VideoFile:
    """Return the size, length and rate of a video. Raises `BadRequestError` if it cannot be used, and
    `UnavailableError` if no process can be started.
    """
    task = VideoTask(max_pixels=limits.max_pixels, max_s=limits.max_video_s, cpu_s=_CPU_S)
    command = module_command(_MODULE, msgspec.json.encode(task).decode())
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    except OSError as exc:
        raise UnavailableError(f"no process that decodes videos can be started: {exc}", retry_after_s=5.0) from exc
    try:
        async with asyncio.timeout(_WALL_S):
            found = await _answer(child, file)
    except (TimeoutError, OSError, EOFError, msgspec.DecodeError) as exc:
        logger.warning("a video of %d bytes ended the process that decodes it: %r", len(file), exc)
        found = VideoFile(error="its decoder failed, or took too much time or memory")
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        # Without this the process would stay as a zombie.
        await asyncio.shield(child.wait())
    if found.error:
        raise media_error(f"a video cannot be used: {found.error}", "video")
    return found


async def _answer(child: asyncio.subprocess.Process, file: bytes) -> VideoFile:
    """Send a file to a process and return its answer. Raises `OSError` or `EOFError` if the process ends."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(file)
    # The process may end before it has read all of the file, if a limit stops it.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await child.stdin.drain()
    child.stdin.close()
    size = int.from_bytes(await child.stdout.readexactly(_SIZE_BYTES), "little")
    if not 0 < size <= _MAX_ANSWER_BYTES:
        raise OSError(f"its answer has {size} bytes")
    return msgspec.msgpack.decode(await child.stdout.readexactly(size), type=VideoFile)
