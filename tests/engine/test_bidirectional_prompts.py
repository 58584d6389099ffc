"""PaliGemma: all tokens of a prompt see each other, so that each prompt is computed by one step and only equal prompts
share blocks. Greedy answers equal transformers' own, in float32."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_serve import BeamSearchParams, SamplingParams
from baton_serve.contracts.messages import Work, with_prompt_root
from baton_serve.engine import Engine
from baton_serve.engine.errors import RequestError
from tests.engine.driving import make_engine, make_work, run
from tests.engine.test_image_families import COUNT, GREEDY, Chat, ask, loaded
from tests.images import data_url, picture
from tests.vision_families import FAMILIES, VisionReference, write_vision_model

pytestmark = pytest.mark.slow

A, B = picture(1, size=(24, 18)), picture(2, size=(30, 40))
QUESTION = "<image>what is it, and where does the river end"
ALIKE = [Chat(QUESTION, [A]), Chat(f"{QUESTION} now", [A]), Chat(QUESTION, [B]), Chat(f"{QUESTION} here", [A])]


class Known:
    def __init__(self, name: str, folder: Path) -> None:
        self.folder = write_vision_model(folder, FAMILIES[name])
        self.reference = VisionReference(folder, FAMILIES[name])
        self.answers = [self.reference.answer(*chat, COUNT) for chat in ALIKE]


@pytest.fixture(scope="module", params=["paligemma", "paligemma2"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    yield Known(request.param, tmp_path_factory.mktemp(request.param))


def work_of(engine: Engine, name: str, tokens: list[int], **sampling: Any) -> Work:
    return with_prompt_root(make_work(engine, name, tokens, **sampling), engine.layout)


def test_only_equal_prompts_share_blocks(known: Known) -> None:
    with loaded(known.folder, block_size=4, enable_prefix_caching=True) as llm:

        def cached(chat: Chat) -> int | None:
            prompt: Any = {"prompt": chat.text, "multi_modal_data": {"image": chat.images}}
            return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

        assert [cached(chat) for chat in ALIKE] == [0, 0, 0, 0]
        assert all(cached(chat) for chat in ALIKE)
        assert ask(llm, ALIKE) == known.answers


def test_prompts_that_end_behind_a_block_of_any_size_are_found_again(known: Known) -> None:
    """If all but one token of a prompt is cached, that token still sees all of it."""
    length = len(known.answers[0][0])
    for size in range(2, 9):
        with loaded(known.folder, block_size=size) as llm:
            assert [ask(llm, ALIKE[:1]) for _ in range(2)] == [known.answers[:1]] * 2, length % size


def test_steps_mix_prompts_and_answers(known: Known) -> None:
    """There is room for one prompt beside the running answers, and for parts of the next ones."""
    longest = max(len(tokens) for tokens, _ in known.answers)
    with loaded(known.folder, block_size=8, max_num_batched_tokens=longest + 4) as llm:
        assert ask(llm, ALIKE * 3) == known.answers * 3


def test_several_sequences_and_beams_continue_from_the_same_prompt(known: Known) -> None:
    prompt: Any = {"prompt": ALIKE[0].text, "multi_modal_data": {"image": ALIKE[0].images}}
    tokens, answer = known.answers[0]
    with loaded(known.folder, block_size=8) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, n=2)
        (found,) = llm.generate([prompt], params, use_tqdm=False)
        assert [list(one.token_ids) for one in found.outputs] == [answer, answer]
        # A beam's tokens count as prompt of the next step, and still see no later ones.
        text: Any = {"prompt_token_ids": known.reference.tokens("the river", [])["input_ids"][0].tolist()}
        (beams,) = llm.beam_search([text], BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True))
        assert list(beams.sequences[0].tokens)[-COUNT:] == known.reference.answer("the river", [], COUNT)[1]
    assert len(tokens) > 16


def test_a_prompt_of_text_sees_itself_in_both_directions(known: Known) -> None:
    text = "no image at all, only the river and the boat"
    tokens, answer = known.reference.answer(text, [], COUNT)
    with make_engine(known.folder, block_size=8) as engine:
        for name in "ab":
            engine.add(work_of(engine, name, tokens, max_tokens=COUNT, ignore_eos=True))
            assert run(engine)[name, 0] == answer


def test_refused_prompts_name_the_remedy(known: Known) -> None:
    with make_engine(known.folder, block_size=8, max_num_batched_tokens=40, max_num_seqs=4) as engine:
        assert engine.limits.max_whole_tokens == 36
        fits = work_of(engine, "fits", [5] * 36, max_tokens=2)
        engine.add(fits)
        run(engine)
        with pytest.raises(RequestError, match=r"37 tokens.* the maximum is 36: raise max_num_batched_tokens"):
            engine.add(work_of(engine, "long", [5] * 37, max_tokens=2))
        with pytest.raises(RequestError, match="prompt_logprobs is not possible with this model"):
            engine.add(work_of(engine, "logprobs", [5] * 9, max_tokens=2, prompt_logprobs=1))
        with pytest.raises(RequestError, match="not that of the prompt"):
            engine.add(make_work(engine, "root", [5] * 9, max_tokens=2))
        longer = msgspec.structs.replace(fits, request_id="more", token_ids=[*fits.token_ids, 6])
        engine.add(longer)  # a replay: the token was generated
        run(engine)


def test_a_step_holds_the_longest_prompt_unless_a_setting_says_otherwise(known: Known) -> None:
    with make_engine(known.folder, max_model_len=1500, max_num_seqs=8) as engine:
        assert engine.limits.max_num_batched_tokens == 1508


def test_chats_need_no_template_of_the_model(known: Known, tmp_path: Path) -> None:
    folder = shutil.copytree(known.folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    image = {"type": "image_url", "image_url": {"url": data_url(A)}}
    content = [image, {"type": "text", "text": ALIKE[0].text.removeprefix("<image>")}]
    with loaded(folder) as llm:
        (found,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert (list(found.prompt_token_ids or ()), list(found.outputs[0].token_ids)) == known.answers[0]
