"""Audio in prompts of the offline API: greedy tokens equal those of transformers for the same samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_serve import LLM, SamplingParams
from baton_serve.engine import ConfigError, RequestError
from tests.images import picture
from tests.sound_families import FAMILIES, SoundReference, floats, write_sound_model
from tests.speech import PROMPT, RATE_HZ, Reference, tones, wav, write_tiny_whisper

pytestmark = pytest.mark.slow

COUNT = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}
FAMILY = FAMILIES["qwen2_5_omni"]
HEARD, SEEN = FAMILY.audio, FAMILY.image
ONE, TWO, LONG = tones(1, 1.03), tones(2, 0.7), tones(3, 3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_model(tmp_path_factory.mktemp("offline-sounds"), FAMILY)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS, limit_mm_per_prompt={"audio": 2}) as loaded:
        yield loaded


def ask(llm: LLM, text: str, data: dict[str, Any]) -> list[int]:
    prompt: Any = {"prompt": text, "multi_modal_data": data}
    return list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_arrays_and_files_equal_transformers(llm: LLM, folder: Path) -> None:
    reference = SoundReference(folder, FAMILY)
    (_, one), text = reference.answer(f"hear {HEARD} now", [ONE], COUNT), f"hear {HEARD} now"
    for given in [(floats(ONE), RATE_HZ), (ONE, RATE_HZ), floats(ONE), wav(ONE), [(floats(ONE), RATE_HZ)]]:
        assert ask(llm, text, {"audio": given}) == one
    # The model does not hear audio behind its window.
    assert ask(llm, text, {"audio": (LONG, RATE_HZ)}) == reference.answer(text, [LONG], COUNT)[1] != one
    mixed = f"{HEARD} with {SEEN} and {HEARD}"
    seen = picture(1, size=(40, 20))
    data = {"audio": [(ONE, RATE_HZ), (floats(TWO), RATE_HZ)], "image": seen}
    assert ask(llm, mixed, data) == reference.answer(mixed, [ONE, TWO], COUNT, [seen])[1]
    chat: Any = [
        {"role": "user", "content": [{"type": "audio", "audio": (ONE, RATE_HZ)}, {"type": "text", "text": "?"}]}
    ]
    written = f"<|im_start|>user\n{HEARD}?<|im_end|>\n<|im_start|>assistant\n"
    (found,) = llm.chat(chat, GREEDY, use_tqdm=False)
    assert list(found.outputs[0].token_ids) == reference.answer(written, [ONE], COUNT)[1]


def test_wrong_audio_is_refused(llm: LLM) -> None:
    for given, why in [
        (np.zeros((2, 100), dtype=np.float32), "samples"),
        ((ONE, 11_111), "a multiple of 25"),
        (b"no audio", "an audio cannot be read"),
        ([(ONE, RATE_HZ)] * 3, "limit_mm_per_prompt is 2"),
    ]:
        with pytest.raises(ConfigError, match=why):
            ask(llm, HEARD, {"audio": given})
    with pytest.raises(RequestError, match="too short"):
        ask(llm, HEARD, {"audio": (ONE[:100], RATE_HZ)})


def test_whisper_takes_a_window(tmp_path: Path) -> None:
    write_tiny_whisper(tmp_path)
    prompt: Any = {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (floats(ONE), RATE_HZ)}}
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (found,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        expected = Reference(tmp_path).answer(ONE, COUNT, suppress_tokens=None, begin_suppress_tokens=None)
        assert list(found.outputs[0].token_ids) == expected
        long: Any = {**prompt, "multi_modal_data": {"audio": (floats(tones(1, 5.0)), RATE_HZ)}}
        with pytest.raises(RequestError, match="more than a window"):
            llm.generate([long], GREEDY)
        two: Any = {**prompt, "multi_modal_data": {"audio": [(ONE, RATE_HZ)] * 2}}
        with pytest.raises(ConfigError, match="has one audio, not 2"):
            llm.generate([two], GREEDY)
