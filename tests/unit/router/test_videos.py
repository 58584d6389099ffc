"""Videos in chats: allowed sources, hostile files, and what instances get."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_serve.contracts.media import Clip, digest_of, split_header
from baton_serve.contracts.messages import Prefill
from baton_serve.contracts.vision import image_family
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.model.vision.video_reader import frames_of
from baton_serve.services.router.protocol.errors import BadRequestError, ModelFolderError
from baton_serve.services.router.protocol.image_limits import ImageLimits
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.multimodal.media_cache import MediaCache
from baton_serve.services.router.text.multimodal.media_parts import MediaPart
from baton_serve.services.router.text.multimodal.video_probe import probe
from baton_serve.services.router.text.served_model import ServedModel
from tests.images import data_url, picture
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.tokenizers_for_tests import write_folder
from tests.videos import CODECS, video, video_url

pytest.importorskip("av")

PATH = "/v1/chat/completions"
IMAGE, VIDEO = "<tool call>", "<|im_start|>"
"""Tokens that the tokenizer has; here they stand for an image and a video."""
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part.type == 'image' %}"
    + IMAGE
    + "{% elif part.type == 'video' %}"
    + VIDEO
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
SIZES = {"patch_size": 8, "min_pixels": 256, "max_pixels": 64 * 48}
A = video(1, count=12, fps=4)


@pytest.fixture
def see(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`serve` with a model like Qwen2.5-VL, and instances that have its tower."""
    folder = write_folder(tmp_path_factory.mktemp("router") / "vision")
    model = ServedModel.from_settings(RouterSettings(model=str(folder), chat_template=TEMPLATE))
    token_id = model.tokenizer.backend.token_to_id
    ids = {"image_token_id": token_id(IMAGE), "video_token_id": token_id(VIDEO)}
    model.vision = image_family(ModelFacts(config={"model_type": "qwen2_5_vl", **ids}, images=SIZES, videos=SIZES))

    def run(test: Callable[[Router], Awaitable[None]], **settings: Any) -> None:
        async def scenario(router: Router) -> None:
            router.service.model = model
            known: list[Any] = [*router.fakes.instances.values(), *router.cluster.workers()]
            for worker in known:
                worker.record = msgspec.structs.replace(worker.record, reads_images=True)
            await test(router)

        serve(scenario, **settings)

    return run


def shown(*files: str | bytes, **more: Any) -> dict[str, Any]:
    parts = [
        {"type": "video_url", "video_url": {"url": one if isinstance(one, str) else video_url(one)}} for one in files
    ]
    content = [{"type": "text", "text": "ab"}, *parts, {"type": "text", "text": "c"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "seed": 0, **more}


async def error_of(router: Router, body: dict[str, Any]) -> str:
    answer = await router.http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_prefill_gets_the_file_with_the_frames_to_show(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        bodies = [shown(A), shown(A, mm_processor_kwargs={"fps": 1, "max_pixels": 1024}), shown(A)]
        bodies[2]["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": data_url(picture(1))}})
        for body in bodies:
            answer = await router.http.post(PATH, json=body)
            assert answer.status_code == 200, answer.text
        default, changed, both = router.fakes["prefill-0"].assignments()
        assert isinstance(default, Prefill) and isinstance(changed, Prefill) and isinstance(both, Prefill)
        (span,), (header, file) = default.work.media, split_header(default.images[0])
        assert bytes(file) == A and header.clip is not None and header.settings == {}
        assert (header.clip.num_frames, header.clip.fps, header.clip.indexes) == (12, 4.0, [0, 2, 4, 6, 8, 10])
        # 64 x 48 pixels are 3 x 4 tokens, three times; half a second is four positions.
        assert (span.start, span.length, span.digest) == (2, 36, digest_of(default.images[0]))
        assert span.grid is not None and (span.grid.frames, span.grid.rows, span.grid.columns) == (3, 3, 4)
        assert span.grid.frame_step == 4.0 and len(default.work.token_ids) == 39
        (less,), (header, _) = changed.work.media, split_header(changed.images[0])
        assert header.clip is not None and header.clip.indexes == [0, 3, 6, 9]
        assert less.length < span.length and less.digest != span.digest
        assert len(both.work.media) == len(both.images) == 2
        counted = await router.http.post("/tokenize", json={"messages": shown(A)["messages"]})
        assert counted.json()["count"] == 39

    see(scenario, mm_processor_kwargs="")


def test_limits_and_settings_of_requests(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        assert "2 videos, the limit is 1 (--limit-mm-per-prompt)" in await error_of(router, shown(A, A))
        refused = shown(A, mm_processor_kwargs={"do_pan_and_scan": True})
        assert "'do_pan_and_scan' is not a setting" in await error_of(router, refused)
        assert "too short" in await error_of(router, shown(video(1, count=1)))
        assert "context" in await error_of(
            router, shown(A, mm_processor_kwargs={"max_pixels": 10**7, "min_pixels": 10**7})
        )

    see(scenario, limit_mm_per_prompt='{"video": 1}')


def test_a_model_without_videos_says_so(serve: Serve) -> None:
    async def scenario(router: Router) -> None:
        assert "'video_url' is not supported by this model" in await error_of(router, shown(A))

    serve(scenario)


def test_settings_that_the_model_does_not_know_stop_the_router(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path))
    with pytest.raises(ModelFolderError, match="--mm-processor-kwargs: this model reads no images"):
        ServedModel.from_settings(RouterSettings(model=folder, mm_processor_kwargs='{"fps": 1}'))
    with pytest.raises(ValueError, match="--mm-processor-kwargs must be like"):
        RouterSettings(model=folder, mm_processor_kwargs="fps=1")


