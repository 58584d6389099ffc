"""Videos that are made for tests."""

import base64
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np

CODECS = {"mp4": "libx264", "webm": "libvpx", "matroska": "libvpx-vp9", "avi": "mpeg4"}


def frame(number: int, moment: int, size: tuple[int, int]) -> Any:
    """One frame, uint8 [height, width, 3]; each number's is another one, and so is each moment's."""
    width, height = size
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    colours = [37 * number + 11 * x + 29 * moment, 91 * number + 7 * y + 13 * moment, 5 * x + 3 * y * moment]
    return np.stack(colours, axis=-1).astype(np.uint8)


@cache
def video(number: int, *, kind: str = "mp4", count: int = 24, size: tuple[int, int] = (64, 48), fps: int = 8) -> bytes:
    """A file of `count` frames. Encoders with threads write other bytes each time, so equal calls return one file."""
    import av

    out = BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream: Any = container.add_stream(CODECS[kind], rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for moment in range(count):
            shown = av.VideoFrame.from_ndarray(frame(number, moment, size), format="rgb24")
            container.mux(stream.encode(shown))
        container.mux(stream.encode())
    return out.getvalue()


def video_url(file: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64,{base64.b64encode(file).decode()}"
