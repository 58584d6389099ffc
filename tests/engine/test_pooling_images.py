"""Vectors of images, and of texts with images, equal those of transformers in float32."""

import functools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForPreTraining,
    AutoTokenizer,
)

from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec, PoolingTask
from baton_serve.contracts.vision import embedder_images, num_embeddings
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import ConfigError, EngineConfig, RequestError
from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.pooling.engine import PoolingEngine
from baton_serve.engine.pooling.model_kind import detect_model_kind
from tests.images import Piece, picture, prompt_of, size_of
from tests.tiny_pooling_models import write_image_embedder
from tools.tiny_families import write_family

Vector = NDArray[np.float32]
IMAGES = [picture(1), picture(2, size=(50, 20)), picture(3, size=(9, 40))]
CHATS: list[list[Piece]] = [
    [1, 2, IMAGES[0], 3, 4],
    [5, 6, 7],
    [IMAGES[1], 8, IMAGES[0], 9, 10, IMAGES[2], 11],
    [1, 2, IMAGES[0], 3, 5],
    [12] * 30,
]


@functools.cache
def engine_of(folder: Path, runner: RunnerType = "auto", task: Task = "auto", num_ranks: int = 1) -> PoolingEngine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=None,
        tensor_parallel_size=num_ranks,
    )
    return PoolingEngine(config, detect_model_kind(folder, runner=runner, task=task))


def computed(
    engine: PoolingEngine,
    inputs: Sequence[PoolingInput],
    files: Sequence[bytes],
    task: PoolingTask = "embed",
    **params: Any,
) -> list[Vector]:
    reader = engine.image_reader
    assert reader is not None
    engine.pool(RequestId("r"), list(inputs), PoolingSpec(task=task, **params), pixels=reader.read(files))
    found: dict[int, Vector] = {}
    while engine.has_work():
        for output in engine.step().pooled:
            found[output.index] = np.frombuffer(output.data, dtype="<f4").reshape(output.shape)
        engine.check_invariants()
    return [found[index] for index in range(len(inputs))]


def chat_input(pieces: Sequence[Piece], folder: Path) -> PoolingInput:
    tokens, spans = prompt_of(pieces, folder)
    return PoolingInput(tokens, media=spans)


def opened(file: bytes) -> Image.Image:
    return Image.open(BytesIO(file)).convert("RGB")


@torch.no_grad()
def decoder_states(folder: Path, pieces: Sequence[Piece], *, whole: bool = False) -> Any:
    """The hidden states of transformers' model without a head; with `whole` the logits of its last token."""
    kind = AutoModelForImageTextToText if whole else AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, spans = prompt_of(pieces, folder)
    ids = torch.tensor([tokens])
    files = [opened(piece) for piece in pieces if isinstance(piece, bytes)]
    given: dict[str, Any] = {}
    if files:
        given = dict(AutoImageProcessor.from_pretrained(folder, backend="pil")(images=files, return_tensors="pt"))
        kinds = torch.zeros_like(ids)
        for span in spans:
            kinds[0, span.start : span.end] = 1
        given["mm_token_type_ids"] = kinds
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
    return output.logits[0, -1] if whole else output.last_hidden_state[0]


DECODERS = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
"""Families whose texts have images, with the beginning of their class."""


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_family(request.param, f"{DECODERS[request.param]}ForConditionalGeneration", folder)
    return folder


def test_decoders_embed_texts_with_images_as_transformers(decoder: Path) -> None:
    """Texts alone share a pass; each input with images has its own, whatever is computed beside it."""
    engine = engine_of(decoder, "pooling")
    states = [decoder_states(decoder, chat) for chat in CHATS]
    inputs = [chat_input(chat, decoder) for chat in CHATS]
    found = computed(engine, inputs, IMAGES)
    for ours, theirs in zip(found, states, strict=True):
        np.testing.assert_allclose(ours, torch.nn.functional.normalize(theirs[-1], dim=-1).numpy(), atol=2e-5)
    rows = computed(engine, inputs, IMAGES, "token_embed", normalize=False)
    for ours, theirs in zip(rows, states, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=5e-4, rtol=1e-4)
    assert not engine._pixels, "images are freed with their request"


