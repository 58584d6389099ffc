"""Audio in prompts, by every family that reads it: prompts and greedy answers equal transformers' own, in float32."""

import json
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from baton_serve.contracts.audio import is_wav
from baton_serve.contracts.media import MediaSpan, digest_of
from baton_serve.contracts.messages import Work
from baton_serve.contracts.vision import MediaText, expand_runs, image_family, media_spans, write_parts
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine import Engine
from baton_serve.engine.errors import RequestError
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.images import picture
from tests.sound_families import FAMILIES, WINDOW_S, Samples, SoundReference, write_sound_model
from tests.speech import RATE_HZ, tones, wav

pytestmark = pytest.mark.slow

COUNT = 6
SETTINGS: dict[str, Any] = {"block_size": 8, "max_model_len": 512, "max_num_seqs": 4}
ASKED = "<|im_start|>user\n{}what is it?<|im_end|>\n<|im_start|>assistant\n"


class Chat(NamedTuple):
    """A prompt with placeholders, its audio, and its images; `order` are the files as they stand in the prompt."""

    text: str
    sounds: list[Samples]
    images: list[bytes]
    order: list[bytes]


def chats_of(heard: str, seen: str) -> list[Chat]:
    """Return prompts with 0 to 3 audios, one of them longer than a window, some in a later turn."""
    short, other, long = tones(1, 1.03), tones(2, 1.03), tones(3, WINDOW_S * 1.6)
    a, b, c = wav(short), wav(other), wav(long)
    chats = [
        Chat(ASKED.format(heard), [short], [], [a]),
        Chat(ASKED.format(heard), [other], [], [b]),
        Chat(f"the river {heard} and {heard} in the end {heard}.", [short, other, short], [], [a, b, a]),
        Chat(ASKED.format(heard), [long], [], [c]),
        Chat(f"{ASKED.format(heard)}a boat<|im_end|>\n{heard}?", [short, tones(4, 0.1)], [], [a, wav(tones(4, 0.1))]),
        Chat("no audio at all, only the river and the boat", [], [], []),
    ]
    if seen:
        image = picture(1, size=(40, 20))
        chats.append(Chat(f"see {seen} and hear {heard} then {seen}!", [other], [image] * 2, [image, b, image]))
        chats.append(Chat(f"{heard}hear and see {seen}.", [long], [image], [c, image]))
    return chats


