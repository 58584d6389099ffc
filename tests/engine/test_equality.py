"""Greedy tokens equal those of transformers.generate in float32, independent of how the KV was computed or received."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import pytest

from baton_serve.contracts.block_hash import root_hash
from baton_serve.contracts.messages import Work
from baton_serve.engine import Engine
from tests.engine.conftest import ANSWER_TOKENS, Reference, References
from tests.engine.driving import hand_over, hand_over_all, make_engine, make_work, run
from tests.tiny_models import FAMILIES

pytestmark = pytest.mark.slow
CACHES = [
    *("llama", "mistral", "gemma3", "gemma3n", "gemma4", "gpt_oss", "deepseek_v2", "mimo_v2_flash", "bloom", "falcon"),
    *("qwen3_next", "mamba", "falcon_h1", "nemotron_h", "lfm2", "kimi_linear"),
]
"""One family of each kind of KV cache: with all tokens or a window of them, with both, shared between layers, of
several shapes, with latents, read through transformers' own layers; and of each kind of recurrent states, beside KV or
alone."""


@dataclass
class Case:
    """A family: its reference, and engines that tests share. Each test's works have a salt of their own: no test finds
    what another has cached."""

    reference: Reference

    @cached_property
    def plain(self) -> Engine:
        return make_engine(self.reference.folder)

    @cached_property
    def chunked(self) -> Engine:
        return make_engine(self.reference.folder, max_num_batched_tokens=24)

    def close(self) -> None:
        for name in ("plain", "chunked"):
            if (engine := self.__dict__.get(name)) is not None:
                engine.close()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, references: References) -> Iterator[Case]:
    made = Case(references(request.param))
    yield made
    made.close()


@pytest.fixture
def reference(case: Case) -> Reference:
    return case.reference


def salted(engine: Engine, salt: str, work: Work) -> Work:
    """It shares no cached blocks with what has another salt."""
    layout = engine.layout
    root = root_hash(
        fingerprint=layout.fingerprint, kv_dtype=layout.dtype, block_tokens=layout.block_tokens, cache_salt=salt
    )
    return msgspec.structs.replace(work, root=root)


def ask_all(engine: Engine, reference: Reference, salt: str = "") -> list[list[int]]:
    """Compute all prompts in one batch and return the answers."""
    for number, prompt in enumerate(reference.prompts):
        engine.add(salted(engine, salt, make_work(engine, str(number), prompt)))
    answers = run(engine)
    return [answers[str(number), 0] for number in range(len(reference.prompts))]


def test_in_one_batch_and_again_from_the_prefix_cache(case: Case, reference: Reference) -> None:
    before = case.plain.stats().prefix_hit_tokens
    assert ask_all(case.plain, reference, "again") == reference.answers
    assert case.plain.stats().prefix_hit_tokens == before
    assert ask_all(case.plain, reference, "again") == reference.answers
    assert case.plain.stats().prefix_hit_tokens > before + 150


def test_with_chunked_prefill(case: Case, reference: Reference) -> None:
    assert ask_all(case.chunked, reference, "chunked") == reference.answers


@pytest.mark.parametrize("case", CACHES, indirect=True)
def test_with_another_block_size(reference: Reference) -> None:
    """Larger than half of the prompts; the small cache below has smaller blocks, for every family."""
    with make_engine(reference.folder, block_size=64) as engine:
        assert ask_all(engine, reference) == reference.answers


def test_with_preemption_forced_by_a_small_cache(case: Case, reference: Reference) -> None:
    layout = case.plain.layout
    num_state_blocks = -(-layout.state_bytes // (layout.block_bytes // 2))
    settings = {"num_gpu_blocks_override": 16 + 2 * num_state_blocks, "max_model_len": 120, "block_size": 8}
    with make_engine(reference.folder, **settings) as engine:
        repeats = 4 if num_state_blocks else 2
        short = replace(reference, prompts=reference.prompts[:3] * repeats, answers=reference.answers[:3] * repeats)
        assert ask_all(engine, short) == short.answers
        is_full = all(len(answer) == ANSWER_TOKENS for answer in short.answers)  # some end early, and need less
        assert engine.stats().preemptions > 0 or not is_full


def test_by_replay_after_some_tokens(case: Case, reference: Reference) -> None:
    for number, (prompt, answer) in enumerate(zip(reference.prompts, reference.answers, strict=True)):
        tokens = prompt + answer[: len(answer) // 2]
        work = make_work(case.plain, str(number), tokens, num_prompt_tokens=len(prompt))
        case.plain.add(salted(case.plain, "replay", work))
    answers = run(case.plain)
    assert [answers[str(n), 0] for n in range(len(reference.prompts))] == [a[len(a) // 2 :] for a in reference.answers]


def test_by_handoff_with_and_without_cached_prefixes(case: Case, reference: Reference) -> None:
    """Each alone and then, with their cached prefixes, all in one batch."""
    source, sink = case.chunked, case.plain
    before = source.stats().prefix_hit_tokens
    for number, prompt in enumerate(reference.prompts):
        work = salted(source, "handoff", make_work(source, f"alone-{number}", prompt))
        assert hand_over(source, sink, work)[work.request_id, 0] == reference.answers[number]
    assert source.stats().prefix_hit_tokens == before
    works = [
        salted(source, "handoff", make_work(source, str(number), prompt))
        for number, prompt in enumerate(reference.prompts)
    ]
    answers = hand_over_all(source, sink, works)
    assert [answers[work.request_id, 0] for work in works] == reference.answers
    assert source.stats().prefix_hit_tokens > before
    assert sink.stats().free_blocks == sink.stats().total_blocks


def test_for_two_sequences_of_one_request(case: Case, reference: Reference) -> None:
    source, sink = case.plain, case.chunked
    prompt, answer = reference.prompts[2], reference.answers[2]
    source.add(salted(source, "two", make_work(source, "here", prompt, sequences=2)))
    assert run(source) == {("here", 0): answer, ("here", 1): answer}
    answers = hand_over(source, sink, salted(source, "two", make_work(source, "there", prompt, sequences=2)))
    assert answers == {("there", 0): answer, ("there", 1): answer}
