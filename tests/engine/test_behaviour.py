"""Features of requests beside greedy tokens."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton_serve.contracts.block_hash import hash_blocks
from baton_serve.contracts.events import BlocksStored
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.messages import TokenLogprobs
from baton_serve.engine import Engine, FirstTokenInfo, RequestError, StepResult
from tests.engine.conftest import Reference, References
from tests.engine.driving import copy_block, hand_over, make_engine, make_work, outputs_of, run

pytestmark = pytest.mark.slow

PROMPT = [random.Random(4).randrange(256) for _ in range(40)]
LOOSE: dict[str, Any] = {
    "temperature": 1.5,
    "top_p": 0.95,
    "top_k": 50,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
}


@pytest.fixture(scope="module")
def reference(references: References) -> Reference:
    return references("llama")


@pytest.fixture
def engine(reference: Reference) -> Iterator[Engine]:
    with make_engine(reference.folder) as engine:
        yield engine
        engine.check_invariants()


def ask(engine: Engine, request_id: str = "a", **sampling: Any) -> list[int]:
    engine.add(make_work(engine, request_id, PROMPT, **sampling))
    return run(engine)[request_id, 0]


def test_a_seed_repeats_its_answer_and_another_does_not(engine: Engine) -> None:
    assert ask(engine, "a", seed=1, **LOOSE) == ask(engine, "b", seed=1, **LOOSE)
    assert ask(engine, "c", seed=2, **LOOSE) != ask(engine, "d", seed=1, **LOOSE)


def test_a_sampled_stream_goes_on_the_same_after_a_replay(engine: Engine) -> None:
    whole = ask(engine, "a", seed=1, ignore_eos=True, **LOOSE)
    work = make_work(engine, "b", PROMPT + whole[:5], num_prompt_tokens=len(PROMPT), seed=1, ignore_eos=True, **LOOSE)
    engine.add(work)
    outputs = outputs_of(engine)
    assert [t for output in outputs for t in output.token_ids] == whole[5:]
    assert outputs[0].position == 5


def test_a_sampled_stream_is_the_same_across_a_handoff(engine: Engine, reference: Reference) -> None:
    work = make_work(engine, "a", PROMPT, sequences=3, seed=5, ignore_eos=True, **LOOSE)
    engine.add(work)
    here = run(engine)
    assert len({tuple(tokens) for tokens in here.values()}) == 3
    with make_engine(reference.folder) as sink:
        assert hand_over(engine, sink, work) == here


def test_the_first_request_does_not_see_the_tables_of_the_warm_up(engine: Engine) -> None:
    """This was a bug: epochs of two request tables were confused, and a sequence wrote into another one's block."""
    engine.add(make_work(engine, "a", PROMPT, sequences=3, seed=0, ignore_eos=True, max_tokens=40, **LOOSE))
    first = run(engine)
    engine.add(make_work(engine, "a", PROMPT, sequences=3, seed=0, ignore_eos=True, max_tokens=40, **LOOSE))
    assert run(engine) == first


def test_a_lost_block_changes_the_answer(engine: Engine, reference: Reference) -> None:
    """Therefore the comparisons with transformers detect a lost block."""
    prompt, answer = reference.prompts[3], reference.answers[3]
    engine.add(make_work(engine, "a", prompt))
    run(engine)
    names = hash_blocks(make_work(engine, "b", prompt).root, prompt, engine.layout.block_tokens)
    pinned = engine.pin(RequestId("pin"), names)
    engine.kv.tensor[pinned[2].block] = 0
    engine.unpin(RequestId("pin"))
    engine.add(make_work(engine, "c", prompt))
    assert run(engine)["c", 0] != answer


def test_a_failed_handoff_is_finished_here(engine: Engine, reference: Reference) -> None:
    prompt = reference.prompts[3]
    work = make_work(engine, "a", prompt)
    with make_engine(reference.folder) as source:
        source.add(work, mode="prefill")
        blocks: dict[bytes, int] = {}
        run(source, lambda result: blocks.update(b for done in result.completed for b in done.blocks))
        reservation = engine.reserve(work)
        assert reservation is not None
        for name, block in reservation.missing[:3]:
            copy_block(source, blocks[name], engine, block)
    engine.mark_received(work.request_id, reservation.names[:3])
    engine.admit_locally(work.request_id)
    first: list[FirstTokenInfo] = []
    answers = run(engine, lambda result: first.extend(result.first))
    assert answers["a", 0] == reference.answers[3]
    assert first[0].cached_tokens == 3 * engine.layout.block_tokens


