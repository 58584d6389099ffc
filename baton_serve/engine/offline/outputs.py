"""What comes out. Names are vLLM's."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from baton_serve.engine.offline.lora import LoRARequest

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int
    decoded_token: str


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """`token_ids` include the token that ended it; `text` does not. `stop_reason` is a stop string or token."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = True
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """`tokens` and `text` begin with the prompt. `cum_logprob` is of the tokens after it, an end of sequence too."""

    tokens: list[int]
    text: str
    logprobs: Logprobs
    cum_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """`data` float32: a vector, or one row for each token."""

    data: Tensor

    @property
    def embedding(self) -> list[float]:
        """The vector as numbers, as older versions of vLLM named it."""
        found: list[float] = self.data.tolist()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequestOutput(Generic[D]):
    request_id: str
    outputs: D
    prompt_token_ids: list[int]
    finished: bool = True


EmbeddingRequestOutput = VectorRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = VectorRequestOutput[ClassificationOutput]
ScoringRequestOutput = VectorRequestOutput[ScoringOutput]
PoolingRequestOutput = VectorRequestOutput[PoolingOutput]
