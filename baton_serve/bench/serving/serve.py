"""Send load to an OpenAI-compatible server and print the report of `vllm bench serve`, whose flags it takes.

`baton-bench serve --backend openai-chat --host 127.0.0.1 --port 8000 --dataset-name random --random-input-len 1024
--random-output-len 512 --num-prompts 10 --request-rate inf --goodput ttft:500 tpot:50 --save-result`
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from baton_serve.bench.report import show
from baton_serve.bench.serving import serve_options
from baton_serve.bench.serving.datasets import (
    Arrivals,
    DatasetError,
    RandomImages,
    RandomLengths,
    TextMeasure,
    custom_dataset,
    random_dataset,
    read_tokenizer,
    sharegpt_dataset,
    with_images,
)
from baton_serve.bench.serving.load_client import BenchTarget, connect, drive, first_model, wait_until_ready
from baton_serve.bench.serving.serve_report import ServeMeasures, measure, result_fields, rows, text
from baton_serve.bench.serving.traces import TraceError, load_trace
from baton_serve.bench.serving.workload import BenchRequest, trace_requests

PROFILE_TIMEOUT_S = 120.0
"""Longest time in which the server starts a profile, or writes it."""


def run(arguments: list[str]) -> None:
    options = serve_options.parse(arguments)
    try:
        requests = make_requests(options)
    except (DatasetError, TraceError) as exc:
        raise SystemExit(f"baton-bench serve: {exc}") from exc
    target = make_target(options)
    if options.ready_check_timeout_sec > 0:
        asyncio.run(wait_until_ready(_warmups(1)[0], target, timeout_s=options.ready_check_timeout_sec))
    try:
        if target.model is None:
            target = replace(target, model=asyncio.run(_first_model(target)))
        measures = _measure(requests, target, options)
    except httpx.HTTPError as exc:
        raise SystemExit(
            f"baton-bench serve: {options.base_url} does not answer ({exc!r}); start the server, or give --base-url, "
            "or --ready-check-timeout-sec to wait for it"
        ) from exc
    if options.json:
        show(rows(measures, "serve"), as_json=True)
    else:
        print(text(measures, max_concurrency=options.max_concurrency, request_rate=options.request_rate))
    if options.save_result or options.append_result:
        _save(options, measures, target)


def make_requests(options: argparse.Namespace) -> list[BenchRequest]:
    """Return the requests of the data set with their times. Raises `DatasetError` or `TraceError`."""
    count, seed, path = options.num_prompts, options.seed, options.dataset_path
    if options.dataset_name == "trace":
        scales = {"length_scale": options.length_scale, "time_scale": options.time_scale}
        return trace_requests(load_trace(path, count=count, **scales), seed=seed)
    if options.dataset_name == "custom":
        tokens, shuffle = options.custom_output_len, not options.disable_shuffle
        found = custom_dataset(path, count, output_tokens=tokens, seed=seed, shuffle=shuffle)
    elif options.dataset_name == "sharegpt":
        found = sharegpt_dataset(
            path, count, _text_measure(options), output_tokens=options.sharegpt_output_len, seed=seed
        )
    else:
        lengths = RandomLengths(
            input_tokens=options.random_input_len,
            output_tokens=options.random_output_len,
            prefix_tokens=options.random_prefix_len,
            range_ratio=options.random_range_ratio,
        )
        found = random_dataset(count, lengths, _text_measure(options), seed)
    if options.dataset_name == "random-mm":
        ratio = options.random_mm_num_mm_items_range_ratio
        sizes = options.random_mm_bucket_config
        found = with_images(found, RandomImages(options.random_mm_base_items_per_request, sizes, ratio), seed)
    arrivals = Arrivals(
        options.request_rate,
        options.burstiness,
        options.ramp_up_strategy,
        options.ramp_up_start_rps or 0.0,
        options.ramp_up_end_rps or 0.0,
    )
    return [replace(request, at_s=at) for request, at in zip(found, arrivals.times(count, seed), strict=True)]


def _text_measure(options: argparse.Namespace) -> TextMeasure:
    """Return what counts tokens. Raises `DatasetError` if the tokenizer that is named does not exist."""
    name = options.tokenizer or options.model
    if name is None or options.skip_tokenizer_init:
        return TextMeasure(None)
    tokenizer = read_tokenizer(name)
    if tokenizer is None and options.tokenizer is not None:
        raise DatasetError(f"--tokenizer {name} is neither a folder nor a cached model with tokenizer.json")
    if tokenizer is None:
        sys.stderr.write(f"{name} has no tokenizer here, so lengths are estimated; give --tokenizer FOLDER\n")
    return TextMeasure(tokenizer)


def make_target(options: argparse.Namespace) -> BenchTarget:
    """Return the server, and what each request contains."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    sampling = {name: getattr(options, name) for name in serve_options.SAMPLING if name != "temperature"}
    logprobs: dict[str, Any] = {"logprobs": options.logprobs}
    if options.logprobs is not None and options.backend == "openai-chat":
        logprobs = {"logprobs": True, "top_logprobs": options.logprobs}
    given = {name: value for name, value in (sampling | logprobs).items() if value is not None}
    return BenchTarget(
        base_url=options.base_url,
        model=options.served_model_name or options.model,
        backend=options.backend,
        endpoint=options.endpoint,
        headers=headers | dict(options.header),
        request_id_prefix=options.request_id_prefix,
        extra=(given if options.backend != "openai-embeddings" else {}) | options.extra_body,
        adapters=tuple(options.lora_modules),
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        max_concurrency=options.max_concurrency,
        verify_tls=not options.insecure,
    )


