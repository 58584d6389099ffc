"""Measure how fast `LLM` answers many prompts at once, with the flags and the output of `vllm bench throughput`.

`baton-bench throughput --model FOLDER --dataset ShareGPT.json --num-prompts 1000`

`baton-bench throughput --model FOLDER --dataset-name random --input-len 1024 --output-len 128 --num-prompts 100`
"""

import argparse
import time
from pathlib import Path
from typing import Any

from baton_serve.bench.command_line import with_dashes
from baton_serve.bench.offline.engine_flags import add_engine_flags, engine_arguments, write_json
from baton_serve.bench.serving.datasets import (
    DatasetError,
    RandomLengths,
    TextMeasure,
    custom_dataset,
    random_dataset,
    read_tokenizer,
    sharegpt_dataset,
)
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.engine import LLM, SamplingParams

DATASETS = ("random", "sharegpt", "custom")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench throughput", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--backend", choices=("vllm", "vllm-chat"), default="vllm", help="vllm-chat: prompts as chats")
    made.add_argument("--dataset-name", choices=DATASETS, help="default: sharegpt with a file, or else random")
    made.add_argument("--dataset", "--dataset-path", type=Path, help="ShareGPT's JSON, or JSON lines with `prompt`")
    made.add_argument("--input-len", type=int, default=1024, help="tokens of random prompts")
    made.add_argument("--output-len", type=int, help="tokens of each answer (default: those of the data set, or 128)")
    made.add_argument("--prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    made.add_argument("--random-range-ratio", type=float, default=0.0, help="variation of lengths: 0.1 means ±10 %%")
    made.add_argument("--num-prompts", type=int, default=1000, help="number of prompts")
    made.add_argument("--n", type=int, default=1, help="answers to each prompt")
    made.add_argument("--disable-detokenize", action="store_true", help="do not turn tokens into text")
    made.add_argument("--profile", action="store_true", help="record the run in VLLM_TORCH_PROFILER_DIR")
    made.add_argument("--output-json", type=Path, help="file for the result")
    add_engine_flags(made)
    return made


def run(arguments: list[str]) -> None:
    made = parser()
    options = made.parse_args(with_dashes(arguments))
    if wrong := _wrong(options):
        made.error(wrong)
    try:
        requests = make_requests(options)
    except DatasetError as exc:
        raise SystemExit(f"baton-bench throughput: {exc}") from exc
    _report(*_measure(requests, options), options)


def _wrong(options: argparse.Namespace) -> str | None:
    """Return why the options contradict each other, or None. Sets the data set's name if it is not given."""
    options.dataset_name = options.dataset_name or ("random" if options.dataset is None else "sharegpt")
    if (options.dataset_name == "random") != (options.dataset is None):
        return f"--dataset-name {options.dataset_name} " + (
            "has no file: leave out --dataset" if options.dataset is not None else "needs --dataset FILE"
        )
    if min(options.num_prompts, options.n, options.output_len or 1) < 1:
        return "--num-prompts, --n and --output-len must be at least 1"
    return None


def make_requests(options: argparse.Namespace) -> list[BenchRequest]:
    """Return the prompts and the lengths of their answers. Raises `DatasetError`."""
    count, seed = options.num_prompts, getattr(options, "seed", 0)
    measure = TextMeasure(read_tokenizer(options.tokenizer or options.model))
    if options.dataset_name == "sharegpt":
        return sharegpt_dataset(options.dataset, count, measure, output_tokens=options.output_len, seed=seed)
    if options.dataset_name == "custom":
        return custom_dataset(options.dataset, count, output_tokens=options.output_len or 128, seed=seed)
    lengths = RandomLengths(
        options.input_len, options.output_len or 128, options.prefix_len, options.random_range_ratio
    )
    return random_dataset(count, lengths, measure, seed)


def _measure(requests: list[BenchRequest], options: argparse.Namespace) -> tuple[float, list[Any]]:
    """Return the seconds in which all requests were answered, and the answers."""
    params = [
        SamplingParams(
            n=options.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.max_tokens,
            detokenize=not options.disable_detokenize,
        )
        for request in requests
    ]
    prompts = [str(request.prompt) for request in requests]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    with LLM(options.model, tokenizer=options.tokenizer, **engine_arguments(options)) as llm:
        if options.profile:
            llm.start_profile()
        started = time.perf_counter()
        if options.backend == "vllm-chat":
            outputs = llm.chat(chats, params, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started
        if options.profile:
            llm.stop_profile()
    return elapsed_s, outputs


def _report(elapsed_s: float, outputs: list[Any], options: argparse.Namespace) -> None:
    tokens_in = sum(len(output.prompt_token_ids or ()) for output in outputs)
    tokens_out = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    total = tokens_in + tokens_out
    print(
        f"Throughput: {len(outputs) / elapsed_s:.2f} requests/s, {total / elapsed_s:.2f} total tokens/s, "
        f"{tokens_out / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {tokens_in}")
    print(f"Total num output tokens:  {tokens_out}")
    if options.output_json is not None:
        write_json(
            options.output_json,
            {
                "elapsed_time": elapsed_s,
                "num_requests": len(outputs),
                "total_num_tokens": total,
                "requests_per_second": len(outputs) / elapsed_s,
                "tokens_per_second": total / elapsed_s,
            },
        )
