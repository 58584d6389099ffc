"""Embeddings of images in chats: what instances receive, and hostile tensors."""

import base64
import json
import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import save

from baton_serve.contracts.media import Embedded, TokenGrid, digest_of, split_header
from baton_serve.contracts.messages import Prefill
from baton_serve.contracts.vision import image_family
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.services.common.settings.configuration import load
from baton_serve.services.router.protocol.image_limits import ImageLimits
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.router.text.multimodal.client_tensors import read_tensor
from tests.unit.router.conftest import Router
from tests.unit.router.test_images import PATH, TOKENS, A, error_of, see, shown, vision_model

__all__ = ["see", "vision_model"]

ROWS = torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(0))
ALLOWED = ImageLimits(takes_embeddings=True)


def saved(value: Any) -> bytes:
    out = BytesIO()
    torch.save(value, out)
    return out.getvalue()


def sent(*contents: str | bytes, grid: bytes | None = None, **more: Any) -> dict[str, Any]:
    """Return a chat with embeddings: bytes are files, and texts go as they are."""
    body = shown("ab")
    for content in contents:
        rows = content if isinstance(content, str) else base64.b64encode(content).decode()
        both = {"image_embeds": rows, "image_grid_thw": base64.b64encode(grid or b"").decode()}
        part = {"type": "image_embeds", "image_embeds": rows if grid is None else both, **more}
        body["messages"][0]["content"].append(part)
    return body


