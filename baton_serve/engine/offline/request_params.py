"""Decides defaults and ranges of `SamplingParams`, `BeamSearchParams` and `PoolingParams` of the offline API; `llm.py`
pairs them with prompts. Names, defaults and ranges are vLLM's.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from baton_serve.contracts import sampling
from baton_serve.contracts.beam_search import EarlyStopping
from baton_serve.engine.core.sequence import LogitsProcessor
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.offline.structured import StructuredOutputsParams
from baton_serve.generation_config import SamplingDefaults

BEAM_SEARCH_ONLY = {"length_penalty": (1.0, 1), "early_stopping": (False,)}
"""Parameters that only beam search uses, with the values that leave them unused."""

WITHOUT_BEAMS: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 0),
    "top_p": (1.0, 1),
    "top_k": (-1, 0),
    "min_p": (0.0, 0),
    "presence_penalty": (0.0, 0),
    "frequency_penalty": (0.0, 0),
    "repetition_penalty": (1.0, 1),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "min_tokens": (0,),
    "stop": (None, [], ""),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "detokenize": (True,),
}
"""Parameters that beam search does not support, with the values that leave them unused.

Beams follow the model's own probabilities, so nothing may change these.
"""


class RequestOutputKind(Enum):
    """Which content each output of a running request has: CUMULATIVE: the whole answer so far; DELTA: what is new since
    the last output; FINAL_ONLY: the whole answer, in a single output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are sampled and when its answer ends, with vLLM's names and defaults.

    `temperature` 0 is greedy; `top_k` -1 or 0 considers all tokens. Without `seed` the seed is derived from the seed of
    the `LLM` and the number of the request. `best_of` sequences are generated (or beams searched), and the best `n` of
    them are returned. `max_tokens` None generates up to the end of the context. With `detokenize` False the texts are
    empty. `logits_processors` are functions (generated token ids, scores), or (prompt token ids, generated token ids,
    scores), which return the scores of the next token, float32 [vocab_size] on the engine's device. `output_kind` is
    for `LLMEngine` and `AsyncLLMEngine`; `LLM` returns whole answers. `output_text_buffer_length` has no effect.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Callable[..., Any]] | None = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    guided_decoding: StructuredOutputsParams | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_text_buffer_length: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """Check which parameters may be set together. Ranges of values are checked when the request is added to the
        engine.

        Raises `ConfigError` for a combination that is not possible.
        """
        if self.guided_decoding is not None and self.structured_outputs is not None:
            raise ConfigError("SamplingParams: set structured_outputs or guided_decoding, its older name, not both")
        if not isinstance(self.form, StructuredOutputsParams | None):
            raise ConfigError(f"SamplingParams: give StructuredOutputsParams, not {type(self.form).__name__}")
        if not self.detokenize and self.stops:
            raise ConfigError("SamplingParams: stop needs the text of the answer, which detokenize=False leaves out")
        if self.n < 1:
            raise ConfigError(f"SamplingParams: n is {self.n}; it must be at least 1")
        # `best_of` None means `n`, so only an explicit value can be too small.
        if self.width < self.n:
            raise ConfigError(f"SamplingParams: best_of is {self.best_of}; it must be at least n ({self.n})")
        self._check_beams()
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ConfigError("SamplingParams: truncate_prompt_tokens must be at least 1")
        # An empty string would be found immediately, and every answer would be empty.
        if any(not text for text in self.stops):
            raise ConfigError("SamplingParams: stop has an empty string")
        if any(not word.strip() for word in self.bad_words or ()):
            raise ConfigError("SamplingParams: bad_words has an empty word")

    def _check_beams(self) -> None:
        """Check that parameters of beam search are set only for beam search, and no parameters that exclude it. Raises
        `ConfigError`."""
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f"SamplingParams: early_stopping is {self.early_stopping!r}; give True, False or 'never'")
        for name, neutral in (WITHOUT_BEAMS if self.use_beam_search else BEAM_SEARCH_ONLY).items():
            value = getattr(self, name)
            if value not in neutral:
                how = "cannot be combined with" if self.use_beam_search else "needs"
                raise ConfigError(f"SamplingParams: {name}={value!r} {how} use_beam_search")

    @property
    def width(self) -> int:
        """Number of sequences that are generated, or of beams that are searched; the best `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def form(self) -> StructuredOutputsParams | None:
        """The structured output that the answer must follow (`structured_outputs` or `guided_decoding`), or None for
        free text."""
        return self.structured_outputs or self.guided_decoding

    def clone(self) -> "SamplingParams":
        """Return a deep copy of these parameters. The logits processors are not copied but shared: they may be large or
        hold state."""
        processors = self.logits_processors
        return deepcopy(self, {id(processors): processors})

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], model_eos_token_id: int | None = None
    ) -> None:
        """Add the end-of-sequence tokens that a model's generation_config.json states to `stop_token_ids`, as in vLLM.

        With `ignore_eos` they are not added. `model_eos_token_id` is left out, because it ends an answer in any case.
        """
        stated = generation_config.get("eos_token_id")
        ends = {stated} if isinstance(stated, int) else set(stated or ())
        ends.discard(model_eos_token_id)
        if ends and not self.ignore_eos:
            self.stop_token_ids = sorted(ends | set(self.stop_token_ids or ()))

    def processors(self) -> tuple[LogitsProcessor, ...]:
        """Return the logits processors, each as a function of (prompt token ids, generated token ids, scores) that
        returns scores."""
        return tuple(_with_prompt(process) for process in self.logits_processors or ())

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list, empty if there are none."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def resolved(
        self, *, seed: int, room: int, grammar: str | None = None, bad_words: Sequence[list[int]] = ()
    ) -> sampling.SamplingSpec:
        """Return these parameters in the form that the engine takes.

        `seed` is used if the request has none. `room` is the number of tokens that the context leaves for the answer.
        `grammar` is the written grammar of `form`, and `bad_words` are the words as token sequences.
        """
        return sampling.SamplingSpec(
            seed=seed if self.seed is None else self.seed,
            # The engine rejects requests that do not fit the context. vLLM shortens the answer instead.
            max_tokens=room if self.max_tokens is None else min(self.max_tokens, room),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            # Both 0 and -1 stand for all tokens in vLLM's interface; the engine knows -1 only.
            top_k=self.top_k or -1,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=self.allowed_token_ids,
            bad_words=list(bad_words),
            grammar=grammar,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
            # Choosing the best `n` of `best_of` sequences takes the logprob of every chosen token, even if the caller
            # wants none.
            logprobs=0 if self.logprobs is None and self.width > self.n else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def _with_prompt(process: Callable[..., Any]) -> LogitsProcessor:
    """Return a logits processor as a function of three arguments: prompt token ids, generated token ids and scores. A
    processor with two parameters does not get the prompt."""
    try:
        takes_prompt = len(inspect.signature(process).parameters) == 3
    except (TypeError, ValueError):  # a built-in function without a signature
        takes_prompt = False
    return process if takes_prompt else lambda _, generated, scores: process(generated, scores)


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. The search ends when no running beam can become one of the best `beam_width`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises `ConfigError` if one is not supported."""
        if self.beam_width < 1:
            raise ConfigError(f"BeamSearchParams: beam_width is {self.beam_width}; it must be at least 1")
        if self.temperature != 0.0:
            raise ConfigError("BeamSearchParams: temperature is not 0; beams follow the model's own probabilities")

    def sampling(self) -> SamplingParams:
        """Return the `SamplingParams` of a request that does this beam search."""
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            temperature=0.0,
            early_stopping="never",
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            # Each step of the search looks at the 2 * width most likely continuations, as in vLLM and transformers.
            logprobs=2 * self.beam_width,
        )


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """Parameters of embeddings and scores, as in vLLM. None takes the model's default."""

    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: int | None = None


def default_params(defaults: SamplingDefaults) -> SamplingParams:
    """Return `SamplingParams` with vLLM's defaults, replaced by `defaults` where the model's generation_config.json
    states values."""
    stated = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}
    if "max_new_tokens" in stated:
        stated["max_tokens"] = stated.pop("max_new_tokens")
    return SamplingParams(**stated)