def test_stop_tokens_end_a_sequence_and_are_reported(engine: Engine, reference: Reference) -> None:
    prompt, answer = reference.prompts[3], reference.answers[3]
    position = next(i for i in range(2, len(answer)) if answer.index(answer[i]) == i)
    engine.add(make_work(engine, "a", prompt, stop_token_ids=[answer[position]]))
    outputs = outputs_of(engine)
    assert [t for output in outputs for t in output.token_ids] == answer[: position + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", answer[position])


def test_min_tokens_suppresses_stop_tokens(engine: Engine, reference: Reference) -> None:
    prompt, answer = reference.prompts[3], reference.answers[3]
    engine.add(make_work(engine, "a", prompt, stop_token_ids=[answer[1]], min_tokens=4, ignore_eos=True))
    (tokens,) = run(engine).values()
    assert len(tokens) >= 4
    assert answer[1] not in tokens[:4]


def test_min_tokens_suppresses_the_end_of_sequence_even_if_it_is_ignored(engine: Engine) -> None:
    answer = ask(engine, "a", logit_bias={256: 100.0}, ignore_eos=True, min_tokens=4)
    assert 256 not in answer[:4]
    assert answer[4:] == [256] * 8


def test_ignoring_the_end_of_sequence_writes_all_tokens(engine: Engine) -> None:
    forced = {256: 100.0}
    assert ask(engine, "a", logit_bias=forced) == [256]
    assert ask(engine, "b", logit_bias=forced, ignore_eos=True) == [256] * 12


def test_the_longest_length_ends_a_sequence(reference: Reference) -> None:
    with make_engine(reference.folder, max_model_len=45) as engine:
        engine.add(make_work(engine, "a", PROMPT, max_tokens=100, ignore_eos=True))
        outputs = outputs_of(engine)
        assert len(outputs) == 5
        assert outputs[-1].finish_reason == "length"


def test_logprobs_are_those_of_the_model(engine: Engine, reference: Reference) -> None:
    engine.add(make_work(engine, "a", PROMPT, logprobs=3, prompt_logprobs=2))
    results: list[StepResult] = []
    run(engine, results.append)
    answer = [o for result in results for o in result.tokens]
    tokens = PROMPT + [o.token_ids[0] for o in answer]
    model = AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    prompt_logprobs = next(info for result in results for info in result.first).prompt_logprobs
    assert prompt_logprobs is not None
    assert prompt_logprobs[0] is None
    reported = [*prompt_logprobs, *(o.logprobs[0] for o in answer if o.logprobs)]
    assert len(reported) == len(tokens)
    for position in range(1, len(tokens)):
        check_logprobs(reported[position], tokens[position], expected[position - 1])


def check_logprobs(reported: TokenLogprobs | None, token: int, expected: torch.Tensor) -> None:
    assert reported is not None
    assert reported.chosen.token_id == token
    assert reported.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-3)
    assert reported.chosen.rank == int((expected >= expected[token]).sum())
    for entry in reported.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-3)


def test_prompt_logprobs_are_the_same_in_chunks_and_with_a_cached_prefix(reference: Reference) -> None:
    found = []
    for batched in (16, 64):
        with make_engine(reference.folder, max_num_batched_tokens=batched) as engine:
            for name in ("a", "b"):
                engine.add(make_work(engine, name, PROMPT, prompt_logprobs=0))
                first: list[FirstTokenInfo] = []
                run(engine, lambda result, first=first: first.extend(result.first))  # type: ignore[misc]
                found.append([entry.chosen.logprob for entry in first[0].prompt_logprobs or [] if entry])
    assert len(found[0]) == len(PROMPT) - 1
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-4)