def _measure(requests: Sequence[BenchRequest], target: BenchTarget, options: argparse.Namespace) -> ServeMeasures:
    """Warm up, send all requests and return what was measured. Raises `SystemExit` if no request succeeded."""
    if options.num_warmups:
        asyncio.run(drive(_warmups(options.num_warmups), target))
    progress = _progress(len(requests)) if sys.stderr.isatty() and not options.disable_tqdm else lambda: None
    if options.profile:
        _profile(target, "/start_profile")
    try:
        outcomes, duration_s = asyncio.run(drive(requests, target, on_end=progress))
    finally:
        if options.profile:
            _profile(target, "/stop_profile")
    return measure(
        outcomes,
        duration_s,
        metrics=options.percentile_metrics,
        percentiles=options.metric_percentiles,
        objectives=dict(options.goodput),
    )


def _warmups(count: int) -> list[BenchRequest]:
    """Return short requests that share no prefix with a measured prompt."""
    return random_dataset(count, RandomLengths(64, 4), TextMeasure(None), seed=-1)


async def _first_model(target: BenchTarget) -> str:
    async with connect(target) as client:
        return await first_model(client)


def _profile(target: BenchTarget, path: str) -> None:
    """Start or stop the server's profiler. Raises `SystemExit` if it has none."""
    answer = httpx.post(
        f"{target.base_url}{path}", headers=target.headers, timeout=PROFILE_TIMEOUT_S, verify=target.verify_tls
    )
    if answer.status_code != 200:
        raise SystemExit(f"baton-bench serve: --profile: the server answered {answer.status_code} to {path}")


def _progress(count: int) -> Callable[[], None]:
    """Return a function that counts one more request on the terminal, at most every 0.1 seconds."""
    done, shown_s = 0, 0.0

    def count_one() -> None:
        nonlocal done, shown_s
        done += 1
        if done == count or time.monotonic() - shown_s >= 0.1:
            shown_s = time.monotonic()
            sys.stderr.write(f"\r{done}/{count} requests" + ("\n" if done == count else ""))
            sys.stderr.flush()

    return count_one


def _save(options: argparse.Namespace, measures: ServeMeasures, target: BenchTarget) -> None:
    """Write the result with the names of vLLM's file, and print its path."""
    now, model = time.strftime("%Y%m%d-%H%M%S"), options.model or target.model
    rate: float | str = "inf" if math.isinf(options.request_rate) else options.request_rate
    result = {
        "date": now,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer or model,
        "num_prompts": options.num_prompts,
        **dict(options.metadata),
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        **result_fields(measures, detailed=options.save_detailed),
    }
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency is not None else ""
    name = f"{options.label or options.backend}-{rate}qps{concurrency}-{Path(model or 'model').name}-{now}.json"
    path = Path(options.result_dir) / (options.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if options.append_result else "w") as file:
        file.write(json.dumps(result) + "\n")
    print(f"result: {path}")