def checked(file: bytes, **limits: Any) -> Any:
    return asyncio.run(probe(file, ImageLimits(**limits)))


@pytest.mark.parametrize("kind", CODECS)
def test_files_of_several_kinds(kind: str) -> None:
    found = checked(video(2, kind=kind, count=20, fps=10))
    assert (found.width, found.height, found.num_frames, found.fps) == (64, 48, 20, 10.0)


WEBM = video(1, kind="webm", count=4)
WITHOUT_FRAMES = WEBM[: WEBM.index(b"\x1f\x43\xb6\x75")]
"""A file that ends before its first cluster."""


def of_enormous_size() -> bytes:
    """A file whose first frame states 16383 x 16383 pixels."""
    at = WEBM.index(b"\x9d\x01\x2a") + 3
    return WEBM[:at] + struct.pack("<HH", 16383, 16383) + WEBM[at + 4 :]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "its format is not MP4"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "its format is not MP4"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "its format is not MP4"),
        (picture(1), "its format is not MP4"),
        (A[:16], "damaged, or not a video|no video stream"),
        (A[: len(A) // 2], "damaged, or not a video|no video stream"),
        (b"\0\0\0\x18ftypmp42" + b"\xff" * 5000, "damaged, or not a video|no video stream"),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 5000, "damaged, or not a video|no video stream"),
        (of_enormous_size(), "--max-image-pixels|damaged|memory"),
        (WITHOUT_FRAMES, "End of file|no frames|no size"),
        (video(1, count=90, fps=4), "longer than 20 s"),
        (video(1, size=(320, 200)), "64000 pixels, the limit is 40000"),
    ],
)
def test_hostile_files_are_refused(file: bytes, why: str) -> None:
    with pytest.raises(BadRequestError, match=why) as caught:
        checked(file, max_video_s=20.0, max_pixels=40_000)
    assert caught.value.code == "invalid_video"


@pytest.mark.parametrize("width", [50, 64, 66, 540])
def test_frames_of_any_width_are_those_of_the_file(width: int) -> None:
    """Rows of most widths have padding behind them in the decoder's memory, and the process that decodes ended."""
    file = video(3, kind="avi", count=6, size=(width, 48))
    with import_module("av").open(BytesIO(file)) as container:
        wanted = [frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in container.decode(video=0)]
    clip = Clip(width=width, height=48, num_frames=6, fps=8.0, indexes=[0, 3, 3, 5])
    found = [frame.numpy() for frame in frames_of(file, clip)]
    assert len(found) == 4
    assert all(np.array_equal(one, wanted[index]) for one, index in zip(found, clip.indexes, strict=True))


def test_frames_that_are_strips_are_refused() -> None:
    """The instance refused the width of 100,000 x 1 pixels, by the name of a field."""
    with pytest.raises(BadRequestError, match="2440 x 24 pixels: the longer side may be at most 100 times") as caught:
        checked(video(1, count=3, size=(2440, 24)))
    assert caught.value.code == "invalid_video"


def test_a_decoder_that_ends_or_never_ends_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "baton_serve.services.router.text.multimodal.video_probe"
    monkeypatch.setattr(f"{name}._WALL_S", 0.3)
    for program in ("import os; os.abort()", "import time; time.sleep(60)", "print('x' * 100000)"):
        monkeypatch.setattr(f"{name}.module_command", lambda *given, code=program: ["python3", "-c", code])
        with pytest.raises(BadRequestError, match="its decoder failed, or took too much time"):
            checked(A)


def test_files_with_a_uuid_are_kept_for_their_owner(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        def body(kind: str, url: str | None) -> dict[str, Any]:
            part = {"type": f"{kind}_url", "uuid": "one", **({f"{kind}_url": {"url": url}} if url else {})}
            return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}

        async def ask(kind: str, url: str | None) -> int:
            return (await router.http.post(PATH, json=body(kind, url))).status_code

        image = data_url(picture(1, size=(40, 30)))
        assert await ask("video", None) == await ask("image", None) == 400
        assert await ask("video", video_url(A)) == await ask("video", None) == 200
        assert await ask("image", None) == 400, "a video is no image"
        assert await ask("image", image) == await ask("image", None) == 200
        sent = [message.images for message in router.fakes["prefill-0"].assignments() if isinstance(message, Prefill)]
        assert sent[0] == sent[1] and sent[2] == sent[3]

    see(scenario)


def test_the_oldest_files_leave_the_cache_and_owners_see_their_own() -> None:
    cache = MediaCache(10)
    one, two = (MediaPart("image", "", name) for name in ("one", "two"))
    cache.keep("a", one, b"12345")
    cache.keep("a", two, b"12345")
    assert cache.find("a", one) == b"12345"
    assert cache.find("b", one) is None
    cache.keep("b", two, b"123456")
    assert (cache.find("a", one), cache.find("a", two), cache.find("b", two)) == (None, None, b"123456")
    cache.keep("b", two, b"1")
    cache.keep("a", one, b"x" * 11)
    assert (cache.find("b", two), cache.find("a", one)) == (b"1", None)