def test_events_and_the_snapshot_agree(engine: Engine) -> None:
    stored: list[bytes] = []

    def see(result: StepResult) -> None:
        stored.extend(n for event in result.events if isinstance(event, BlocksStored) for n in event.names)

    engine.add(make_work(engine, "a", PROMPT))
    run(engine, see)
    assert stored == engine.cached_block_hashes()
    assert len(stored) == (len(PROMPT) + 11) // engine.layout.block_tokens


def test_cancelled_requests_leave_nothing_behind(engine: Engine) -> None:
    engine.add(make_work(engine, "running", PROMPT, sequences=3, ignore_eos=True))
    engine.add(make_work(engine, "held", PROMPT[:20]), mode="prefill")
    reserved = make_work(engine, "reserved", PROMPT[:30])
    assert engine.reserve(reserved)
    for _ in range(3):
        engine.step()
    assert engine.stats().held_blocks == 2
    engine.add(make_work(engine, "waiting", PROMPT))
    for request_id in ("running", "held", "reserved", "waiting", "unknown"):
        engine.cancel(RequestId(request_id))
    run(engine)
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks
    assert (stats.running, stats.waiting, stats.held, stats.reserved) == (0, 0, 0, 0)


def test_bad_requests_are_refused_and_the_engine_lives(engine: Engine) -> None:
    with pytest.raises(RequestError, match="token ids"):
        engine.add(make_work(engine, "a", [320]))
    with pytest.raises(RequestError) as caught:
        engine.reserve(make_work(engine, "a", [1] * 600))
    assert caught.value.code == "too_long"
    assert len(ask(engine, ignore_eos=True)) == 12


def test_running_out_of_device_memory_fails_the_step_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(plan: object) -> None:
        raise torch.OutOfMemoryError("made up")

    engine.add(make_work(engine, "a", PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "choose", run_out)
        result = engine.step()
    assert [failed.request_id for failed in result.failed] == ["a"]
    assert len(ask(engine, "a", ignore_eos=True)) == 12


def test_copies_of_blocks_wait_for_what_was_queued_of_a_step_ahead_that_ran_out_of_memory(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(reference.folder, async_scheduling=True, host_kv_bytes=1 << 20) as engine:
        engine.add(make_work(engine, "a", PROMPT, ignore_eos=True))
        start = engine._runner.start

        def run_out(*arguments: Any, ahead: bool = False, **settings: Any) -> Any:
            if ahead:
                raise torch.OutOfMemoryError("made up")
            return start(*arguments, ahead=ahead, **settings)

        before = engine.kv.order.num_steps
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "start", run_out)
            engine.step()
        assert engine._host._num_ended == engine.kv.order.num_steps == before + 2
        assert len(run(engine)["a", 0]) == 11


@pytest.mark.parametrize("stage", ["start", "choose"])
def test_blocks_handed_on_stay_when_the_device_runs_out_of_memory(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A consumer may be reading what earlier steps completed: nothing else may be written there until `cancel`."""

    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("made up")

    settings = {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "async_scheduling": False}
    with make_engine(reference.folder, **settings) as engine:
        engine.add(make_work(engine, "a", PROMPT), mode="prefill")
        ((_, blocks),) = [(done.request_id, done.blocks) for done in engine.step().completed]
        assert len(blocks) == 1
        shown = engine.kv.device_tensor[blocks[0].block].clone()
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, stage, run_out)
            assert [failed.request_id for failed in engine.step().failed] == ["a"]
        stats = engine.stats()
        assert stats.held_blocks == 3
        for number in range(stats.free_blocks // 3):  # as many as fit beside it: each free block is written
            engine.add(make_work(engine, f"other-{number}", [(7 * token + 1) % 256 for token in PROMPT], max_tokens=1))
        run(engine)
        assert torch.equal(engine.kv.device_tensor[blocks[0].block], shown)
        engine.cancel(RequestId("a"))
        engine.check_invariants()
        assert engine.stats().free_blocks == stats.total_blocks


def test_rates_are_known_before_any_work(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.prefill_tokens_per_s > 0
    assert stats.decode_step_s > 0
    assert stats.steps == 0