def test_a_reranker_scores_texts_with_images_as_transformers(tmp_path: Path) -> None:
    """Qwen3-VL-Reranker: the probability of "yes" against "no"."""
    write_family("qwen3_vl", "Qwen3VLForConditionalGeneration", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"classifier_from_token": ["a", "b"],', 1))
    no, yes = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(["a", "b"])
    expected = [
        torch.sigmoid((logits := decoder_states(tmp_path, chat, whole=True))[yes] - logits[no]) for chat in CHATS
    ]
    engine = engine_of(tmp_path, task="score")
    inputs = [chat_input(chat, tmp_path) for chat in CHATS]
    found = computed(engine, inputs, IMAGES, "classify")
    np.testing.assert_allclose(np.concatenate(found), np.array(expected), atol=2e-5)


def lone_image(folder: Path, file: bytes) -> PoolingInput:
    """The input of one image to a model that takes it by itself."""
    rules = embedder_images(ModelFacts.of(folder))
    assert rules is not None
    size = size_of(file)
    text = rules.family.text_of(width=size["width"], height=size["height"])
    count = num_embeddings(text.parts)
    span = MediaSpan(0, count, digest_of(file), text.grids[0])
    return PoolingInput([rules.family.image_token_id] * count, media=[span])


TEXTS = [[2, 7, 9, 3], [2, 8, 3], [2, *range(4, 12), 3], [2, *[5, 9] * 9, 3]]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_towers_embed_texts_and_images_as_transformers(tmp_path: Path, kind: str) -> None:
    folder = write_image_embedder(tmp_path, kind)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    with torch.no_grad():
        pixels = [processor(images=opened(file), return_tensors="pt") for file in IMAGES]
        expected = [model.get_image_features(**one).pooler_output[0] for one in pixels]
        for ids in TEXTS:
            # The tokenizer's padding, not that of the config: SigLIP's checkpoints may differ there.
            padded = ids if kind == "clip" else ids + [0] * (20 - len(ids))
            expected.append(model.get_text_features(input_ids=torch.tensor([padded])).pooler_output[0])
    engine = engine_of(folder)
    assert engine.profile.tasks == ["embed"] and engine.profile.dimensions == len(expected[0])
    inputs = [*(lone_image(folder, file) for file in IMAGES), *map(PoolingInput, TEXTS)]
    found = computed(engine, inputs, IMAGES, normalize=False)
    np.testing.assert_allclose(np.stack(found), torch.stack(expected).numpy(), atol=2e-5, rtol=1e-4)
    normalized = torch.nn.functional.normalize(torch.stack(expected), dim=-1)
    np.testing.assert_allclose(np.stack(computed(engine, inputs, IMAGES)), normalized.numpy(), atol=2e-5)


@pytest.mark.parametrize("kind", ["colpali", "colqwen2"])
def test_pages_and_questions_get_a_vector_for_each_token_as_in_transformers(tmp_path: Path, kind: str) -> None:
    folder = write_image_embedder(tmp_path, kind)
    model: Any = AutoModelForPreTraining.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pages = []
    expected = []
    for file in IMAGES:
        given = dict(processor(images=opened(file), return_tensors="pt"))
        lone = lone_image(folder, file)
        (span,) = lone.media
        pages.append(PoolingInput([5, *lone.token_ids, 6, 7], media=[MediaSpan(1, *span_rest(span))]))
        if kind == "colqwen2":
            given["pixel_values"] = given["pixel_values"][None]
        expected.append(reference_of(model, pages[-1].token_ids, given, kind))
    questions = [[5, 6, 7], [8] * 12]
    expected += [reference_of(model, ids, {}, kind) for ids in questions]
    engine = engine_of(folder)
    assert engine.profile.tasks == ["token_embed"] and engine.profile.dimensions == 8
    found = computed(engine, [*pages, *map(PoolingInput, questions)], IMAGES, "token_embed")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)
    with pytest.raises(RequestError, match="normalizes its vectors itself"):
        computed(engine, [PoolingInput([5])], [], "token_embed", normalize=False)


