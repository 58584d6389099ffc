"""The command line of `baton-bench serve`: the flags of `vllm bench serve`, checked."""

import argparse
import ast
import json
import math
import os
from pathlib import Path
from typing import Any

from baton_serve.bench.command_line import with_dashes
from baton_serve.bench.serving.datasets import ImageSize
from baton_serve.bench.serving.load_client import ENDPOINTS

DATASETS = ("random", "random-mm", "sharegpt", "custom", "trace")
GENERATED = ("random", "random-mm")
"""Data sets without a file."""
ABSENT_DATASETS = ("sonnet", "hf", "burstgpt", "prefix_repetition", "spec_bench", "timed_trace")
"""Data sets of vLLM that need files of its repository or the hub."""
METRICS = ("ttft", "tpot", "itl", "e2el")
SAMPLING = ("top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench serve",
        description="Send load to an OpenAI-compatible server and print the report of `vllm bench serve`.",
    )
    _add_server(made.add_argument_group("server"))
    _add_dataset(made.add_argument_group("data set"))
    _add_traffic(made.add_argument_group("traffic"))
    _add_sampling(made.add_argument_group("requests"))
    _add_result(made.add_argument_group("result"))
    return made


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", "--endpoint-type", choices=ENDPOINTS, default="openai", help="API of the server")
    group.add_argument("--base-url", help="URL of the server, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="host of the server")
    group.add_argument("--port", type=int, default=8000, help="port of the server")
    group.add_argument("--endpoint", help="path of the API (default: that of the backend)")
    group.add_argument("--header", nargs="*", type=_pair, default=[], metavar="KEY=VALUE", help="headers of requests")
    group.add_argument("--api-key", help="API key for the server (default: the variable OPENAI_API_KEY)")
    group.add_argument("--insecure", action="store_true", help="accept a certificate that cannot be verified")
    group.add_argument("--model", help="model name in requests (default: the first one of /v1/models)")
    group.add_argument("--served-model-name", help="model name in requests, if --model is a folder")
    group.add_argument("--tokenizer", help="folder or cached hub name with tokenizer.json (default: --model)")
    group.add_argument("--tokenizer-mode", choices=("auto", "hf"), default="auto", help="both read tokenizer.json")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="estimate lengths without a tokenizer")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="needs nothing here: the code of a tokenizer is never run"
    )
    group.add_argument(
        "--ready-check-timeout-sec", type=int, default=0, help="wait this long for the server; 0: do not wait"
    )
    group.add_argument("--profile", action="store_true", help="let the server record the run: /start_profile")


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dataset-name", default="random", help=f"one of {', '.join(DATASETS)}")
    group.add_argument(
        "--dataset-path",
        type=Path,
        help="ShareGPT's JSON, JSON lines with `prompt`, or a trace: Azure's .csv or Mooncake's .jsonl",
    )
    group.add_argument("--num-prompts", type=int, default=1000, help="number of requests")
    group.add_argument("--input-len", type=int, help="the same as --random-input-len")
    group.add_argument("--output-len", type=int, help="output tokens of requests of any data set")
    group.add_argument("--random-input-len", type=int, default=1024, help="prompt tokens of random requests")
    group.add_argument("--random-output-len", type=int, default=128, help="output tokens of random requests")
    group.add_argument("--random-prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="variation of the lengths: 0.1 means ±10 %%"
    )
    group.add_argument(
        "--random-mm-base-items-per-request", type=int, default=1, help="images of each request of random-mm"
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        help="variation of that number: 0.1 means ±10 %%",
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=_image_sizes,
        default="{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}",
        help="sizes of images and their shares, {(height, width, 1): share}",
    )
    group.add_argument("--sharegpt-output-len", type=int, help="output tokens (default: as long as the answer)")
    group.add_argument("--custom-output-len", type=int, default=256, help="output tokens; -1: those of the file")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of a custom data set")
    group.add_argument(
        "--custom-skip-chat-template",
        "--skip-chat-template",
        action="store_true",
        help="needs nothing here: prompts are sent as they are; use --backend openai-chat for the server's template",
    )
    group.add_argument("--length-scale", type=float, default=1.0, help="factor for the lengths of a trace")
    group.add_argument("--time-scale", type=float, default=1.0, help="factor for the times of a trace")


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--request-rate", type=float, default=math.inf, help="requests per second (inf: all at once)")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gaps' gamma distribution; 1: Poisson arrivals"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="change the rate over the run")
    group.add_argument("--ramp-up-start-rps", type=float, help="rate at the start of a ramp")
    group.add_argument("--ramp-up-end-rps", type=float, help="rate at the end of a ramp")
    group.add_argument("--max-concurrency", type=int, help="most concurrent requests (default: no limit)")
    group.add_argument("--num-warmups", type=int, default=1, help="requests that are sent first and not counted")
    group.add_argument("--seed", type=int, default=0, help="seed of prompts and arrival times")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress in the terminal")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate all output tokens, as is always done for random prompts"
    )
    for name in SAMPLING:
        flag, kind = f"--{name.replace('_', '-')}", int if name == "top_k" else float
        group.add_argument(flag, type=kind, default=0.0 if name == "temperature" else None, help="in each request")
    group.add_argument("--logprobs", type=int, help="log probabilities for each token")
    group.add_argument("--extra-body", type=_json_object, default={}, help="JSON object to add to each body")
    group.add_argument("--lora-modules", nargs="+", default=[], help="adapters that the requests name in turn")
    group.add_argument("--request-id-prefix", help="prefix of the header x-request-id")


