"""Vectors of images through the router and through the offline API, equal to transformers' own processors."""

import base64
import struct
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForPreTraining, AutoTokenizer

from baton_serve.engine import LLM
from baton_serve.engine.errors import ConfigError, EngineError
from tests.e2e.cluster import Api
from tests.e2e.in_process import in_background
from tests.e2e.test_grid_images import pieces_of, write_model
from tests.e2e.test_images import Content, body_of
from tests.engine.test_pooling_images import decoder_states
from tests.images import data_url, picture
from tests.tiny_models import VISION_TEMPLATE
from tests.tiny_pooling_models import write_image_embedder
from tools.tiny_families import TOKEN_SIDE

IMAGES = [picture(1), picture(2, size=(50, 20))]
TEXTS = ["the baton is handed over", "a cat ?"]


def opened(file: bytes) -> Image.Image:
    return Image.open(BytesIO(file)).convert("RGB")


def with_image(file: bytes, *texts: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(file)}}]
    return [{"role": "user", "content": [*parts, *({"type": "text", "text": text} for text in texts)]}]


def vector(api: Api, **body: Any) -> Any:
    answer = api.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return torch.tensor(answer.json()["data"][0]["embedding"])


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_embedder(tmp_path_factory.mktemp("clip") / "clip", "clip")


@pytest.fixture(scope="module")
def clip_api(clip: Path) -> Iterator[Api]:
    with in_background(clip, roles=("unified",)) as api:
        yield api


