"""A long prompt that two prefill instances read together, against one of them: two clusters of `baton serve` on this
machine, asked in turns.

`baton-bench joint MODEL [--input-lens 1024 2048 4096] [--parts 2] [--requests 9] [--threads 1] [--json]`
`baton-bench joint --shape llama-3.1-8b --device cuda --parts 4 --input-lens 8192` (made-up weights)

Each cluster has two prefill instances and a decode instance; the routers differ in `--joint-prefill-min-tokens` alone.
One fresh prompt at a time, the same for both. `first token`: as the router tells it (`x-baton-explain`), the median;
the limit is half of what the other cluster takes, the peer is that cluster. An answer that two did not read ends the
benchmark. Steps are as long as a part of the longest prompt, where that has `--parts`, which the two compute by turns:
shorter ones have fewer. `equal answers`: whose two greedy tokens are those of one reader, who may compute in other
chunks. On devices both clusters share the cards, instances in turns, so give `--kv-cache` what lets all fit.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.engine_shapes import SHAPES
from bench.made_up import write_servable_shape
from bench.peers import Server, running, wait_complete
from bench.report import Row, show

WARM_UP = 2
FLAGS = ("--port", "{port}", "--prefill", "2", "--decode", "1", "--disaggregation-min-tokens", "0")


@dataclass
class Told:
    """By one cluster, of prompts of one length."""

    routes: list[dict[str, Any]] = field(default_factory=list)
    """What the router explains."""
    tokens: list[list[str]] = field(default_factory=list)

    def median(self, key: str) -> float:
        return statistics.median(float(route[key]) for route in self.routes[WARM_UP:])

    def times(self) -> str:
        """To the first token, in ms; the first ones are of the warm-up."""
        return " ".join(f"{1e3 * route['ttft_s']:.4g}" for route in self.routes)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = str(write_servable_shape(options.shape, Path(folder)))
            options.baton_args = ["--load-format", "dummy", *options.baton_args]
        yield from _measured(options)


def _measured(options: argparse.Namespace) -> Iterator[Row]:
    draw = random.Random(7)
    with running(_cluster("one reads", options, 0)) as alone, running(_cluster("two read", options, 1)) as joint:
        for url in (alone, joint):
            wait_complete(url, 3)
        for length in options.input_lens:
            one, two = Told(), Told()
            for _ in range(WARM_UP + options.requests):
                prompt = [draw.randrange(5, options.vocabulary) for _ in range(length)]
                for url, told in ((alone, one), (joint, two)):
                    _ask(url, prompt, options.timeout_s, told)
            if not all(route.get("front_tokens", 0) for route in two.routes):
                raise SystemExit(f"baton-bench joint: one instance read a prompt of {length} tokens: {two.routes[-1]}")
            sys.stderr.write(f"{length} tokens: one reads {one.times()}, two {two.times()} ms\n")
            yield from _compared(length, one, two)


def _compared(length: int, one: Told, two: Told) -> Iterator[Row]:
    one_s, both_s = one.median("ttft_s"), two.median("ttft_s")
    parts, theirs = max(route.get("parts", 2) for route in two.routes), two.routes[-1]["front_tokens"]
    case = f"{length} tokens in {parts} parts, {theirs} by the other: first token"
    yield Row("joint", case, 1e3 * both_s, "ms", 500 * one_s, one_s / 2 / both_s, "one reads", 1e3 * one_s)
    yield Row("joint", f"{length} tokens: as predicted", 1e3 * two.median("predicted_ttft_s"), "ms")
    equal = sum(mine == its for mine, its in zip(one.tokens, two.tokens, strict=True))
    yield Row("joint", f"{length} tokens: equal answers", equal, f"of {len(one.tokens)}")


def _cluster(name: str, options: argparse.Namespace, min_tokens: int) -> Server:
    serve = [sys.executable, "-m", "services.cli", "serve", options.model, *FLAGS]
    step = str(-(-max(options.input_lens) // options.parts))
    serve += ["--threads", str(options.threads), "--device", options.device, "--dtype", options.dtype]
    serve += ["--max-num-batched-tokens", step, "--kv-tail-parts", "8", "--kv-cache-memory-bytes", options.kv_cache]
    return Server(name, [*serve, "--joint-prefill-min-tokens", str(min_tokens), *options.baton_args])


def _ask(url: str, prompt: Sequence[int], timeout_s: float, told: Told) -> None:
    body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-baton-explain": "1"}, timeout=timeout_s)
    answer.raise_for_status()
    told.routes.append(answer.json()["baton"])
    told.tokens.append(answer.json()["choices"][0]["logprobs"]["tokens"])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="baton-bench joint", description=__doc__)
    made.add_argument("model", nargs="?", help="a model's folder; default: made-up weights of --shape")
    made.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    made.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu")
    made.add_argument("--baton-args", type=str.split, default=[], help="more flags of `baton serve`, as one text")
    made.add_argument("--input-lens", type=int, nargs="+", default=[1024, 2048, 4096], metavar="TOKENS")
    made.add_argument("--parts", type=int, default=2, help="of the longest prompt")
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
