"""Defines the output classes of the offline API (`RequestOutput`, …) and its metrics, with vLLM's names. Names are
vLLM's.
"""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from baton_serve.engine.core.outputs import EngineStats
from baton_serve.engine.offline.requested_adapters import LoRARequest

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, its rank among all tokens (1 is the most likely) and its text. The text is None
    without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]
"""One dict for each position, by token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence of a request. `token_ids` include the token that ended it; `text` does not.

    `finish_reason` is None while the sequence is running. `stop_reason` is the stop string or stop token that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt, which may still be incomplete.

    `outputs` has one entry for each of the `n` sequences; `finished` says that all of them have ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
    lora_request: LoRARequest | None = None


def new_part(output: RequestOutput, before: RequestOutput | None) -> RequestOutput:
    """Return the text, tokens and logprobs that `output` has in addition to `before`, the earlier output of the same
    request (None: everything is new)."""
    if before is None:
        return output
    earlier = {one.index: one for one in before.outputs}
    return replace(output, outputs=[_new_tokens(one, earlier.get(one.index)) for one in output.outputs])


def _new_tokens(now: CompletionOutput, before: CompletionOutput | None) -> CompletionOutput:
    if before is None:
        return now
    count = len(before.token_ids)
    return replace(
        now,
        text=now.text[len(before.text) :],
        token_ids=now.token_ids[count:],
        logprobs=None if now.logprobs is None else now.logprobs[count:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One beam of a beam search.

    `tokens` and `text` begin with the prompt; `cum_logprob` is the sum of the logprobs of the tokens after it, with the
    end token.
    """

    tokens: list[int]
    text: str
    logprobs: Logprobs
    cum_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams that were found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding that the model has computed for one input."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probabilities of the classes for one input, in the order of the model's labels."""

    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts: how well they match."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of a pooling model for one input: `data` is float32, one vector, or a matrix with one row for each
    token."""

    data: Tensor

    @property
    def embedding(self) -> list[float]:
        """The result `data` as a list of floats, for code that was written for older versions of vLLM."""
        found: list[float] = self.data.tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequestOutput(Generic[D]):
    """The output of a pooling model for one input: its request id, its result (`outputs`) and its tokens."""

    request_id: str
    outputs: D
    prompt_token_ids: list[int]
    finished: bool = True


EmbeddingRequestOutput = VectorRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = VectorRequestOutput[ClassificationOutput]
ScoringRequestOutput = VectorRequestOutput[ScoringOutput]
PoolingRequestOutput = VectorRequestOutput[PoolingOutput]


@dataclass(frozen=True, slots=True)
class Counter:
    """A metric with a number that only grows; its name is the one that vLLM gives it."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A metric with a number that is valid at this moment; its name is the one that vLLM gives it."""

    name: str
    value: float


Metric = Counter | Gauge


def engine_metrics(stats: EngineStats) -> list[Metric]:
    """Return the metrics of an engine under vLLM's names. Counters are sums since its start.

    The use of the KV cache is the share of blocks that sequences hold, from 0 to 1.
    """
    used = stats.total_blocks - stats.free_blocks
    gauges = {
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:kv_cache_usage_perc": used / max(1, stats.total_blocks),
    }
    counters = {
        "vllm:num_preemptions": stats.preemptions,
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generated_tokens,
        "vllm:prefix_cache_queries": stats.prefix_query_tokens,
        "vllm:prefix_cache_hits": stats.prefix_hit_tokens,
    }
    return [
        *(Gauge(name, value) for name, value in gauges.items()),
        *(Counter(name, value) for name, value in counters.items()),
    ]
