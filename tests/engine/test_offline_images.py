"""Images in prompts of the offline API: greedy tokens equal those of transformers' own LLaVA."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from baton_serve import LLM, SamplingParams
from baton_serve.engine import ConfigError, RequestError
from tests.images import Reference, data_url, picture
from tests.tiny_models import write_tiny_llava

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=[False, True], ids=["llava", "llava-next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("offline-images") / "m", tiles=request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as loaded:
        yield loaded


def opened(number: int) -> Image.Image:
    return Image.open(BytesIO(picture(number)))


def expected(folder: Path, llm: LLM, before: str, number: int, after: str) -> list[int]:
    tokens = llm.get_tokenizer()
    first, last = (tokens(text, add_special_tokens=False)["input_ids"] for text in (before, after))
    return Reference(folder).answer([*first, picture(number), *last], 8)


def test_answers_to_prompts_with_images_equal_transformers(llm: LLM, folder: Path) -> None:
    prompts: list[Any] = [
        {"prompt": "see <image> now", "multi_modal_data": {"image": opened(1)}},
        {"prompt": "see <image> now", "multi_modal_data": {"image": [np.asarray(opened(2).convert("RGB"))]}},
        {"prompt": "see <image> now", "multi_modal_data": {"image": picture(1)}},
    ]
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    first, second = (expected(folder, llm, "see ", number, " now") for number in (1, 2))
    assert first != second
    assert found == [first, second, first]


def test_a_chat_takes_images_by_url_and_as_pillow_images(llm: LLM, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a picture.png"
    file.write_bytes(picture(3))
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture(3))}},
        {"type": "image_url", "image_url": {"url": file.as_uri()}},
        {"type": "image_pil", "image_pil": opened(3)},
    ]
    answers = []
    for part in parts:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        answers.append(llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    before, after = "<|im_start|>user\n", "what?<|im_end|>\n<|im_start|>assistant\n"
    assert answers == [expected(folder, llm, before, 3, after)] * 3


def test_an_image_is_found_in_the_prefix_cache(llm: LLM) -> None:
    prompt: Any = {"prompt": "again and again <image> " + "the baton " * 8, "multi_modal_data": {"image": opened(7)}}
    other: Any = {**prompt, "multi_modal_data": {"image": opened(8)}}
    first, second, third = (llm.generate(one, GREEDY, use_tqdm=False)[0] for one in (prompt, prompt, other))
    assert second.num_cached_tokens > third.num_cached_tokens
    assert second.outputs == first.outputs != third.outputs


def test_wrong_images_are_refused_and_leave_nothing(llm: LLM) -> None:
    def ask(data: dict[str, Any], text: str = "see <image>", params: SamplingParams = GREEDY) -> None:
        prompt: Any = {"prompt": text, "multi_modal_data": data}
        llm.generate(prompt, params, use_tqdm=False)

    with pytest.raises(ConfigError, match="depth is not supported"):
        ask({"depth": b"x"})
    with pytest.raises(ConfigError, match="does not accept audio here: audio in chats is read by"):
        ask({"audio": np.zeros(900)})
    with pytest.raises(
        ConfigError, match="a Pillow image, an array, the bytes of a file or a tensor of embeddings, not str"
    ):
        ask({"image": "a path"})
    with pytest.raises(RequestError, match="2 images, but the prompt has 1 image tokens"):
        ask({"image": [opened(1), opened(2)]})
    with pytest.raises(RequestError, match="cannot be read"):
        ask({"image": b"no image"})
    with pytest.raises(ConfigError, match="could cut an image"):
        ask({"image": opened(1)}, params=SamplingParams(truncate_prompt_tokens=3))
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "is not fetched here"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "cannot be read"),
        ({"type": "image_url", "image_url": {"url": "file:///does/not/exist.png"}}, "cannot be read"),
        ({"type": "audio_url"}, "'audio_url' is not supported"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aGk="}}, "does not accept videos"),
        ({"type": "image_url", "uuid": "unknown"}, "there is no image 'unknown' here"),
    ]
    for part, why in wrongs:
        with pytest.raises(ConfigError, match=why):
            llm.chat([{"role": "user", "content": [part]}], GREEDY)
    assert llm.llm_engine.get_num_unfinished_requests() == 0
