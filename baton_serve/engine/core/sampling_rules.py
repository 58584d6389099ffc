"""Decides each token's random number (by `seed` and position), what counts as greedy, and whether a request is within
the engine's limits.

The random number is a function of seed, sequence index and position. So a stream continues identically on any instance,
in any batch, and after a replay (docs/adr/0004-sampling-by-position.md).
"""

from itertools import chain

from baton_serve.contracts.block_hash import prompt_root
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import SamplingSpec
from baton_serve.engine.core.encoder_sources import check_source
from baton_serve.engine.core.request_table import SchedulerConfig
from baton_serve.engine.errors import RequestError

GREEDY_BELOW = 1e-5
"""Temperatures below this value mean greedy sampling, as in vLLM."""
MAX_FACTOR = 1e6
"""Maximum temperature and repetition penalty. Larger factors may make logits infinite, and excluded ones NaN."""
_MASK = (1 << 64) - 1


def uniform(seed: int, sequence: int, position: int) -> float:
    """Return the random number for one token, uniform in [0, 1) and a multiple of 2^-32. It depends only on the
    request's `seed`, the index of the sequence, and the token's `position` in it.

    The integers are mixed with the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ (sequence & _MASK))
    return (_mix(state ^ (position & _MASK)) >> 32) / 4294967296.0


def is_plain_greedy(sampling: SamplingSpec) -> bool:
    """Return whether argmax over the allowed tokens is all that the sampler has to compute for this request.

    That is greedy sampling without penalties, `logit_bias` and logprobs.
    """
    return (
        sampling.temperature < GREEDY_BELOW
        and not has_penalties(sampling)
        and not sampling.logit_bias
        and sampling.logprobs is None
    )


def has_penalties(sampling: SamplingSpec) -> bool:
    """Return whether the request has penalties (repetition, presence or frequency): its logits then depend on the
    tokens that are already in the sequence."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def check_work(work: Work, limits: SchedulerConfig, vocab_size: int, *, max_logprobs: int) -> None:
    """Check a request against the limits of this engine and its model; `max_logprobs` is the largest number of logprobs
    per token. Raises `RequestError` if the request can never be computed."""
    sampling, num_tokens = work.sampling, len(work.token_ids)
    if num_tokens == 0 or not 0 < work.num_prompt_tokens <= num_tokens:
        raise RequestError("invalid", "the prompt is empty")
    if num_tokens >= limits.max_model_len:
        raise RequestError(
            "too_long",
            f"the prompt has {num_tokens} tokens; the maximum is {limits.max_model_len - 1}, because prompt and answer"
            f" together may have {limits.max_model_len} (--max-model-len)",
        )
    if max(work.token_ids) >= vocab_size or min(work.token_ids) < 0:
        raise RequestError("invalid", f"token ids must lie in 0..{vocab_size - 1}")
    if not work.sequences or len(set(work.sequences)) != len(work.sequences) or min(work.sequences) < 0:
        raise RequestError("invalid", f"sequences {work.sequences} must be distinct and not negative")
    if len(work.sequences) > 1 and num_tokens > work.num_prompt_tokens:
        # The generated tokens belong to one sequence; a replay of n > 1 sends each in a request of its own.
        raise RequestError("invalid", "only one sequence can continue from generated tokens")
    if num_tokens - work.num_prompt_tokens >= sampling.max_tokens:
        raise RequestError("invalid", f"max_tokens ({sampling.max_tokens}) leaves nothing to generate")
    check_source(work, limits.source_blocks)
    if limits.has_bidirectional_prompts:
        _check_bidirectional(work, limits)
    _check_sampling(sampling, vocab_size=vocab_size, max_logprobs=max_logprobs)


def _check_bidirectional(work: Work, limits: SchedulerConfig) -> None:
    """Check a prompt whose tokens attend to each other in both directions. Raises `RequestError`."""
    tokens = work.token_ids[: work.bidirectional_tokens]
    if work.root != prompt_root(work.tenant_root, tokens, work.media):
        # Blocks would be shared with prompts that begin alike, whose KV differs.
        raise RequestError("internal", "the root of the block hashes is not that of the prompt: update the router")
    if work.sampling.prompt_logprobs is not None:
        raise RequestError(
            "invalid",
            "prompt_logprobs is not possible with this model: each token of a prompt sees the tokens after it",
        )
    if work.bidirectional_tokens > limits.max_whole_tokens:
        raise RequestError(
            "invalid",
            f"the prompt has {work.bidirectional_tokens} tokens, which see each other in both directions, so that one"
            f" step must compute them; here the maximum is {limits.max_whole_tokens}: raise max_num_batched_tokens"
            " (--max-num-batched-tokens), which also has one token of each sequence",
        )


def _check_sampling(sampling: SamplingSpec, *, vocab_size: int, max_logprobs: int) -> None:
    ranges = [
        ("temperature", sampling.temperature, 0.0, MAX_FACTOR),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-6, MAX_FACTOR),
        ("logprobs", sampling.logprobs or 0, 0, max_logprobs),
        ("len(logprob_token_ids)", len(sampling.logprob_token_ids), 0, max_logprobs),
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
    token_ids = [*sampling.logit_bias, *(sampling.allowed_token_ids or []), *chain.from_iterable(sampling.bad_words)]
    if any(not 0 <= token < vocab_size for token in (*token_ids, *sampling.logprob_token_ids)):
        raise RequestError(
            "invalid",
            f"logit_bias, allowed_token_ids, bad_words and logprob_token_ids must lie in 0..{vocab_size - 1}",
        )
    if (transcript := sampling.transcript) is not None:
        ids = [transcript.first_timestamp, transcript.end_token, *transcript.suppressed, *transcript.first_suppressed]
        if any(not 0 <= token < vocab_size for token in ids):
            raise RequestError("invalid", f"the tokens of a transcript must lie in 0..{vocab_size - 1}")
    if [] in sampling.bad_words:
        raise RequestError("invalid", "bad_words contains an empty word, which would exclude every token; remove it")
    if sampling.allowed_token_ids == []:
        raise RequestError(
            "invalid", "allowed_token_ids is empty, so no token could be sampled; remove it or add tokens"
        )


def _mix(value: int) -> int:
    """Return a 64-bit integer mixed by the finalizer of SplitMix64, so that similar inputs give unrelated results."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
