"""Measure the latency of one batch of prompts through `LLM`, with the flags and the output of `vllm bench latency`.

`baton-bench latency --model FOLDER --input-len 32 --output-len 128 --batch-size 8 --output-json latency.json`
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from baton_serve.bench.command_line import with_dashes
from baton_serve.bench.offline.engine_flags import add_engine_flags, engine_arguments, write_json
from baton_serve.bench.serving.load_client import percentile
from baton_serve.engine import LLM, BeamSearchParams, SamplingParams

PERCENTAGES = (10, 25, 50, 75, 90, 99)
MAX_TOKEN_ID = 10_000
"""Prompts are random tokens below this number, as in vLLM, and below the size of the vocabulary."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--input-len", type=int, default=32, help="tokens of each prompt")
    made.add_argument("--output-len", type=int, default=128, help="tokens of each answer")
    made.add_argument("--batch-size", type=int, default=8, help="prompts in the batch")
    made.add_argument("--n", type=int, default=1, help="answers to each prompt")
    made.add_argument("--use-beam-search", action="store_true", help="search with N beams instead of sampling")
    made.add_argument("--num-iters-warmup", type=int, default=10, help="batches that are not counted")
    made.add_argument("--num-iters", type=int, default=30, help="batches that are counted")
    made.add_argument("--profile", action="store_true", help="record one batch in VLLM_TORCH_PROFILER_DIR and end")
    made.add_argument("--disable-detokenize", action="store_true", help="do not turn tokens into text")
    made.add_argument("--output-json", type=Path, help="file for the result")
    add_engine_flags(made)
    return made


def run(arguments: list[str]) -> None:
    made = parser()
    options = made.parse_args(with_dashes(arguments))
    if min(options.input_len, options.output_len, options.batch_size, options.n, options.num_iters) < 1:
        made.error("--input-len, --output-len, --batch-size, --n and --num-iters must be at least 1")
    # Cached prompts would be measured otherwise: the batch is the same each time.
    with LLM(
        options.model, tokenizer=options.tokenizer, **{"enable_prefix_caching": False} | engine_arguments(options)
    ) as llm:
        batch = _batch(llm, options)
        for _ in range(options.num_iters_warmup):
            batch()
        if options.profile:
            llm.start_profile()
            batch()
            llm.stop_profile()
            return
        latencies_s = [_seconds(batch) for _ in range(options.num_iters)]
    _report(latencies_s, options)


def _batch(llm: LLM, options: argparse.Namespace) -> Callable[[], object]:
    """Return a function that answers the batch."""
    rng = random.Random(getattr(options, "seed", 0))
    size = min(MAX_TOKEN_ID, len(llm.get_tokenizer()))
    prompts = [[rng.randrange(size) for _ in range(options.input_len)] for _ in range(options.batch_size)]
    if options.use_beam_search:
        beams = BeamSearchParams(beam_width=options.n, max_tokens=options.output_len, ignore_eos=True)
        return lambda: llm.beam_search(prompts, beams)
    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=options.output_len,
        detokenize=not options.disable_detokenize,
    )
    return lambda: llm.generate(prompts, params, use_tqdm=False)


def _seconds(batch: Callable[[], object]) -> float:
    started = time.perf_counter()
    batch()
    return time.perf_counter() - started


def _report(latencies_s: list[float], options: argparse.Namespace) -> None:
    percentiles = {percent: percentile(latencies_s, percent) for percent in PERCENTAGES}
    average, deviation = statistics.fmean(latencies_s), statistics.pstdev(latencies_s)
    print(f"Avg latency: {average} seconds")
    print(f"Std latency: {deviation} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    if options.output_json is not None:
        write_json(
            options.output_json,
            {
                "avg_latency": average,
                "std_latency": deviation,
                "latencies": latencies_s,
                "percentiles": percentiles,
            },
        )
