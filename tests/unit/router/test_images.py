"""Images in chats: allowed sources, refused files, and the instances that receive them."""

import asyncio
import base64
import zlib
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from baton_serve.contracts.block_hash import hash_blocks, root_hash
from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.messages import Decode, Generate, Prefill
from baton_serve.contracts.vision import MediaText, expand_runs, image_family, write_parts, write_parts_as_tokens
from baton_serve.contracts.vision.llava import Llava
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.services.common.settings.configuration import load
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.image_limits import ImageLimits, limits_per_prompt
from baton_serve.services.router.protocol.openai_requests import ChatCompletionRequest
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.multimodal import url_fetch
from baton_serve.services.router.text.multimodal.image_memory import ImageMemory, ImageReservation
from baton_serve.services.router.text.multimodal.media_parts import MediaPart
from baton_serve.services.router.text.served_model import ServedModel
from tests.images import data_url, load_images, picture
from tests.unit.router.conftest import Router, Serve
from tests.unit.router.fakes import record
from tests.unit.router.tokenizers_for_tests import write_folder

PATH = "/v1/chat/completions"
IMAGE = "<tool call>"
"""A token that the tokenizer has; here it stands for an image."""
TOKENS = 6
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message['content'] %}{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
A, B = picture(1), picture(2)


def shown(*content: str | bytes, **more: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_url", "image_url": {"url": data_url(one)}}
        for one in content
    ]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "seed": 0, **more}


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_folder(tmp_path_factory.mktemp("router") / "vision")
    return with_vision(ServedModel.from_settings(RouterSettings(model=str(folder), chat_template=TEMPLATE)))


def with_vision(model: ServedModel) -> ServedModel:
    image_id = model.tokenizer.backend.token_to_id(IMAGE)
    assert image_id is not None
    model.vision = Llava(image_token_id=image_id, tokens_per_image=TOKENS)
    return model


@pytest.fixture
def see(serve: Serve, vision_model: ServedModel) -> Callable[..., None]:
    """`serve` with a model that reads images, and prefill and unified instances that have its tower."""

    def run(test: Callable[[Router], Awaitable[None]], **settings: Any) -> None:
        async def scenario(router: Router) -> None:
            router.service.model = vision_model
            for instance in list(router.fakes.instances.values()):
                if instance.record.role != "decode":
                    instance.record = msgspec.structs.replace(instance.record, reads_images=True)
            for worker in router.cluster.workers():
                worker.record = msgspec.structs.replace(worker.record, reads_images=worker.record.role != "decode")
            await test(router)

        serve(scenario, **settings)

    return run


