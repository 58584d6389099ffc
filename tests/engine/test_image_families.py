"""Every family that reads images: prompts and greedy answers equal transformers' own, in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton_serve import LLM, SamplingParams
from tests.images import picture
from tests.vision_families import FAMILIES, VisionReference, write_vision_model

pytestmark = pytest.mark.slow

COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
SIZES = [(24, 18), (1, 1), (70, 9), (8, 61), (47, 50), (33, 16)]


class Chat(NamedTuple):
    text: str
    images: list[bytes]


def chats_of(placeholder: str, smallest: int) -> list[Chat]:
    """Return prompts with 0 to 5 images of many shapes, some of them equal, some in a later turn."""
    a, b, c, d, e, f = (
        picture(number, size=(max(width, smallest), max(height, smallest)))
        for number, (width, height) in enumerate(SIZES)
    )
    mark = placeholder
    return [
        Chat(f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\n", [a]),
        Chat(f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\n", [b]),
        Chat(f"the river {mark}{mark} and in the end {mark}", [c, d, c]),
        Chat(f"{mark}the and {mark} in {mark}\n\n{mark}or{mark}.", [b, e, f, a, d]),
        Chat(
            f"<|im_start|>user\n{mark}what is it?<|im_end|>\n<|im_start|>assistant\na boat<|im_end|>\n{mark}?", [a, e]
        ),
        Chat("no image at all, only the river and the boat", []),
    ]


class Tiny:
    def __init__(self, name: str, folder: Path) -> None:
        self.folder = write_vision_model(folder, FAMILIES[name])
        self.chats = chats_of(FAMILIES[name].placeholder, FAMILIES[name].smallest)
        reference = VisionReference(folder, FAMILIES[name])
        self.answers = [reference.answer(*chat, COUNT) for chat in self.chats]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


def loaded(folder: Path, **settings: Any) -> LLM:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 4, "max_model_len": 1024, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", **options)


def ask(llm: LLM, chats: list[Chat]) -> list[tuple[list[int], list[int]]]:
    prompts: list[Any] = [{"prompt": chat.text, "multi_modal_data": {"image": chat.images}} for chat in chats]
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in found]


def test_the_reference_sees_the_images(tiny: Tiny) -> None:
    assert tiny.answers[0][1] != tiny.answers[1][1]


@pytest.mark.parametrize("step", [1024, 29], ids=["whole", "chunks"])
def test_prompts_and_answers_equal_transformers(tiny: Tiny, step: int) -> None:
    with loaded(tiny.folder, max_num_batched_tokens=step, block_size=8) as llm:
        for _ in range(2):  # the second time with hits in the prefix cache, which may end within images
            assert ask(llm, tiny.chats) == tiny.answers
        again: Any = {"prompt": tiny.chats[4].text, "multi_modal_data": {"image": tiny.chats[4].images}}
        assert llm.generate([again], GREEDY, use_tqdm=False)[0].num_cached_tokens > 16