def archive(pickled: bytes, files: Mapping[str, bytes] = MappingProxyType({}), compression: int = 0) -> bytes:
    out = BytesIO()
    with ZipFile(out, "w", compression) as written:
        written.writestr("archive/data.pkl", pickled)
        for name, data in files.items():
            written.writestr(f"archive/{name}", data)
    return out.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_of_torch_and_safetensors_have_the_same_values(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    wanted = rows.view(torch.uint8).numpy().tobytes()
    for file in (saved(rows), save({"any": rows}), saved(torch.cat([rows, rows])[TOKENS:])):
        found = read_tensor(file)
        assert (found.dtype, found.shape, found.data) == (str(dtype)[6:], (TOKENS, 8), wanted)
    assert read_tensor(saved(torch.tensor([[1, 4, 6]]))).integers() == [1, 4, 6]


def test_prefill_gets_the_rows_under_the_hash_of_their_bytes(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        router.service.image_limits = ALLOWED
        rows, one = ROWS.to(torch.float16), ROWS[None]
        answer = await router.http.post(PATH, json=sent(saved(rows), save({"x": one}), saved(rows)))
        assert answer.status_code == 200, answer.text
        (prefill,) = router.fakes["prefill-0"].assignments()
        assert isinstance(prefill, Prefill)
        assert [(span.start, span.length) for span in prefill.work.media] == [(2 + 6 * at, 6) for at in range(3)]
        assert [span.digest for span in prefill.work.media[:2]] == [digest_of(file) for file in prefill.images]
        header, data = split_header(prefill.images[0])
        assert header.embedded == Embedded(num_rows=TOKENS, width=8, dtype="float16")
        assert data == rows.view(torch.uint8).numpy().tobytes()
        counted = await router.http.post("/tokenize", json=sent(saved(rows)))
        assert counted.json()["count"] == 2 + TOKENS

    see(scenario)


def test_they_need_the_option(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        assert "only with --enable-mm-embeds" in await error_of(router, sent(saved(ROWS)))
        assert "only with --enable-mm-embeds" in str(
            (await router.http.post("/tokenize", json=sent(saved(ROWS)))).json()
        )

    see(scenario)
    settings = load(
        RouterSettings, ["--model", "m", "--enable-mm-embeds"], {}, prefix="BATON__ROUTER__", program="", description=""
    )
    assert settings.image_limits.takes_embeddings


def test_embeddings_with_a_uuid_are_kept_apart_from_images(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        router.service.image_limits = ALLOWED
        router.service.image_memory.cache._max_bytes = 1 << 20
        await router.http.post(PATH, json=sent(saved(ROWS), uuid="one"))
        picture = shown("ab", A)
        again = sent("", uuid="one")
        del again["messages"][0]["content"][1]["image_embeds"]
        assert (await router.http.post(PATH, json=again)).status_code == 200
        del picture["messages"][0]["content"][1]["image_url"]
        picture["messages"][0]["content"][1]["uuid"] = "one"
        assert "there is no image 'one'" in await error_of(router, picture)

    see(scenario)


class _Attack:
    def __reduce__(self) -> Any:
        return print, ("this code must not run",)


def _pickled(file: bytes) -> bytes:
    with ZipFile(BytesIO(file)) as opened:
        return opened.read("archive/data.pkl")


_PICKLE, _DATA = _pickled(saved(ROWS)), ROWS.numpy().tobytes()
_HEADER = {"x": {"dtype": "F32", "shape": [TOKENS, 8], "data_offsets": [0, len(_DATA)]}}
HOSTILE: dict[str, tuple[bytes | str, str]] = {
    "code": (archive(pickle.dumps(_Attack(), 2)), "single tensor"),
    "other functions": (archive(_PICKLE.replace(b"collections", b"os\nsystem##")), "single tensor"),
    "a dict": (saved({"x": ROWS}), "single tensor"),
    "a parameter": (saved(torch.nn.Parameter(ROWS)), "single tensor"),
    "no values": (archive(_PICKLE), "single tensor"),
    "too few values": (archive(_PICKLE, {"data/0": _DATA[:-4]}), "does not fit its 188 bytes"),
    "compressed": (archive(_PICKLE, {"data/0": bytes(1 << 22)}, ZIP_DEFLATED), "compressed"),
    "a long pickle": (archive(b"(" * 100_000), "single tensor"),
    "a pickle that ends": (archive(_PICKLE[:-20]), "single tensor"),
    "tuples without marks": (archive(b"\x80\x02tttt."), "single tensor"),
    "a huge memo": (archive(b"\x80\x02Nr\xff\xff\xff\x7f."), "single tensor"),
    "many entries": (archive(b"", {str(at): b"" for at in range(2000)}), "single tensor"),
    "big-endian": (archive(_PICKLE, {"data/0": _DATA, "byteorder": b"big"}), "big-endian"),
    "an older format": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "single tensor"),
    "a huge header": ((1 << 62).to_bytes(8, "little") + b"{}", "single tensor"),
    "two tensors": (save({"x": ROWS, "y": ROWS.clone()}), "has 2 tensors"),
    "bytes": (save({"x": torch.zeros(6, 8, dtype=torch.uint8)}), "values are U8"),
    "doubles": (saved(ROWS.double()), "DoubleStorage"),
    "a transposed tensor": (saved(ROWS.T), "contiguous"),
    "integers": (saved(ROWS.long()), "of int64"),
    "one row": (saved(ROWS[0]), "must be [embeddings, hidden size]"),
    "no rows": (saved(ROWS[:0]), "does not fit"),
    "too few rows": (saved(ROWS[:3]), "has 6 embeddings, not 3"),
    "a negative shape": (archive(_PICKLE.replace(b"K\x06K\x08\x86", b"J\xff\xff\xff\xffK\x08\x86")), "single tensor"),
    "no base64": ("?" * 9, "not valid base64"),
    "an address": ("http://127.0.0.1/", "not valid base64"),
    "offsets": (
        (size := len(text := json.dumps({"x": {**_HEADER["x"], "data_offsets": [-8, 4]}}).encode())).to_bytes(
            8, "little"
        )
        + text,
        "single tensor",
    ),
}


def test_hostile_tensors_get_one_clear_error(see: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(router: Router) -> None:
        router.service.image_limits = ALLOWED
        for name, (file, why) in HOSTILE.items():
            assert why in await error_of(router, sent(file)), name
        router.service.image_limits = limits_with(max_bytes=100)
        assert "more than 100 bytes (--max-image-bytes)" in await error_of(router, sent(saved(ROWS)))
        assert not router.fakes["prefill-0"].assignments()
        for part in ({"image_embeds": 1}, {"image_embeds": {"image_embeds": "", "other": ""}}, {}):
            body = shown("ab")
            body["messages"][0]["content"].append({"type": "image_embeds", **part})
            assert (await router.http.post(PATH, json=body)).status_code in (400, 422)
        assert (await router.http.post(PATH, json=shown("ab"))).status_code == 200

    see(scenario)
    assert "must not run" not in capsys.readouterr().out


def limits_with(**values: Any) -> ImageLimits:
    return ImageLimits(takes_embeddings=True, **values)


def test_grids_must_fit_the_rows() -> None:
    family = image_family(ModelFacts(config={"model_type": "qwen2_vl"}, images={"patch_size": 8}))
    assert family is not None
    text = family.text_of_rows(rows(6, (1, 4, 6)))
    assert text.parts == [6] and text.grids == (TokenGrid(1, 2, 3),)
    for grid in (None, (1, 4, 4), (2, 4, 6), (1, 3, 8), (1, -4, -6), (1, 1 << 62, 1 << 62)):
        with pytest.raises(ValueError, match="image_grid_thw"):
            family.text_of_rows(rows(6, grid))
    with pytest.raises(ValueError, match="leave it out"):
        other = image_family(ModelFacts(config={"model_type": "gemma3"}, images={"size": {}}))
        assert other is not None
        other.text_of_rows(rows(6, (1, 4, 6)))
    marked = image_family(ModelFacts(config={"model_type": "mistral3", "vision_config": {}}, images={"size": None}))
    assert marked is not None
    assert list(marked.text_of_rows(rows(6, (1, 4, 6))).parts) == [3, "[IMG_BREAK]", 3, "[IMG_END]"]
    for grid in (None, (1, 4, 4), (2, 4, 6), (1, 3, 8), (1, -4, -6)):
        with pytest.raises(ValueError, match="need an image_grid_thw"):
            marked.text_of_rows(rows(6, grid))


def rows(count: int, grid: tuple[int, int, int] | None = None) -> Embedded:
    return Embedded(num_rows=count, width=8, dtype="float32", grid=grid)


def test_a_grid_is_read_from_its_tensor(see: Callable[..., None]) -> None:
    async def scenario(router: Router) -> None:
        router.service.image_limits = ALLOWED
        for grid, why in (
            (saved(torch.tensor([1, 2])), "2 values"),
            (saved(ROWS), "int64 or int32"),
            (b"\1", "image_grid_thw cannot be used"),
            (saved(torch.tensor([[1, 4, 6]])), "leave it out"),
        ):
            assert why in await error_of(router, sent(saved(ROWS), grid=grid))

    see(scenario)
