"""Requests to send: random prompts, or the requests of a public trace, with their arrival times."""

import random
from dataclasses import dataclass

from baton_serve.bench.serving.traces import Trace

WORDS = (
    "the a one block of tokens moves from prefill to decode while prompt router cache copy link memory step layer "
    "model answer question time place pool load prefix stream batch head page name host device key value"
).split()
"""Common words that most tokenizers encode as one token each."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request to send `at_s` seconds after the start. For a prompt of text, its length in tokens is approximate."""

    at_s: float
    prompt: str | list[int]
    max_tokens: int
    images: tuple[bytes, ...] = ()
    """JPEG files that a chat shows behind the text."""


def random_prompt(rng: random.Random, tokens: int) -> str:
    """Return random words of about `tokens` tokens. The first word is unique, so no prefix cache has the prompt."""
    return " ".join([f"{rng.getrandbits(40):x}", *(rng.choice(WORDS) for _ in range(max(tokens - 8, 1)))])


def random_requests(
    *, count: int, input_tokens: int, output_tokens: int, rate_per_s: float, range_ratio: float, seed: int
) -> list[BenchRequest]:
    """Return requests with Poisson arrivals at `rate_per_s` (inf: all at once). Lengths vary uniformly by ±
    `range_ratio`."""
    rng = random.Random(seed)
    clock = 0.0
    requests = []
    for _ in range(count):
        vary = 1 + rng.uniform(-range_ratio, range_ratio)
        prompt = random_prompt(rng, round(input_tokens * vary))
        requests.append(BenchRequest(at_s=clock, prompt=prompt, max_tokens=max(1, round(output_tokens * vary))))
        clock += rng.expovariate(rate_per_s) if rate_per_s != float("inf") else 0.0
    return requests


def trace_requests(trace: Trace, *, seed: int, token_ids: tuple[int, int] | None = None) -> list[BenchRequest]:
    """Return the requests of a trace with generated prompts that share prefixes exactly as the trace's hashes do.
    Prompts are text, or token IDs of the range `token_ids`. Without hashes, prompts share nothing."""
    prompts = TracePrompts(trace, seed=seed, token_ids=token_ids)
    return [
        BenchRequest(at_s=request.at_s, prompt=prompts.prompt(number), max_tokens=request.output_tokens)
        for number, request in enumerate(trace.requests)
    ]


_DIGITS = 6
"""Number of leading symbols that encode a hash's number."""


class TracePrompts:
    """Generates the prompts of a trace. The tokens of each hash are generated once and kept."""

    def __init__(self, trace: Trace, *, seed: int, token_ids: tuple[int, int] | None) -> None:
        self._trace = trace
        self._seed = seed
        self._token_ids = token_ids
        self._num_symbols = len(WORDS) if token_ids is None else token_ids[1] - token_ids[0]
        self._known: dict[str, list[int]] = {}

    def prompt(self, number: int) -> str | list[int]:
        """Return the prompt of the request with this index."""
        request, hash_tokens = self._trace.requests[number], self._trace.hash_tokens
        symbols: list[int] = []
        if hash_tokens is not None and request.hashes:
            for name in request.hashes:
                symbols += self._symbols(f"hash {name}", name, hash_tokens)
            del symbols[request.prompt_tokens :]
        else:
            symbols = self._symbols(f"request {number}", number, request.prompt_tokens)
        if self._token_ids is not None:
            return [self._token_ids[0] + symbol for symbol in symbols]
        return " ".join(WORDS[symbol] for symbol in symbols)

    def _symbols(self, key: str, number: int, count: int) -> list[int]:
        """Return `count` symbols for a hash or request. They are random except for the first few, which are the digits
        of its number: two different ones never share a long prefix by chance."""
        known = self._known.get(key)
        if known is None:
            rng = random.Random(f"{self._seed} {key}")
            digits = [number // self._num_symbols**place % self._num_symbols for place in range(_DIGITS)]
            known = self._known[key] = [*digits, *rng.choices(range(self._num_symbols), k=count)][:count]
        return known
