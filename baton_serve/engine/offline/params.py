"""Parameters of a request of the offline API. Names, defaults and ranges are vLLM's."""

from dataclasses import dataclass, field, fields

from baton_serve.contracts import sampling
from baton_serve.contracts.beam_search import EarlyStopping
from baton_serve.engine.errors import ConfigError

UNSERVED = {
    "logits_processors": (None,),
    "detokenize": (True,),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
}
"""Parameters that this engine does not support, with the values that leave them unused."""

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
}
"""Parameters that beam search does not support, with the values that leave them unused.

Beams follow the model's own probabilities, so nothing may change these.
"""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are sampled and when its answer ends.

    `temperature` 0 is greedy; `top_k` -1 or 0 considers all tokens. Without `seed` the seed is derived from the seed of
    the `LLM` and the number of the request. `best_of` sequences are generated (or beams searched), and the best `n` of
    them are returned. `max_tokens` None generates up to the end of the context.
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
    logits_processors: object = None
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    guided_decoding: object = None
    structured_outputs: object = None

    def __post_init__(self) -> None:
        """Check combinations that do not depend on the model. The engine checks ranges when the request is added.

        Raises `ConfigError`.
        """
        for name, neutral in UNSERVED.items():
            if getattr(self, name) not in neutral:
                raise ConfigError(f"SamplingParams: {name} is not supported by this engine")
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

    def _check_beams(self) -> None:
        """Check parameters that need or exclude beam search. Raises `ConfigError`."""
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
    def stops(self) -> list[str]:
        """The stop strings as a list, empty if there are none."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def resolved(self, *, seed: int, room: int) -> sampling.SamplingSpec:
        """Return the parameters in the engine's own form.

        `seed` is used if the request has none. `room` is the number of tokens that the context leaves for the answer.
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
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
            # Choosing the best `n` of `best_of` sequences takes the logprob of every chosen token, even if the caller
            # wants none.
            logprobs=0 if self.logprobs is None and self.width > self.n else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


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
        """Check the values. Raises `ConfigError`."""
        if self.beam_width < 1:
            raise ConfigError(f"BeamSearchParams: beam_width is {self.beam_width}; it must be at least 1")
        if self.temperature != 0.0:
            raise ConfigError("BeamSearchParams: temperature is not 0; beams follow the model's own probabilities")

    def sampling(self) -> SamplingParams:
        """Return the same search as `SamplingParams`."""
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
    """Parameters of embeddings and scores. None uses the model's default."""

    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: int | None = None


GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a model's generation_config.json that change the default `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The default sampling parameters in the model's generation_config.json."""

    values: dict[str, float] = field(default_factory=dict)

    def params(self) -> SamplingParams:
        """Return `SamplingParams` with vLLM's defaults, replaced by the model's own values where it states them."""
        known = {entry.name: entry.type for entry in fields(SamplingParams)}
        params = SamplingParams()
        for name, value in self.values.items():
            if name in known:
                # JSON files may state top_k as 50.0. Fields that vLLM does not know are ignored.
                setattr(params, name, int(value) if name == "top_k" else float(value))
        return params
