"""A long prompt that two prefill instances read at once, against one of them: two clusters of `baton serve` on this
machine, asked in turns.

`baton-bench joint MODEL [--input-lens 1024 2048 4096] [--requests 9] [--threads 1] [--json]`

Each cluster has two prefill instances and a decode instance; the routers differ in `--joint-prefill-min-tokens` alone.
One fresh prompt at a time. `first token`: as the router tells it (`x-baton-explain`), the median; the limit is half of
what the other cluster takes, the peer is that cluster. An answer that two did not read ends the benchmark. Steps hold
the longest prompt's half.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from bench.peers import Server, running
from bench.report import Row, show

WARM_UP = 2
FLAGS = ("--port", "{port}", "--prefill", "2", "--decode", "1", "--disaggregation-min-tokens", "0")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    draw = random.Random(7)
    with running(_cluster("one reads", options, 0)) as alone, running(_cluster("two read", options, 1)) as joint:
        for length in options.input_lens:
            told: dict[str, list[dict[str, Any]]] = {alone: [], joint: []}
            for _ in range(WARM_UP + options.requests):
                for url in (alone, joint):
                    prompt = [draw.randrange(5, options.vocabulary) for _ in range(length)]
                    told[url].append(_ask(url, prompt, options.timeout_s))
            fronts = [answer.get("front_tokens", 0) for answer in told[joint]]
            if not all(fronts):
                raise SystemExit(f"baton-bench joint: one instance read a prompt of {length} tokens: {told[joint][-1]}")
            one_s, both_s = (
                statistics.median(answer["ttft_s"] for answer in told[url][WARM_UP:]) for url in (alone, joint)
            )
            case = f"{length} tokens, {max(fronts)} by the first: first token"
            yield Row("joint", case, 1e3 * both_s, "ms", 500 * one_s, one_s / 2 / both_s, "one reads", 1e3 * one_s)
            predicted_s = statistics.median(answer["predicted_ttft_s"] for answer in told[joint][WARM_UP:])
            yield Row("joint", f"{length} tokens: as predicted", 1e3 * predicted_s, "ms")


def _cluster(name: str, options: argparse.Namespace, min_tokens: int) -> Server:
    serve = [sys.executable, "-m", "services.cli", "serve", options.model, *FLAGS]
    step = str(-(-max(options.input_lens) // 2))
    serve += ["--threads", str(options.threads), "--device", "cpu", "--dtype", options.dtype]
    serve += ["--max-num-batched-tokens", step, "--kv-tail-parts", "8", "--kv-cache-memory-bytes", options.kv_cache]
    return Server(name, [*serve, "--joint-prefill-min-tokens", str(min_tokens)])


def _ask(url: str, prompt: Sequence[int], timeout_s: float) -> dict[str, Any]:
    """What the router explains of the answer."""
    body = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-baton-explain": "1"}, timeout=timeout_s)
    answer.raise_for_status()
    return dict(answer.json()["baton"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench joint", description=__doc__)
    made.add_argument("model", help="a model's folder")
    made.add_argument("--input-lens", type=int, nargs="+", default=[1024, 2048, 4096], metavar="TOKENS")
    made.add_argument("--requests", type=int, default=9, help="of each length to each cluster")
    made.add_argument("--threads", type=int, default=1, help="of each instance")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--vocabulary", type=int, default=256, help="token ids of prompts are drawn below this")
    made.add_argument("--kv-cache", default="1G", help="of each instance")
    made.add_argument("--timeout-s", type=float, default=300.0)
    made.add_argument("--json", action="store_true")
    return made


def run(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    show(rows(options), as_json=options.json)