def _add_result(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics", type=_metrics, help=f"comma-separated metrics to report, of {','.join(METRICS)}"
    )
    group.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), help="comma-separated percentiles")
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_objective,
        default=[],
        metavar="METRIC:MS",
        help="SLOs: ttft:500 tpot:50 e2el:9000",
    )
    group.add_argument("--save-result", action="store_true", help="write the result to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="... with the values of each request")
    group.add_argument("--append-result", action="store_true", help="add the result to an existing file as a new line")
    group.add_argument("--result-dir", type=Path, default=Path(), help="folder of the file")
    group.add_argument("--result-filename", help="name of the file (default: backend, rate, model and time)")
    group.add_argument("--label", help="first part of the file's name (default: --backend)")
    group.add_argument("--metadata", nargs="*", type=_pair, default=[], metavar="KEY=VALUE", help="fields of the file")
    group.add_argument("--json", action="store_true", help="print one JSON object per value instead of the report")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the checked options. Exits with status 2 and a message for wrong ones."""
    made = parser()
    options = made.parse_args(with_dashes(arguments))
    if wrong := _wrong(options):
        made.error(wrong)
    options.base_url = (options.base_url or f"http://{_bracketed(options.host)}:{options.port}").rstrip("/")
    options.api_key = options.api_key or os.environ.get("OPENAI_API_KEY")
    options.random_input_len = options.input_len or options.random_input_len
    if options.output_len is not None:
        options.random_output_len = options.custom_output_len = options.sharegpt_output_len = options.output_len
    # As in vLLM: answers to random prompts could end anywhere.
    options.ignore_eos = options.ignore_eos or options.dataset_name in GENERATED
    if options.percentile_metrics is None:
        options.percentile_metrics = ("e2el",) if options.backend == "openai-embeddings" else ("ttft", "tpot", "itl")
    return options


def _wrong(options: argparse.Namespace) -> str | None:
    """Return why the options contradict each other, or None."""
    return _wrong_dataset(options) or _wrong_traffic(options) or _wrong_endpoint(options)


def _wrong_dataset(options: argparse.Namespace) -> str | None:
    name, path = options.dataset_name, options.dataset_path
    if name in ABSENT_DATASETS:
        return f"--dataset-name {name} is not available; convert it to JSON lines with `prompt` and use custom"
    if name not in DATASETS:
        return f"--dataset-name {name} is unknown; choose from {', '.join(DATASETS)}"
    if name in GENERATED and path is not None:
        return f"--dataset-name {name} has no file: leave out --dataset-path, or name the data set"
    if name == "random-mm" and options.backend != "openai-chat":
        return "--dataset-name random-mm sends images in chats: add --backend openai-chat"
    if name not in GENERATED and path is None:
        return f"--dataset-name {name} needs --dataset-path"
    return None if options.num_prompts > 0 else "--num-prompts must be at least 1"


def _wrong_traffic(options: argparse.Namespace) -> str | None:
    if options.request_rate <= 0 or options.burstiness <= 0:
        return "--request-rate and --burstiness must be above 0"
    if options.max_concurrency is not None and options.max_concurrency < 1:
        return "--max-concurrency must be at least 1"
    if options.ramp_up_strategy is None:
        return None
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if start is None or end is None or not 0 <= start <= end or not end:
        return "--ramp-up-strategy needs --ramp-up-start-rps and an equal or larger --ramp-up-end-rps"
    if start == 0 and options.ramp_up_strategy == "exponential":
        return "--ramp-up-start-rps must be above 0 for an exponential ramp"
    return None if math.isinf(options.request_rate) else "--request-rate and --ramp-up-strategy exclude each other"


def _wrong_endpoint(options: argparse.Namespace) -> str | None:
    expected = ENDPOINTS[options.backend].removeprefix("/v1")
    if options.endpoint is not None and not options.endpoint.endswith(expected):
        return f"--endpoint {options.endpoint} does not fit --backend {options.backend}, which uses …{expected}"
    return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} has not the form KEY=VALUE")
    return key.strip(), value.strip()


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _image_sizes(text: str) -> tuple[ImageSize, ...]:
    try:
        found = ast.literal_eval(text)
        used = {size: share for size, share in found.items() if share}
        sizes = tuple(ImageSize(int(height), int(width), float(share)) for (height, width, _), share in used.items())
        are_images = all(frames == 1 for _, _, frames in used)
    except (ValueError, SyntaxError, TypeError, AttributeError) as exc:
        raise argparse.ArgumentTypeError(f"{text!r} has not the form {{(256, 256, 1): 0.5, …}}") from exc
    if not sizes or not are_images or not all(min(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must name images (1 frame) with sizes and shares above 0")
    return sizes


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"unknown metric {unknown[0]!r}; choose from {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 50,99") from exc
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(f"{text!r} has a number outside 0 to 100")
    return found


def _objective(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        found = name, float(value)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} has not the form METRIC:MILLISECONDS, as ttft:500") from exc
    if name not in ("ttft", "tpot", "e2el") or found[1] < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: choose ttft, tpot or e2el, and at least 0 ms")
    return found