async def error_of(router: Router, body: dict[str, Any], status: int = 400) -> str:
    answer = await router.http.post(PATH, json=body)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def test_prefill_gets_the_image_files_and_decode_their_positions(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(PATH, json=shown("ab", A, "c", B, A))
        assert answer.status_code == 200, answer.text
        (prefill,), (decode,) = (router.fakes[name].assignments() for name in ("prefill-0", "decode-0"))
        assert isinstance(prefill, Prefill) and isinstance(decode, Decode)
        assert sorted(prefill.images) == sorted([A, B])
        places = [(span.start, span.length, span.digest) for span in prefill.work.media]
        assert places == [(2, TOKENS, digest_of(A)), (9, TOKENS, digest_of(B)), (15, TOKENS, digest_of(A))]
        assert decode.work.media == prefill.work.media
        assert answer.json()["usage"]["prompt_tokens"] == 3 + 3 * TOKENS == len(prefill.work.token_ids)
        assert "baton:prompt_images_total{" in (await router.http.get("/metrics")).text

    see(scenario)


def test_a_short_prompt_with_an_image_is_not_read_by_decode(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        await router.http.post(PATH, json=shown("ab", A))
        await router.http.post(PATH, json=shown("ab"))
        assert [type(m) for m in router.fakes["decode-0"].assignments()] == [Decode, Generate]

    see(scenario, disaggregation_min_tokens=100)


def test_a_unified_instance_does_all_of_it(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        await router.http.post(PATH, json=shown("ab", A))
        (message,) = router.fakes["unified-0"].assignments()
        assert isinstance(message, Generate) and message.images == [A]

    see(scenario, prefill=0, decode=0, unified=1)


def test_without_an_instance_that_reads_images_text_is_served_and_images_wait(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        assert "can encode images" in await error_of(router, shown("ab", A), 503)
        assert (await router.http.post(PATH, json=shown("ab"))).status_code == 200

    see(scenario, prefill=0)


def test_a_replay_sends_the_images_to_prefill_again(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        router.fakes["decode-0"].hold = 2
        asking = asyncio.ensure_future(router.http.post(PATH, json=shown("ab", A, "c", max_tokens=8)))
        while not any(job.sent.get(0) for job in router.fakes["decode-0"].jobs.values()):  # noqa: ASYNC110 - a fake's
            await asyncio.sleep(0)
        router.fakes.add(record("decode-1", "decode"))
        await asyncio.sleep(0.01)
        router.fakes["decode-0"].die()
        answer = await asking
        assert answer.status_code == 200, answer.text
        first, second = router.fakes["prefill-0"].assignments()
        assert isinstance(first, Prefill) and isinstance(second, Prefill)
        assert second.images == first.images == [A]
        assert second.work.media == first.work.media
        assert len(second.work.token_ids) > second.work.num_prompt_tokens == first.work.num_prompt_tokens

    see(scenario)


def test_places_must_be_as_many_as_images(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        assert "there are 1 images, but the prompt has 2" in await error_of(router, shown("ab" + IMAGE, A))
        assert "cut an image" in await error_of(router, shown(A, truncate_prompt_tokens=3))
        assert "context" in await error_of(router, shown(*[A] * 50))
        assert "the limit is 60" in await error_of(router, shown(*[A] * 61))

    see(scenario, limit_mm_per_prompt="image=60")


def test_text_that_names_the_token_is_text_where_there_are_no_images(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        answer = await router.http.post(PATH, json=shown("ab" + IMAGE))
        assert answer.json()["usage"]["prompt_tokens"] == 3

    see(scenario)


def test_tokens_of_a_chat_with_images_are_counted_without_a_look_at_them(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        body = shown("ab", A)
        body["messages"][0]["content"][1]["image_url"]["url"] = "https://example.org/a.png"
        answer = await router.http.post("/tokenize", json={"messages": body["messages"]})
        assert answer.json()["count"] == 2 + TOKENS
        source = {"type": "url", "url": "https://example.org/a.png"}
        blocks = [{"type": "text", "text": "ab"}, {"type": "image", "source": source}]
        counted = await router.http.post(
            "/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": blocks}]}
        )
        assert counted.json()["input_tokens"] == 2 + TOKENS

    see(scenario)


def test_images_of_tiles_are_as_many_tokens_as_their_shapes_say(see: Callable[..., None]) -> None:
    profile = Llava(image_token_id=9, tokens_per_image=4, grid=((8, 16), (16, 8)), tile_size=8, patch_size=4)
    wide, tall = picture(1, kind="JPEG", size=(40, 20)), picture(2, size=(20, 36))
    turned = BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(BytesIO(wide)).save(turned, "JPEG", exif=exif)

    async def scenario(router: Router) -> None:
        model = router.service.model
        assert model.vision is not None
        tiled = msgspec.structs.replace(profile, image_token_id=model.vision.image_token_id)
        before, model.vision = model.vision, tiled
        try:
            body = shown("ab", wide, tall, turned.getvalue())
            answer = await router.http.post(PATH, json=body)
            assert answer.status_code == 200, answer.text
            counted = await router.http.post("/tokenize", json={"messages": body["messages"]})
        finally:
            model.vision = before
        (message,) = router.fakes["prefill-0"].assignments()
        assert [(span.start, span.length) for span in message.work.media] == [(2, 14), (16, 16), (32, 16)]
        assert counted.json()["count"] == len(message.work.token_ids) == 48

    see(scenario)


def test_images_in_the_words_of_other_apis(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        part = {"type": "input_image", "image_url": data_url(A)}
        item = {"role": "user", "content": [{"type": "input_text", "text": "ab"}, part]}
        answer = await router.http.post("/v1/responses", json={"input": [item], "max_output_tokens": 3})
        assert answer.status_code == 200, answer.text
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(B).decode()}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "ab"}]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 3}
        answer = await router.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        first, second = router.fakes["prefill-0"].assignments()
        assert isinstance(first, Prefill) and isinstance(second, Prefill)
        assert (first.images, second.images) == ([A], [B])
        assert (first.work.media[0].start, second.work.media[0].start) == (2, 0)
        bad = {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}
        assert (await router.http.post("/v1/messages", json={**bad, "max_tokens": 3})).status_code == 400

    see(scenario)


def test_a_template_that_takes_strings_gets_places_before_the_text(vision_model: ServedModel) -> None:
    folder = str(vision_model.path)
    model = with_vision(
        ServedModel.from_settings(RouterSettings(model=folder, chat_template="{{ messages[0].content }}"))
    )

    request = ChatCompletionRequest.model_validate({"messages": shown("ab", A, "c")["messages"]})
    assert asyncio.run(model.render_chat(request, shows_images=True)) == f"{IMAGE}\nab\nc"
    with pytest.raises(BadRequestError, match="not supported"):
        asyncio.run(model.render_chat(request))


def one(url: str, **limits: Any) -> bytes:
    with ImageReservation(ImageMemory(1 << 26)) as reservation:
        (found,) = asyncio.run(load_images([url], ImageLimits(**limits), reservation))
    assert found.digest == digest_of(found.data)
    return found.data


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_files_of_images_within_urls(kind: str) -> None:
    image = picture(1, kind=kind)
    assert one(data_url(image, kind.lower())) == image
    large = picture(2, kind="BMP", size=(200, 200))  # in a thread
    assert one(data_url(large)) == large


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png,abc", "base64"),
        ("data:text/html;base64,aGk=", "base64"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        (f"data:image/png;base64,{base64.b64encode(b'nothing').decode()}", "its format is not PNG"),
        (f"data:image/svg+xml;base64,{base64.b64encode(b'<svg/>').decode()}", "its format is not PNG"),
        (data_url(picture(1, size=(40, 30))), "1200 pixels"),
        (data_url(picture(1, kind="BMP", size=(30, 30))), "more than 2000 bytes"),
        (data_url(picture(1, size=(1, 101))), "1 x 101 pixels: the longer side may be at most 100 times"),
        ("ftp://example.org/a.png", "must begin with data:"),
        ("file:/etc/hostname", "--allowed-local-media-path"),
        ("https://example.org/a.png", "--allowed-media-domains"),
        ("http://127.0.0.1/a.png", "--allowed-media-domains"),
        ("http:///a.png", "name a host"),
        ("http://user@example.org/a.png", "must not contain a user name"),
        ("http://example.org:x/a.png", "is invalid"),
    ],
)
def test_what_is_refused_says_why(url: str, why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        one(url, max_pixels=1000, max_bytes=2000)


def test_an_error_says_which_of_several_images_it_is_about() -> None:
    broken = f"data:image/png;base64,{base64.b64encode(b'nothing').decode()}"
    with ImageReservation(ImageMemory(1 << 26)) as reservation:
        with pytest.raises(BadRequestError, match=r"PNG, JPEG, WEBP, GIF or BMP \(file 2 of 3\)$") as caught:
            asyncio.run(load_images([data_url(A), broken, data_url(A)], ImageLimits(), reservation))
        assert caught.value.code == "invalid_image"


def with_stated_size(kind: str, width: int, height: int) -> bytes:
    """Return a small file whose header states a size that it does not have."""
    image = bytearray(picture(1, kind=kind))
    at, order = {"PNG": (16, "big"), "BMP": (18, "little")}[kind]
    image[at : at + 8] = width.to_bytes(4, order) + height.to_bytes(4, order)  # type: ignore[arg-type]
    if kind == "PNG":  # the checksum of the header
        image[29:33] = zlib.crc32(bytes(image[12:29])).to_bytes(4, "big")
    return bytes(image)


@pytest.mark.parametrize("kind", ["PNG", "BMP"])
@pytest.mark.parametrize("side", [6_000, 10_000, 50_000])
def test_a_small_file_that_states_an_enormous_size_is_refused_by_its_header(kind: str, side: int) -> None:
    with pytest.raises(BadRequestError, match=r"--max-image-pixels"):
        one(data_url(with_stated_size(kind, side, side)))


def test_the_memory_of_images_is_released_however_a_request_ends(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        budget = router.service.image_memory.budget
        before = budget.num_free
        prefill, decode = router.fakes["prefill-0"], router.fakes["decode-0"]
        assert (await router.http.post(PATH, json=shown("ab", A))).status_code == 200
        # Refused after the images were loaded: the grammar is not valid.
        await error_of(router, shown("ab", A, guided_regex="("))
        await error_of(router, shown("ab", A, logit_bias={"999999": 1}))
        decode.hold = 2
        asking = asyncio.ensure_future(router.http.post(PATH, json=shown("ab", A, max_tokens=8)))
        while not decode.jobs:  # noqa: ASYNC110 - a fake's
            await asyncio.sleep(0)
        assert budget.num_free == before - len(A), "the files are kept for a replay"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert budget.num_free == before
        assert prefill.assignments()

    see(scenario)


def test_local_files_lie_below_the_folder_that_is_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a b.png").write_bytes(A)
    (tmp_path / "secret.png").write_bytes(B)
    (folder / "way-out.png").symlink_to(tmp_path / "secret.png")
    limits = {"local_path": folder}
    assert one(f"file:{folder}/a%20b.png", **limits) == one(f"file://{folder}/a b.png", **limits) == A
    for path in (f"{folder}/../secret.png", f"{folder}/way-out.png", f"{folder}/none.png", str(folder), "/etc/hosts"):
        with pytest.raises(BadRequestError, match="is not a file below"):
            one(f"file:{path}", **limits)
    with pytest.raises(BadRequestError, match="machine of the router"):
        one(f"file://elsewhere{folder}/a b.png", **limits)
    with pytest.raises(BadRequestError, match="more than 10 bytes"):
        one(f"file:{folder}/a%20b.png", local_path=folder, max_bytes=10)


class Site:
    """Answers every request with the same bytes; `asked` are the heads of requests."""

    def __init__(self, answer: bytes, *, is_slow: bool = False) -> None:
        self.asked: list[str] = []
        self._serving: list[asyncio.Task[Any]] = []
        self._answer = answer
        self._is_slow = is_slow

    async def fetch(self, host: str = "127.0.0.1", **limits: Any) -> bytes:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                url = f"http://{host}:{port}/a.png?size=1#x"
                return await url_fetch.fetch(
                    MediaPart("image", url), ImageLimits(**limits), count=lambda num_bytes: None
                )
            finally:
                await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.append(task)
        try:
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            if self._is_slow:
                await reader.read()
            writer.write(self._answer)
            await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()


def http(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{head}\r\n".encode() + body


NAMED: dict[str, Any] = {"domains": frozenset({"127.0.0.1"})}


def test_images_are_fetched_from_hosts_that_are_named() -> None:
    site = Site(http(A))
    assert asyncio.run(site.fetch(**NAMED)) == A
    (head,) = site.asked
    assert head.startswith("GET /a.png?size=1 HTTP/1.1\r\n") and "accept-encoding: identity" in head.lower()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http(b"", "302 Found", "location: http://169.254.169.254/\r\n"), "a redirect, which is not followed"),
        (http(b"gone", "404 Not Found"), "status 404"),
        (http(b"x" * 2001), "more than 2000 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", "cannot be fetched"),
        (b"no http", "cannot be fetched"),
    ],
)
def test_what_hosts_may_not_answer(answer: bytes, why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        asyncio.run(Site(answer).fetch(**NAMED, max_bytes=2000))


def test_a_host_that_is_slow_is_given_up() -> None:
    with pytest.raises(BadRequestError, match=r"within 0\.05 s"):
        asyncio.run(Site(http(A), is_slow=True).fetch(**NAMED, fetch_timeout_s=0.05))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_any_host_is_any_with_a_public_address(host: str) -> None:
    site = Site(http(A))
    with pytest.raises(BadRequestError, match="no public address"):
        asyncio.run(site.fetch(host, domains=frozenset({"*"})))
    assert not site.asked


@pytest.mark.parametrize("host", ["pictures..example", "a" * 70 + ".example"])
def test_a_host_name_with_an_invalid_label_is_an_error_of_the_client(host: str) -> None:
    with pytest.raises(BadRequestError, match="the image cannot be fetched from"):
        asyncio.run(Site(http(A)).fetch(host, domains=frozenset({"*"})))


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have another one a moment later."""

    async def resolved(host: str, port: int) -> str:
        assert host == "pictures.example"
        return "127.0.0.1"

    monkeypatch.setattr(url_fetch, "_public_address", resolved)
    site = Site(http(A))
    assert asyncio.run(site.fetch("pictures.example", domains=frozenset({"*"}))) == A
    assert "host: pictures.example:" in site.asked[0].lower()


@pytest.mark.parametrize(
    ("stated", "count"),
    [
        ("", 999),
        ("image=2", 2),
        ("video=1, image=3", 3),
        ('{"image": 4}', 4),
        ("video=1", 999),
        ('{"image": {"count": 1, "width": 640}}', 1),
        ('{"image": {"width": 9}}', 999),
    ],
)
def test_the_limit_of_images_as_vllm_writes_it(stated: str, count: int) -> None:
    assert limits_per_prompt(stated).get("image", 999) == count


@pytest.mark.parametrize("stated", ["image", "image=x", "image=-1", "picture=1", '{"image": {"most": 1}}', "{"])
def test_a_limit_that_cannot_be_stops_the_process(stated: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "m", f"--limit-mm-per-prompt={stated}"]
    with pytest.raises(SystemExit):
        load(RouterSettings, argv, {}, prefix="BATON__ROUTER__", program="baton router", description="")
    assert "--limit-mm-per-prompt" in capsys.readouterr().err


def test_places_of_images() -> None:
    tokens, places = expand_runs([1, 9, 2, 9, 9], [MediaText(parts=(3,), token_id=9, placeholder=9)] * 3)
    assert tokens == [1, 9, 9, 9, 2, 9, 9, 9, 9, 9, 9]
    assert places == [[(1, 3)], [(5, 3)], [(8, 3)]]


def test_an_image_of_several_runs_is_written_as_text_and_has_one_place() -> None:
    images = [MediaText(parts=parts, token_id=105, placeholder="@") for parts in (("<", 2, "|", 3, ">"), ("<", 1, ">"))]
    text = write_parts("a@b@", images, chr)
    assert text == "a<i|i>b<i>"
    tokens = [ord(one) for one in text]
    assert write_parts_as_tokens([ord(one) for one in "a@b@"], images, lambda t: [*map(ord, t)]) == tokens
    expanded, places = expand_runs(tokens, images)
    assert "".join(map(chr, expanded)) == "a<ii|iii>b<i>"
    assert places == [[(2, 6)], [(11, 1)]]
    for wrong in ("a@b", "a@b@@"):
        with pytest.raises(ValueError, match="there are 2 images"):
            write_parts(wrong, images, chr)
        with pytest.raises(ValueError, match="there are 2 images"):
            write_parts_as_tokens([ord(one) for one in wrong], images, lambda t: [*map(ord, t)])
    with pytest.raises(ValueError, match="3 runs of image tokens, but the prompt has 4"):
        expand_runs([*tokens, 105], images)


def test_a_video_of_several_runs_has_a_place_for_each_and_takes_the_marks_around_it() -> None:
    image = MediaText(parts=(2,), token_id=105, placeholder=105)
    video = MediaText(
        parts=("1s<", 2, ">2s<", 2, ">"), token_id=118, placeholder=118, around=("<", ">"), grids=(None, None)
    )
    media = [video, image, video]
    for text in ("a<v>i<v>", "av<i>v"):
        written = write_parts(text, media, chr)
        assert written == text.replace("<v>", "v").replace("v", "1s<v>2s<v>")
        tokens = write_parts_as_tokens([*map(ord, text)], media, lambda t: [*map(ord, t)])
        assert tokens == [*map(ord, written)]
    expanded, places = expand_runs([*map(ord, "a1s<v>2s<v>i1s<v>2s<v>")], media)
    assert "".join(map(chr, expanded)) == "a1s<vv>2s<vv>ii1s<vv>2s<vv>"
    assert places == [[(4, 2), (10, 2)], [(13, 2)], [(18, 2), (24, 2)]]
    with pytest.raises(ValueError, match="order"):
        write_parts("i<v><v>", media, chr)


def names_of(tokens: list[int], *spans: tuple[int, int, bytes]) -> list[bytes]:
    root = root_hash(fingerprint="x", kv_dtype="float32", block_tokens=4)
    media = [MediaSpan(start, length, digest * 32) for start, length, digest in spans]
    whole = hash_blocks(root, tokens, 4, media=media)
    for cut in range(0, len(tokens), 4):  # whoever goes on from some block names the rest alike
        parent = whole[cut // 4 - 1] if cut else None
        assert hash_blocks(root, tokens[cut:], 4, parent=parent, media=media, start=cut) == whole[cut // 4 :]
    return [bytes(name) for name in whole]


def test_blocks_of_images_have_names_of_their_own() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 9, 9, 6, 7, 8, 1, 2]
    plain, a, b = names_of(tokens), names_of(tokens, (5, 8, b"a")), names_of(tokens, (5, 8, b"b"))
    assert plain[0] == a[0] == b[0], "the text before an image is the same for all"
    assert not {*plain[1:]} & {*a[1:]} and not {*a[1:]} & {*b[1:]}
    two = names_of(tokens, (5, 4, b"a"), (9, 4, b"b"))
    other = names_of(tokens, (5, 5, b"a"), (10, 3, b"b"))
    assert two[:2] == other[:2] == a[:2], "as far as only the first is seen"
    assert not {*two[2:]} & {*other[2:]}, "where one ends and the next begins counts"


LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": {"model_type": "llama"},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}


def family_of(**config: Any) -> Llava | None:
    found = image_family(ModelFacts(config={**LLAVA, **config}, images={"size": 336}))
    assert found is None or isinstance(found, Llava)
    return found


def test_how_many_tokens_an_image_is() -> None:
    llava, full = family_of(), family_of(vision_feature_select_strategy="full")
    assert llava is not None and full is not None and llava.is_fixed
    assert (llava.image_token_id, llava.tokens_per_image, full.tokens_per_image) == (32000, 576, 577)
    assert llava.parts(width=1, height=5000) == (576,)
    tiled = family_of(model_type="llava_next")
    assert tiled is not None and tiled.tokens_per_image == 576 and not tiled.is_fixed
    shapes = ((672, 672), (336, 672), (1000, 300))
    assert [tiled.parts(width=w, height=h) for w, h in shapes] == [(2928,), (1776,), (2182,)]
    siglip = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    of_siglip = family_of(vision_config=siglip, vision_feature_select_strategy="full")
    assert of_siglip is not None and of_siglip.tokens_per_image == 27 * 27
    others: list[dict[str, Any]] = [{"vision_config": {"model_type": "other"}}, {"model_type": "llama"}]
    assert [family_of(**other) for other in others] == [None] * 2
    assert family_of(vision_config=[]) is None