class Tiny:
    def __init__(self, name: str, folder: Path) -> None:
        self.family = FAMILIES[name]
        self.folder = write_sound_model(folder, self.family)
        rules = image_family(ModelFacts.of(folder))
        assert rules is not None and rules.audio is not None
        self.rules = rules
        self.chats = chats_of(self.family.audio, self.family.image)
        reference = SoundReference(folder, self.family)
        self.answers = [reference.answer(chat.text, chat.sounds, COUNT, chat.images) for chat in self.chats]

    def prompt_of(self, chat: Chat) -> tuple[list[int], list[MediaSpan], list[bytes]]:
        """Return the tokens, the spans and the files of a prompt, by the rules of the family."""
        assert self.rules.audio is not None
        longest = int(self.rules.audio.longest_s * RATE_HZ)
        # A router cuts audio to what the model hears.
        files = [self.cut(file, longest) for file in chat.order]
        media = [self.text_of(file) for file in files]
        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        written = write_parts(chat.text, media, lambda token_id: tokenizer.id_to_token(token_id) or "")
        tokens, places = expand_runs(tokenizer.encode(written, add_special_tokens=False).ids, media)
        return tokens, media_spans(places, media, [digest_of(file) for file in files]), list(dict.fromkeys(files))

    def cut(self, file: bytes, longest: int) -> bytes:
        if not is_wav(file):
            return file
        sounds = {wav(sound): sound for chat in self.chats for sound in chat.sounds}
        return wav(sounds[file][:longest])

    def text_of(self, file: bytes) -> MediaText:
        assert self.rules.audio is not None
        if is_wav(file):
            return self.rules.audio.text_of((len(file) - 44) // 2)
        with Image.open(BytesIO(file)) as opened:
            return self.rules.text_of(width=opened.width, height=opened.height)

    def work(self, engine: Engine, name: str, number: int) -> tuple[Work, Any]:
        assert engine.image_reader is not None
        tokens, spans, files = self.prompt_of(self.chats[number])
        work = make_work(engine, name, tokens, max_tokens=COUNT, ignore_eos=True, num_prompt_tokens=len(tokens))
        return msgspec.structs.replace(work, media=spans), engine.image_reader.read(files)

    def ask_all(self, engine: Engine) -> list[list[int]]:
        for number in range(len(self.chats)):
            work, pixels = self.work(engine, str(number), number)
            engine.add(work, pixels=pixels)
        answers = run(engine)
        return [answers[str(number), 0] for number in range(len(self.chats))]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_prompts_equal_transformers_and_the_reference_hears(tiny: Tiny) -> None:
    assert [tiny.prompt_of(chat)[0] for chat in tiny.chats] == [tokens for tokens, _ in tiny.answers]
    assert tiny.answers[0][1] != tiny.answers[1][1]


@pytest.mark.parametrize("step", [1024, 13], ids=["whole", "chunks"])
def test_answers_equal_transformers(tiny: Tiny, step: int) -> None:
    expected = [answer for _, answer in tiny.answers]
    with make_engine(tiny.folder, reads_images=True, max_num_batched_tokens=step, **SETTINGS) as engine:
        assert tiny.ask_all(engine) == expected
        first = engine.stats().prefix_hit_tokens
        # Prefixes end within audio, so that the rest of it is encoded or found among the kept embeddings.
        assert tiny.ask_all(engine) == expected
        assert engine.stats().prefix_hit_tokens > first + 100


def test_by_handoff_to_an_engine_without_an_encoder(tiny: Tiny) -> None:
    with (
        make_engine(tiny.folder, reads_images=True, max_num_batched_tokens=40, **SETTINGS) as source,
        make_engine(tiny.folder, **SETTINGS) as sink,
    ):
        assert sink.image_reader is None
        for number, (_, answer) in enumerate(tiny.answers):
            work, pixels = tiny.work(source, str(number), number)
            assert hand_over(source, sink, work, pixels=pixels)[work.request_id, 0] == answer


def test_by_replay_after_some_tokens_and_with_preemption(tiny: Tiny) -> None:
    """A prompt that is computed again reads its audio again."""
    with make_engine(tiny.folder, reads_images=True, **SETTINGS) as engine:
        for number, (_, answer) in enumerate(tiny.answers):
            work, pixels = tiny.work(engine, str(number), number)
            engine.add(msgspec.structs.replace(work, token_ids=work.token_ids + answer[:3]), pixels=pixels)
        answers = run(engine)
        assert [answers[str(n), 0] for n in range(len(tiny.answers))] == [answer[3:] for _, answer in tiny.answers]
    lengths = [len(tiny.answers[number][0]) for number in (0, 4)]
    room = sum(-(-length // 4) for length in lengths) + 1  # too little for the answers of both
    tight = {"num_gpu_blocks_override": room, "block_size": 4, "max_model_len": max(lengths) + COUNT}
    with make_engine(tiny.folder, reads_images=True, enable_prefix_caching=False, **tight) as engine:
        for number in (0, 4):
            work, pixels = tiny.work(engine, str(number), number)
            engine.add(work, pixels=pixels)
        assert run(engine) == {(str(number), 0): tiny.answers[number][1] for number in (0, 4)}
        assert engine.stats().preemptions > 0


def test_two_ranks_and_a_handoff_to_one(tiny: Tiny) -> None:
    expected = [answer for _, answer in tiny.answers]
    two_ranks = make_engine(
        tiny.folder, reads_images=True, tensor_parallel_size=2, max_num_batched_tokens=13, **SETTINGS
    )
    with two_ranks as two, make_engine(tiny.folder, **SETTINGS) as one:
        assert tiny.ask_all(two) == expected
        work, pixels = tiny.work(two, "over", 2)
        assert hand_over(two, one, work, pixels=pixels)["over", 0] == expected[2]


@pytest.mark.parametrize("tiny", ["voxtral"], indirect=True)
def test_files_that_cannot_be_heard_are_refused(tiny: Tiny) -> None:
    file = wav(tones(0))
    with make_engine(tiny.folder, reads_images=True, **SETTINGS) as engine:
        assert engine.image_reader is not None
        for wrong, reason in [
            (file[:44], "no samples"),
            (file[:-1], "not a WAV file of one channel"),
            (wav(tones(0).reshape(-1, 2)), "not a WAV file of one channel"),
            (picture(1), "reads no images"),
        ]:
            with pytest.raises(RequestError, match=reason):
                engine.image_reader.read([wrong])


@pytest.mark.parametrize("tiny", ["qwen2_5_omni"], indirect=True)
def test_the_thinker_of_a_whole_omni_model_is_found(tiny: Tiny, tmp_path: Path) -> None:
    """Published checkpoints have the parts that speak beside it, and its config within theirs."""
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    stored = load_file(tmp_path / "model.safetensors")
    named = {f"thinker.{_published(name)}": tensor for name, tensor in stored.items()}
    talker = {"talker.model.norm.weight": torch.ones(3), "token2wav.dit.proj.bias": torch.ones(3)}
    save_file({**named, **talker}, tmp_path / "model.safetensors", {"format": "pt"})
    thinker = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with make_engine(tmp_path, reads_images=True, **SETTINGS) as engine:
        assert tiny.ask_all(engine) == [answer for _, answer in tiny.answers]


def _published(name: str) -> str:
    """Return the name of a weight within the thinker as published checkpoints have it."""
    inner = name.removeprefix("model.")
    return name.replace("language_model.", "") if inner.startswith("language_model.") else inner
