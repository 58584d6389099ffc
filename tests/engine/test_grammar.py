"""Answers match their grammar, and are the same independent of how the KV was computed or received."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton_serve.contracts.identity import RequestId
from baton_serve.engine import Engine, StepResult
from tests.engine.conftest import Reference, References
from tests.engine.driving import hand_over, make_engine, make_work, outputs_of, run
from tests.tiny_models import IM_END_ID

pytestmark = pytest.mark.slow

PROMPT = [random.Random(9).randrange(256) for _ in range(40)]
LOOSE: dict[str, Any] = {"temperature": 1.3, "seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON_GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
WORDS = "start: /(yes|no)( (yes|no)){6}/"


@pytest.fixture(scope="module")
def reference(references: References) -> Reference:
    return references("llama")


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def engine(reference: Reference, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(reference.folder, async_scheduling=request.param) as engine:
        yield engine
        engine.check_invariants()


def text_of(reference: Reference, tokens: list[int]) -> str:
    tokenizer = Tokenizer.from_file(str(reference.folder / "tokenizer.json"))
    assert tokens[-1] in (256, IM_END_ID)
    return tokenizer.decode(tokens[:-1], skip_special_tokens=False)


def check(reference: Reference, tokens: list[int]) -> None:
    value = json.loads(text_of(reference, tokens))
    assert set(value) == {"name", "size", "kind"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert value["size"] in range(1000)
    assert value["kind"] in ("red", "green")


@pytest.mark.parametrize("sampling", [{}, LOOSE], ids=["greedy", "loose"])
def test_every_sequence_is_an_object_of_the_schema(
    engine: Engine, reference: Reference, sampling: dict[str, Any]
) -> None:
    work = make_work(engine, "a", PROMPT, sequences=3, grammar=JSON_GRAMMAR, max_tokens=200, logprobs=1, **sampling)
    engine.add(work)
    answers = run(engine)
    assert len(answers) == 3
    for tokens in answers.values():
        check(reference, tokens)


def test_the_same_after_a_handoff_a_replay_and_preemption(engine: Engine, reference: Reference) -> None:
    rules: dict[str, Any] = {"grammar": JSON_GRAMMAR, "max_tokens": 120, **LOOSE}
    work = make_work(engine, "a", PROMPT, sequences=2, **rules)
    engine.add(work)
    here = run(engine)
    with make_engine(reference.folder) as sink:
        assert hand_over(engine, sink, work) == here
    whole = here["a", 0]
    for done in (1, len(whole) // 2, len(whole) - 1):
        engine.add(make_work(engine, "b", PROMPT + whole[:done], num_prompt_tokens=len(PROMPT), **rules))
        assert run(engine)["b", 0] == whole[done:]
    settings = {"num_gpu_blocks_override": 18, "max_model_len": 140, "block_size": 8}
    with make_engine(reference.folder, **settings) as small:
        for name in "abc":
            small.add(make_work(small, name, PROMPT, **rules))
        answers = run(small)
        assert small.stats().preemptions > 0
        assert [answers[name, 0] for name in "abc"] == [whole] * 3


def test_constrained_and_free_sequences_share_a_batch(engine: Engine, reference: Reference) -> None:
    engine.add(make_work(engine, "free", reference.prompts[3]))
    engine.add(make_work(engine, "bound", PROMPT, grammar=WORDS, max_tokens=60))
    answers = run(engine)
    assert answers["free", 0] == reference.answers[3]
    assert re.fullmatch("(yes|no)( (yes|no)){6}", text_of(reference, answers["bound", 0]))


def test_after_the_end_of_sequence_the_rule_is_over(engine: Engine) -> None:
    engine.add(make_work(engine, "a", PROMPT, grammar='start: "yes"', ignore_eos=True, max_tokens=9, min_tokens=9))
    tokens = run(engine)["a", 0]
    assert bytes(tokens[:3]) != b"" and tokens[3] in (256, IM_END_ID)
    assert len(tokens) == 9


def test_rules_that_leave_no_token_fail_the_request_alone(engine: Engine, reference: Reference) -> None:
    results: list[StepResult] = []
    engine.add(make_work(engine, "free", reference.prompts[3]))
    engine.add(make_work(engine, "a", PROMPT, grammar='start: "yes"', allowed_token_ids=[0, 1]))
    engine.add(make_work(engine, "b", PROMPT, grammar="start: nothing"))
    answers = run(engine, results.append)
    assert answers == {("free", 0): reference.answers[3]}
    failed = {f.request_id: (f.code, f.message) for result in results for f in result.failed}
    assert failed["a"] == ("invalid", "no token may follow: the grammar and allowed_token_ids exclude all")  # type: ignore[index]
    assert "unknown name" in failed["b"][1]  # type: ignore[index]
    stats = engine.stats()
    assert stats.free_blocks == stats.total_blocks


def test_a_failed_prompt_keeps_its_blocks_until_it_is_cancelled(engine: Engine) -> None:
    """A consumer may be reading some; to the outside the prompt has failed, and is not held for a fetch."""
    engine.add(make_work(engine, "a", PROMPT, grammar="start: nothing"), mode="prefill")
    results: list[StepResult] = []
    run(engine, results.append)
    assert [f.request_id for result in results for f in result.failed] == ["a"]
    assert not [held for result in results for held in result.held]
    engine.cancel(RequestId("a"))
    stats = engine.stats()
    assert stats.held_blocks == 0 and stats.free_blocks == stats.total_blocks


def test_bad_words_are_never_written(engine: Engine, reference: Reference) -> None:
    prompt, answer = reference.prompts[3], reference.answers[3]
    engine.add(make_work(engine, "a", prompt, bad_words=[answer[2:4], [answer[6]]]))
    tokens = [token for output in outputs_of(engine) for token in output.token_ids]
    assert tokens[:3] == answer[:3]
    assert answer[6] not in tokens
    assert all(tokens[i : i + 2] != answer[2:4] for i in range(len(tokens)))
