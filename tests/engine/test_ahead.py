"""Steps that are launched before the tokens of those before them are known change no answer and leak nothing."""

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine, StepResult
from baton_serve.engine.core.scheduler import SampleRow, ScheduledBatch
from baton_serve.engine.sample.sampler import SamplerOutput
from tests.engine.conftest import Reference, References
from tests.engine.driving import hand_over, make_engine, make_work, outputs_of, run

pytestmark = pytest.mark.slow

PROMPT = [random.Random(4).randrange(256) for _ in range(40)]
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2, "top_p": 0.9, "seed": 3},
    {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.3, "seed": 4},
    {"logprobs": 2},
    {"temperature": 1.0, "min_tokens": 8, "logit_bias": {256: 5.0}, "seed": 5},
    {"allowed_token_ids": list(range(50)), "max_tokens": 1},
    {"prompt_logprobs": 1, "max_tokens": 5},
]

ahead_engine = partial(make_engine, async_scheduling=True)


class Ahead:
    """Counts the steps that an engine launched ahead."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[ScheduledBatch] = []
        schedule = engine._scheduler.schedule_ahead

        def counted(now: float) -> ScheduledBatch | None:
            plan = schedule(now)
            self.plans += [] if plan is None else [plan]
            return plan

        monkeypatch.setattr(engine._scheduler, "schedule_ahead", counted)


@pytest.fixture
def reference(references: References) -> Reference:
    return references("llama")


@pytest.fixture
def engine(reference: Reference) -> Iterator[Engine]:
    with ahead_engine(reference.folder) as engine:
        yield engine
        run(engine)
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gpt2"])
def test_greedy_tokens_equal_transformers(family: str, references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = references(family)
    with ahead_engine(reference.folder, max_num_batched_tokens=24) as engine:
        ahead = Ahead(engine, monkeypatch)
        for number, prompt in enumerate(reference.prompts):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
        assert [answers[str(n), 0] for n in range(len(reference.prompts))] == reference.answers
        assert sum(len(plan.chunks) > 1 for plan in ahead.plans) > 10


def test_preemption_waits_for_the_steps_being_computed(reference: Reference) -> None:
    settings = {"num_gpu_blocks_override": 16, "max_model_len": 120, "block_size": 8}
    with ahead_engine(reference.folder, **settings) as engine:
        for number, prompt in enumerate(reference.prompts[:3] * 2):
            engine.add(make_work(engine, str(number), prompt))
        answers = run(engine)
        assert [answers[str(n), 0] for n in range(6)] == reference.answers[:3] * 2
        assert engine.stats().preemptions > 0


def test_every_kind_of_sampling_gives_the_tokens_of_steps_one_by_one(reference: Reference) -> None:
    reported = []
    for is_ahead in (False, True):
        with make_engine(reference.folder, async_scheduling=is_ahead) as engine:
            for number, sampling in enumerate(MIXED):
                work = make_work(engine, str(number), PROMPT[: 10 + 3 * number], sequences=1 + number % 2, **sampling)
                engine.add(work)
            outputs = outputs_of(engine)
            reported.append(sorted(outputs, key=lambda o: (o.request_id, o.sequence, o.position)))
    assert reported[0] == reported[1]


def test_the_second_token_s_step_is_launched_before_the_first_token_is_known(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is not launched ahead if several sequences fork from it, or if the prompt's log-probabilities are still
    to be reported."""
    for number, (asked, is_ahead) in enumerate(
        [({}, True), ({"sequences": 2}, False), ({"prompt_logprobs": 1}, False), ({"max_tokens": 1}, False)]
    ):
        with ahead_engine(reference.folder) as engine:
            ahead = Ahead(engine, monkeypatch)
            engine.add(make_work(engine, str(number), PROMPT, ignore_eos=True, **asked))
            engine.step()
            assert bool(ahead.plans) == is_ahead
            run(engine)