@torch.no_grad()
def clip_vectors(folder: Path) -> torch.Tensor:
    """Return the vectors of `IMAGES` and then of `TEXTS`."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(
        images=list(map(opened, IMAGES)), return_tensors="pt"
    )
    found = [model.get_image_features(**pixels).pooler_output]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        found.append(model.get_text_features(input_ids=ids).pooler_output)
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def test_a_router_serves_vectors_of_images_and_texts(clip: Path, clip_api: Api) -> None:
    expected = clip_vectors(clip)
    found = [vector(clip_api, messages=with_image(file)) for file in IMAGES]
    found += [vector(clip_api, input=TEXTS[0])]
    found += [vector(clip_api, messages=[{"role": "user", "content": TEXTS[1]}])]
    torch.testing.assert_close(torch.stack(found), expected, atol=2e-5, rtol=0)
    answer = clip_api.client.post(
        "/pooling", json={"messages": with_image(IMAGES[0]), "encoding_format": "base64"}
    ).json()
    numbers = struct.unpack("<12f", base64.b64decode(answer["data"][0]["data"]))
    np.testing.assert_allclose(numbers, expected[0].numpy(), atol=2e-5)
    assert answer["usage"]["prompt_tokens"] == 17  # the tower's outputs: 4 x 4 patches, and one of the whole


def test_a_router_refuses_inputs_that_a_model_with_two_towers_cannot_read(clip_api: Api) -> None:
    two = [{"role": "user", "content": with_image(IMAGES[0])[0]["content"] * 2}]
    broken = data_url(IMAGES[0][:60])
    bomb = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": broken}}]}]
    video = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}]}]
    for messages, reason in [
        (with_image(IMAGES[0], "a cat"), "an image and a text apart"),
        (two, "one image, not 2"),
        (bomb, "image"),
        (video, "a video is not accepted in inputs"),
        (with_image(picture(1, size=(1, 300))), "at most 100 times"),
    ]:
        answer = clip_api.client.post("/v1/embeddings", json={"messages": messages})
        assert answer.status_code == 400 and reason in answer.text, answer.text
    cut = clip_api.client.post("/v1/embeddings", json={"messages": with_image(IMAGES[0]), "truncate_prompt_tokens": 5})
    assert cut.status_code == 400 and "cut an image" in cut.text
    assert vector(clip_api, input=TEXTS[0]).shape == (12,)


def test_the_offline_api_embeds_images(clip: Path) -> None:
    llm = LLM(str(clip), dtype="float32", device="cpu")
    try:
        prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": opened(file)}} for file in IMAGES]
        found = [output.outputs.embedding for output in llm.embed([*prompts, *TEXTS])]
        np.testing.assert_allclose(np.array(found), clip_vectors(clip).numpy(), atol=2e-5)
        with pytest.raises(ConfigError, match="apart"):
            llm.embed({"prompt": "a cat", "multi_modal_data": {"image": opened(IMAGES[0])}})
        with pytest.raises(EngineError, match="one image, not 2"):
            llm.embed({"prompt": "", "multi_modal_data": {"image": list(map(opened, IMAGES))}})
    finally:
        llm.close()


@pytest.mark.parametrize("kind", ["colpali", "colqwen2"])
def test_pages_and_questions_are_written_as_the_processor_of_the_model_writes_them(tmp_path: Path, kind: str) -> None:
    folder = write_image_embedder(tmp_path, kind)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    name = {"colpali": "ColPaliProcessor", "colqwen2": "ColQwen2Processor"}[kind]
    images.image_seq_length = 16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    make = getattr(import_module(f"transformers.models.{kind}.processing_{kind}"), name)
    settings = {"visual_prompt_prefix": "a block" if kind == "colpali" else "is <|image_pad|> a block"}
    processor = make(images, tokenizer, query_prefix="is ", **settings)
    model: Any = AutoModelForPreTraining.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        inputs = [processor.process_images(images=[opened(file)]) for file in IMAGES]
        inputs += [processor.process_queries(text=[text]) for text in TEXTS]
        for given in inputs:
            given.pop("labels", None)
        expected = [model(**given).embeddings[0].numpy() for given in inputs]
    with in_background(folder, roles=("unified",)) as api:
        bodies: list[dict[str, Any]] = [
            *({"messages": with_image(file)} for file in IMAGES),
            *({"input": text} for text in TEXTS),
        ]
        for body, wanted in zip(bodies, expected, strict=True):
            answer = api.client.post("/pooling", json={**body, "task": "token_embed"})
            assert answer.status_code == 200, answer.text
            np.testing.assert_allclose(np.array(answer.json()["data"][0]["data"]), wanted, atol=2e-5)
    llm = LLM(str(folder), dtype="float32", device="cpu")
    try:
        prompts: list[Any] = [{"prompt": "", "multi_modal_data": {"image": opened(file)}} for file in IMAGES]
        outputs = llm.encode([*prompts, *TEXTS], pooling_task="token_embed")
        for output, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output.outputs.data.numpy(), wanted, atol=2e-5)
    finally:
        llm.close()


@pytest.mark.parametrize("runner", ["pooling", "score"])
def test_a_decoder_embeds_and_scores_texts_with_images_through_the_router(tmp_path: Path, runner: str) -> None:
    """Such models are Qwen3-VL-Embedding and Qwen3-VL-Reranker."""
    write_model("qwen3_vl", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"classifier_from_token": ["a", "b"],', 1))
    settings = {"runner": "pooling"} if runner == "pooling" else {"task": "score"}
    template = {} if runner == "pooling" else {"chat_template": VISION_TEMPLATE}
    contents: list[Content] = [[IMAGES[0], "What is it?"], ["A river."], ["It is ", IMAGES[1], " or ", IMAGES[0]]]
    parts = [body_of(content)["messages"][0]["content"] for content in contents]
    with in_background(tmp_path, roles=("unified",), instance=settings, **template) as api:
        if runner == "pooling":
            rows = []
            for part in parts:
                found = vector(api, messages=[{"role": "user", "content": part}], add_generation_prompt=True)
                rows.append(found)
            for content, row in zip(contents, rows, strict=True):
                states = decoder_states(tmp_path, pieces_of(tmp_path, [("user", content)]))[-1]
                torch.testing.assert_close(row, torch.nn.functional.normalize(states, dim=-1), atol=2e-5, rtol=0)
            body = {"query": {"content": parts[0]}, "documents": [{"content": parts[2]}, {"content": parts[0]}, "x"]}
            ranked = api.client.post("/rerank", json=body)
            assert ranked.status_code == 200, ranked.text
            first = ranked.json()["results"][0]
            assert first["index"] == 1 and first["relevance_score"] == pytest.approx(1.0, abs=1e-5)
            assert first["document"]["text"] == "What is it?"
            larger = {"min_pixels": 16 * TOKEN_SIDE**2}
            tokens = [
                api.client.post("/v1/embeddings", json={"messages": [{"role": "user", "content": parts[0]}], **more})
                for more in ({}, {"mm_processor_kwargs": larger})
            ]
            counts = [answer.json()["usage"]["prompt_tokens"] for answer in tokens]
            assert counts[0] != counts[1], counts
        else:
            answer = api.client.post("/score", json={"text_1": {"content": parts[0][:1]}, "text_2": ["A river."]})
            assert answer.status_code == 200, answer.text
            pieces = pieces_of(tmp_path, [("query", [IMAGES[0]]), ("document", ["A river."])], answers=False)
            logits = decoder_states(tmp_path, pieces, whole=True)
            no, yes = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(["a", "b"])
            wanted = torch.sigmoid(logits[yes] - logits[no]).item()
            assert answer.json()["data"][0]["score"] == pytest.approx(wanted, abs=2e-5)