def span_rest(span: MediaSpan) -> tuple[Any, ...]:
    return span.length, span.digest, span.grid


@torch.no_grad()
def reference_of(model: Any, token_ids: list[int], given: dict[str, Any], kind: str) -> torch.Tensor:
    ids = torch.tensor([token_ids])
    types = {"token_type_ids": torch.zeros_like(ids)} if kind == "colpali" else {}
    found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given, **types).embeddings[0]
    return found


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_image_embedder(tmp_path, "clip")
    engine = engine_of(folder)
    one, other = (lone_image(folder, file) for file in IMAGES[:2])
    refused = {
        "one image, not 2": PoolingInput(
            one.token_ids * 2, media=[*one.media, MediaSpan(17, 17, other.media[0].digest)]
        ),
        "send no tokens with it": PoolingInput([*one.token_ids, 5], media=one.media),
        "not at its place": PoolingInput([7] * 17, media=one.media),
        "not sent with the request": lone_image(folder, picture(9)),
    }
    for reason, given in refused.items():
        with pytest.raises(RequestError, match=reason):
            computed(engine, [given], IMAGES)
    with pytest.raises(RequestError, match=r"1\.\.20"):
        computed(engine, [PoolingInput([5] * 21)], [])
    assert not engine.has_work() and not engine._pixels


@pytest.mark.parametrize("kind", ["clip", "siglip", "colpali", "colqwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_vectors_of_images_on_two_ranks_equal_those_of_one(tmp_path: Path, kind: str, threaded_ranks: None) -> None:
    """The vectors of one rank are those of transformers."""
    is_decoder = kind in DECODERS
    if is_decoder:
        write_family(kind, f"{DECODERS[kind]}ForConditionalGeneration", tmp_path)
        inputs = [chat_input(chat, tmp_path) for chat in CHATS]
    else:
        write_image_embedder(tmp_path, kind)
        inputs = [*(lone_image(tmp_path, file) for file in IMAGES), *map(PoolingInput, TEXTS)]
    task: PoolingTask = "token_embed" if kind.startswith("col") else "embed"
    one, two = (engine_of(tmp_path, "pooling" if is_decoder else "auto", num_ranks=size) for size in (1, 2))
    for ours, theirs in zip(computed(two, inputs, IMAGES, task), computed(one, inputs, IMAGES, task), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    # Each layer of the texts is divided, and so are the heads of most towers.
    assert len(two._model.parts.sums) >= 2 * 2 and two._model.parts.attention
    two.close()


def test_a_score_of_a_text_with_images_on_two_ranks(tmp_path: Path, threaded_ranks: None) -> None:
    write_family("qwen3_vl", "Qwen3VLForConditionalGeneration", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"classifier_from_token": ["a", "b"],', 1))
    inputs = [chat_input(chat, tmp_path) for chat in CHATS]
    one, two = (engine_of(tmp_path, task="score", num_ranks=size) for size in (1, 2))
    for ours, theirs in zip(
        computed(two, inputs, IMAGES, "classify"), computed(one, inputs, IMAGES, "classify"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    two.close()


def test_heads_that_ranks_cannot_divide_are_refused(tmp_path: Path, threaded_ranks: None) -> None:
    folder = write_image_embedder(tmp_path, "clip")
    with pytest.raises(ConfigError, match=r"3, which does not divide the attention heads .* works is [12]"):
        engine_of(folder, num_ranks=3)
