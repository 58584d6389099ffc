"""Greedy tokens equal those of transformers.generate in float32, whatever way the KV came to be."""

import pytest

from engine import Engine
from tests.engine.conftest import ANSWER_TOKENS, Reference, References
from tests.engine.driving import hand_over, make_engine, make_work, run
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.slow


@pytest.fixture(params=sorted(FAMILIES))
def reference(request: pytest.FixtureRequest, references: References) -> Reference:
    return references(request.param)


def ask_all(engine: Engine, reference: Reference) -> list[list[int]]:
    """All prompts in one batch."""
    for number, prompt in enumerate(reference.prompts):
        engine.add(make_work(engine, str(number), prompt))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(reference.prompts))]


def test_in_one_batch_and_again_from_the_prefix_cache(reference: Reference) -> None:
    with make_engine(reference.folder) as engine:
        assert ask_all(engine, reference) == reference.answers
        assert engine.stats().prefix_hit_tokens == 0
        assert ask_all(engine, reference) == reference.answers
        assert engine.stats().prefix_hit_tokens > 150


def test_with_chunked_prefill(reference: Reference) -> None:
    with make_engine(reference.folder, max_num_batched_tokens=24) as engine:
        assert ask_all(engine, reference) == reference.answers


def test_with_another_block_size(reference: Reference) -> None:
    with make_engine(reference.folder, block_size=64) as engine:
        assert ask_all(engine, reference) == reference.answers


def test_with_preemption_forced_by_a_small_cache(reference: Reference) -> None:
    settings = {"num_gpu_blocks_override": 16, "max_model_len": 120, "block_size": 8}
    with make_engine(reference.folder, **settings) as engine:
        short = Reference(reference.folder, reference.prompts[:3] * 2, reference.answers[:3] * 2)
        assert ask_all(engine, short) == short.answers
        is_full = all(len(answer) == ANSWER_TOKENS for answer in short.answers)  # some end early, and need less
        assert engine.stats().preemptions > 0 or not is_full


def test_by_replay_after_some_tokens(reference: Reference) -> None:
    with make_engine(reference.folder) as engine:
        for number, (prompt, answer) in enumerate(zip(reference.prompts, reference.answers, strict=True)):
            tokens = prompt + answer[: len(answer) // 2]
            engine.add(make_work(engine, str(number), tokens, num_prompt_tokens=len(prompt)))
        answers = run(engine)
    assert [answers[str(n), 0] for n in range(len(reference.prompts))] == [a[len(a) // 2 :] for a in reference.answers]


def test_by_handoff_with_and_without_cached_prefixes(reference: Reference) -> None:
    with make_engine(reference.folder, max_num_batched_tokens=24) as source, make_engine(reference.folder) as sink:
        for attempt in range(2):
            for number, prompt in enumerate(reference.prompts):
                work = make_work(source, f"{attempt}-{number}", prompt)
                answers = hand_over(source, sink, work)
                assert answers[work.request_id, 0] == reference.answers[number]
        assert source.stats().prefix_hit_tokens > 0
        assert sink.stats().free_blocks == sink.stats().total_blocks


def test_for_two_sequences_of_one_request(reference: Reference) -> None:
    with make_engine(reference.folder) as source, make_engine(reference.folder) as sink:
        prompt, answer = reference.prompts[2], reference.answers[2]
        source.add(make_work(source, "here", prompt, sequences=2))
        assert run(source) == {("here", 0): answer, ("here", 1): answer}
        answers = hand_over(source, sink, make_work(source, "there", prompt, sequences=2))
        assert answers == {("there", 0): answer, ("there", 1): answer}