def test_a_stop_token_ends_a_sequence_that_was_launched_on(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, answer = reference.prompts[3], reference.answers[3]
    position = next(i for i in range(2, len(answer)) if answer.index(answer[i]) == i)
    ahead = Ahead(engine, monkeypatch)
    engine.add(make_work(engine, "a", prompt, stop_token_ids=[answer[position]]))
    results: list[StepResult] = []
    assert run(engine, results.append)["a", 0] == answer[: position + 1]
    assert len(ahead.plans) == position + 1  # one for nothing
    assert engine.stats().generated_tokens == position + 1


def test_the_blocks_of_an_ended_sequence_stay_until_the_step_that_writes_to_them_is_over(engine: Engine) -> None:
    engine.add(make_work(engine, "a", PROMPT, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert engine._steps.ahead is not None
    engine.cancel(RequestId("a"))
    engine.check_invariants()
    assert engine.stats().free_blocks < engine.stats().total_blocks
    assert engine.step().tokens == []
    assert engine.stats().free_blocks == engine.stats().total_blocks


def test_prompts_for_another_instance_follow_each_other_and_their_blocks_wait_for_their_own_step_alone(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ahead_engine(reference.folder, max_num_batched_tokens=24) as source, ahead_engine(reference.folder) as sink:
        ahead, starts, waited = Ahead(source, monkeypatch), list[ScheduledBatch](), list[tuple[int, int]]()
        start = source._runner.start

        def count(plan: ScheduledBatch, **kwargs: Any) -> Any:
            starts.append(plan)
            return start(plan, **kwargs)

        def mark(blocks: Iterable[int], *, after: Any = None) -> None:
            if list(blocks):
                waited.append((after, len(starts)))

        monkeypatch.setattr(source._runner, "start", count)
        monkeypatch.setattr(source.kv, "reached", lambda: len(starts))
        monkeypatch.setattr(source.kv, "mark", mark)
        for number, prompt in enumerate(reference.prompts):
            answers = hand_over(source, sink, make_work(source, str(number), prompt))
            assert answers[str(number), 0] == reference.answers[number]
        assert ahead.plans
        assert {launched - after for after, launched in waited} == {0, 1}


def test_a_prompt_cancelled_while_its_next_step_was_launched_is_not_reported(reference: Reference) -> None:
    with ahead_engine(reference.folder, max_num_batched_tokens=16, block_size=8) as source:
        source.add(make_work(source, "a", PROMPT), mode="prefill")
        assert [len(done.blocks) for done in source.step().completed] == [2]
        assert source._steps.ahead is not None
        source.cancel(RequestId("a"))
        source.check_invariants()
        result = source.step()
        assert not (result.completed or result.tokens or result.first or result.held)
        assert source.stats().free_blocks == source.stats().total_blocks


def letter(character: str) -> int:
    """Its token: the vocabulary begins with the printable bytes."""
    return ord(character) - ord("!")


def test_structured_output_follows_its_grammar(reference: Reference) -> None:
    reported = []
    for is_ahead in (False, True):
        with make_engine(reference.folder, async_scheduling=is_ahead) as engine:
            rules: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
            engine.add(make_work(engine, "bound", PROMPT, grammar='start: ("ab" | "cd"){20}', seed=1, **rules))
            engine.add(make_work(engine, "free", PROMPT, seed=2, **rules))
            reported.append(run(engine))
    assert reported[0] == reported[1]
    assert set(reported[1]["bound", 0]) <= {letter(c) for c in "abcd"}


def test_a_request_that_fails_while_it_is_launched_on_fails_once(engine: Engine) -> None:
    engine.add(make_work(engine, "a", PROMPT, grammar='start: "yes"', allowed_token_ids=[letter("y")], ignore_eos=True))
    results: list[StepResult] = []
    assert run(engine, results.append) == {("a", 0): [letter("y")]}
    assert [failed.request_id for result in results for failed in result.failed] == ["a"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 1}])
def test_a_request_whose_logits_are_no_numbers_fails_alone(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any]
) -> None:
    """This test has no captured graphs; for those see test_graphs."""
    with ahead_engine(reference.folder, enforce_eager=True) as engine:
        spoil(engine, monkeypatch)
        for request_id in ("good", "bad"):
            engine.add(make_work(engine, request_id, PROMPT, ignore_eos=True, **sampling))
        tokens, failed = {"good": 0, "bad": 0}, []
        while engine.has_work():
            result = engine.step()
            failed += result.failed
            for output in result.tokens:
                tokens[output.request_id] += len(output.token_ids)
    assert [(one.request_id, one.code) for one in failed] == [("bad", "internal")]
    assert "NaN logits" in failed[0].message
    assert tokens == {"good": 12, "bad": 2}


def spoil(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third logits of `bad` are NaN."""
    choose = engine._runner._sampler.choose

    def broken(logits: Tensor, rows: Sequence[SampleRow], **given: Any) -> SamplerOutput:
        logits = logits.clone()
        for number, row in enumerate(rows):
            if row.sequence.request.work.request_id == "bad" and row.sequence.num_generated == 2:
                logits[number] = float("nan")
        return choose(logits, rows, **given)

    monkeypatch.setattr(engine._runner._sampler, "choose", broken)
