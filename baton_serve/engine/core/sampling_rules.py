"""The rules of sampling that need no tensor: the random number of a token, and what a request may ask for.

A token's random number is a function of (seed, sequence index, position) alone, so a stream goes on the same on any
instance, in any batch, and after a replay.
"""

from itertools import chain

from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingParams
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.errors import RequestError

GREEDY_BELOW = 1e-5
LARGEST = 1e6
"""Factors beyond it may become infinite in a tensor, and what is excluded NaN."""
_MASK = (1 << 64) - 1


def uniform(seed: int, sequence: int, position: int) -> float:
    """In [0, 1), on a grid of 2^-32. SplitMix64's finaliser (Steele, Lea, Flood 2014) over the chained inputs."""
    state = _mix(seed & _MASK)
    state = _mix(state ^ (sequence & _MASK))
    return (_mix(state ^ (position & _MASK)) >> 32) / 4294967296.0


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """The token is the largest logit of those allowed, and nobody wants to know more."""
    return (
        sampling.temperature < GREEDY_BELOW
        and not has_penalties(sampling)
        and not sampling.logit_bias
        and sampling.logprobs is None
    )


def has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def check_work(work: Work, limits: SchedulerConfig, vocab_size: int, *, max_logprobs: int) -> None:
    """Raises `RequestError` for what can never be computed."""
    sampling, num_tokens = work.sampling, len(work.token_ids)
    if num_tokens == 0 or not 0 < work.num_prompt_tokens <= num_tokens:
        raise RequestError("invalid", "the prompt is empty")
    if num_tokens >= limits.max_model_len:
        raise RequestError(
            "too_long",
            f"the prompt has {num_tokens} tokens; the model takes {limits.max_model_len} in all, so at most"
            f" {limits.max_model_len - 1} and one of the answer",
        )
    if max(work.token_ids) >= vocab_size or min(work.token_ids) < 0:
        raise RequestError("invalid", f"token ids must lie in 0..{vocab_size - 1}")
    if not work.sequences or len(set(work.sequences)) != len(work.sequences) or min(work.sequences) < 0:
        raise RequestError("invalid", f"sequences {work.sequences} must be distinct and not negative")
    if len(work.sequences) > 1 and num_tokens > work.num_prompt_tokens:
        raise RequestError("invalid", "only one sequence can go on from generated tokens")
    if num_tokens - work.num_prompt_tokens >= sampling.max_tokens:
        raise RequestError("invalid", f"max_tokens ({sampling.max_tokens}) leaves nothing to generate")
    _check_sampling(sampling, vocab_size=vocab_size, max_logprobs=max_logprobs)


def _check_sampling(sampling: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    ranges = [
        ("temperature", sampling.temperature, 0.0, LARGEST),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-6, LARGEST),
        ("logprobs", sampling.logprobs or 0, 0, max_logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, 0, max_logprobs),
        ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise RequestError("invalid", f"{name} is {value}; it must lie in {low}..{high}")
    if sampling.top_p == 0.0:
        raise RequestError("invalid", "top_p is 0; it must lie in (0, 1]")
    if sampling.top_k < -1:
        raise RequestError("invalid", f"top_k is {sampling.top_k}; it must be -1 (all), 0 (all) or positive")
    named = [*sampling.logit_bias, *(sampling.allowed_token_ids or []), *chain.from_iterable(sampling.bad_words)]
    if any(not 0 <= token < vocab_size for token in named):
        raise RequestError("invalid", f"logit_bias, allowed_token_ids and bad_words must lie in 0..{vocab_size - 1}")
    if [] in sampling.bad_words:
        raise RequestError("invalid", "bad_words: an empty word would exclude every token")
    if sampling.allowed_token_ids == []:
        raise RequestError("invalid", "allowed_token_ids is empty: no token could be chosen")


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
