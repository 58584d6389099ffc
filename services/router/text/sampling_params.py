"""Decides a request's sampling parameters: `max_tokens`, seed, `n`, logprobs, `logit_bias`, stop tokens, checked
against the model.

It also makes the checks that depend on the model: token ids against the vocabulary, and lengths against the context.
"""

import random
from collections.abc import Mapping, Sequence

import msgspec

from baton_serve.contracts.sampling import SamplingSpec, TranscriptSpec
from baton_serve.generation_config import GenerationDefaults
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from baton_serve.services.router.protocol.request_bounds import MAX_LOGPROBS, MAX_TOKEN_RULES

_random = random.Random()
"""Draws the seeds of requests without one."""

_SEED_MASK = 2**63 - 1
"""Seeds are reduced to 63 bits, which fit into a signed integer of 64 bits."""

_MAX_ID_DIGITS = 20
"""Largest number of digits of a token id in a key of `logit_bias`. `int` raises an error for thousands of digits."""

_BEAM_SEARCH_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (None, 0.0),
    "top_p": (None, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logprob_token_ids": (None,),
    "min_tokens": (None, 0),
    "stop": (None, []),
}
"""Parameters that beam search does not support, with the values that are accepted because they have no effect."""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of a completion, as in OpenAI's API and vLLM. With null, as many as fit are generated."""


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for requests to one model, which follow from the model, its instances and the router's settings.

    `max_model_len` is the longest sequence, in tokens, that every instance in the registry can serve.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_sequences: int
    beam_search_max_tokens: int
    generation: GenerationDefaults
    seeds: random.Random = _random
    """Draws the seeds of requests without one."""


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """Says how the tokens of an answer become text and logprobs (stop strings, special tokens), and what constrains
    them (grammar, bad words).
    """

    stop: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: int = 0
    logprobs: int | None = None
    tokens_as_ids: bool = False
    grammar: str | None = None
    bad_words: Sequence[list[int]] = ()
    transcript: TranscriptSpec | None = None


def wanted_logprobs(request: ChatCompletionRequest | CompletionRequest, limits: ModelLimits) -> int | None:
    """Return how many of the most likely tokens a request wants at each position, or None for no logprobs.

    With `logprob_token_ids` the client gets these tokens instead, and the number is 0. Raises `BadRequestError` if it
    asks for them without `logprobs`.
    """
    if isinstance(request, CompletionRequest):
        wanted = request.logprobs
    else:
        if request.top_logprobs and not request.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        wanted = (request.top_logprobs or 0) if request.logprobs else None
    if request.logprob_token_ids is None:
        return _all_or(wanted, limits)
    # As in vLLM the named tokens replace the most likely ones, so no number of alternatives is needed.
    if wanted is None:
        raise BadRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
    return 0


def text_rules(request: GenerationRequest, *, logprobs: int | None, tokens_as_ids: bool) -> TextRules:
    """Return how the tokens of a request's answer become text and logprobs. `logprobs` is the result of
    `wanted_logprobs`; `tokens_as_ids` is the server's default (`--return-tokens-as-token-ids`).
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    wanted = request.return_tokens_as_token_ids
    return TextRules(
        stop=stop,
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        logprobs=logprobs,
        tokens_as_ids=tokens_as_ids if wanted is None else wanted,
    )


class TokenRules(msgspec.Struct, frozen=True):
    """The lists of token ids in a request (such as `logit_bias` and `stop_token_ids`), after they were checked. All
    prompts of the request share them.
    """

    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    stop_token_ids: list[int]
    bad_words: list[list[int]]
    logprob_token_ids: list[int]


def token_rules(request: GenerationRequest, rules: TextRules, limits: ModelLimits, *, num_prompts: int) -> TokenRules:
    """Check the lists of token ids in a request and return them.

    Raises `BadRequestError` if an id is not in the vocabulary, or if a list is too long for so many prompts.
    """
    is_empty = not (request.logit_bias or request.stop_token_ids or rules.bad_words or request.logprob_token_ids)
    if is_empty and request.allowed_token_ids is None:
        return TokenRules(logit_bias={}, allowed_token_ids=None, stop_token_ids=[], bad_words=[], logprob_token_ids=[])
    sizes = {
        "logit_bias": len(request.logit_bias or ()),
        "allowed_token_ids": len(request.allowed_token_ids or ()),
        "stop_token_ids": len(request.stop_token_ids or ()),
        "logprob_token_ids": len(request.logprob_token_ids or ()),
        "bad_words": sum([len(word) for word in rules.bad_words]),
    }
    if num_prompts * sum(sizes.values()) > MAX_TOKEN_RULES:
        param = max(sizes, key=sizes.__getitem__)
        raise BadRequestError(
            f"{param}: the token lists have {sum(sizes.values())} entries for each of {num_prompts} prompts, the limit "
            f"is {MAX_TOKEN_RULES} for all prompts together: split the request",
            param=param,
            code="too_many_values",
        )
    _check_logprobs(sizes["logprob_token_ids"], "the length of logprob_token_ids", limits, "logprob_token_ids")
    return TokenRules(
        logit_bias=_logit_bias(request.logit_bias or {}, limits),
        allowed_token_ids=_token_ids(request.allowed_token_ids, "allowed_token_ids", limits),
        stop_token_ids=_token_ids(request.stop_token_ids, "stop_token_ids", limits) or [],
        bad_words=list(rules.bad_words),
        logprob_token_ids=_token_ids(request.logprob_token_ids, "logprob_token_ids", limits) or [],
    )


def sampling_params(
    request: GenerationRequest, num_prompt_tokens: int, rules: TextRules, tokens: TokenRules, limits: ModelLimits
) -> SamplingSpec:
    """Return the sampling parameters for one prompt of `num_prompt_tokens` tokens, on which `max_tokens` depends.

    Raises `BadRequestError` if prompt and answer do not fit into the model's context, or too many logprobs are
    requested.
    """
    logprobs = rules.logprobs
    max_tokens = _max_tokens(request, num_prompt_tokens, limits)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens is {min_tokens}, but at most {max_tokens} tokens are generated (max_tokens)",
            param="min_tokens",
        )
    defaults = limits.generation.defaults
    ends = sorted(limits.generation.end_token_ids - set(tokens.stop_token_ids))
    prompt_logprobs = _prompt_logprobs(request, logprobs, limits)
    is_chat = isinstance(request, ChatCompletionRequest)
    _check_logprobs(logprobs, "top_logprobs" if is_chat else "logprobs", limits)
    _check_logprobs(prompt_logprobs, "prompt_logprobs", limits)
    return SamplingSpec(
        seed=_seed(request.seed, limits.seeds),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        # 0 also means all tokens, in generation_config.json as in vLLM's API.
        top_k=int(_first(request.top_k, defaults.top_k, -1)) or -1,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tokens.logit_bias,
        allowed_token_ids=tokens.allowed_token_ids,
        bad_words=tokens.bad_words,
        grammar=rules.grammar,
        transcript=rules.transcript,
        stop_token_ids=tokens.stop_token_ids if request.ignore_eos else [*tokens.stop_token_ids, *ends],
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        logprob_token_ids=tokens.logprob_token_ids,
        prompt_logprobs=prompt_logprobs,
    )


class SequenceCounts(msgspec.Struct, frozen=True):
    """How many sequences belong to each prompt: `width` sequences or beams are computed, and the best `count` of them
    are returned.
    """

    count: int
    width: int


def sequence_counts(request: GenerationRequest, num_prompts: int, limits: ModelLimits) -> SequenceCounts:
    """Return how many sequences to compute for each prompt (`best_of`, or else `n`) and how many to return (`n`).

    Raises `BadRequestError` if `best_of` is less than `n`, or if all prompts together need more than `max_sequences`.
    """
    count = request.n or 1
    width = request.best_of or count
    if width < count:
        raise BadRequestError(f"best_of is {width}, less than n, {count}", param="best_of")
    if width * num_prompts > limits.max_sequences:
        param = "best_of" if request.best_of else "n"
        raise BadRequestError(
            f"{param}: the request asks for {width * num_prompts} sequences, the limit is {limits.max_sequences} "
            "(--max-sequences)",
            param=param,
        )
    return SequenceCounts(count, width)


def with_ranking_logprobs(sampling: SamplingSpec, size: SequenceCounts) -> SamplingSpec:
    """Return `sampling` with logprobs turned on if only the best of several sequences are returned (`best_of`): they
    are ranked by logprob.
    """
    if size.width == size.count or sampling.logprobs is not None:
        return sampling
    return msgspec.structs.replace(sampling, logprobs=0)


def check_beams(request: GenerationRequest, width: int, rules: TextRules, limits: ModelLimits) -> None:
    """Check the parameters of beam search. `width` is the number of beams.

    Raises `BadRequestError` for a parameter that changes the model's probabilities, which beam search does not support.
    Also raises it for a parameter of beam search in a request that does not use beam search.
    """
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
            if getattr(request, name) not in neutral:
                raise BadRequestError(f"{name} needs use_beam_search", param=name)
        return
    for name, neutral_values in _BEAM_SEARCH_NEUTRAL.items():
        if getattr(request, name, None) not in neutral_values:
            raise BadRequestError(f"{name} cannot be combined with use_beam_search", param=name)
    if rules.grammar is not None:
        raise BadRequestError(
            "use_beam_search cannot be combined with structured output (response_format, guided_*)",
            param="use_beam_search",
        )
    # Each beam needs twice `width` candidates, as in vLLM: up to `width` of them may end with the end of sequence.
    if 2 * width > limits.max_logprobs:
        raise BadRequestError(
            f"use_beam_search: {width} beams need {2 * width} logprobs per token, the limit is {limits.max_logprobs} "
            "(--max-logprobs)",
            param="best_of" if request.best_of else "n",
        )


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raise `BadRequestError`, which names the field `param`, if a token id from a client is not in the vocabulary."""
    # `min` and `max` run in C. The offending id is searched only if there is one.
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < limits.vocab_size)
        raise BadRequestError(
            f"{param}: token id {wrong} is not in the vocabulary of {limits.vocab_size} tokens", param=param
        )


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, limits: ModelLimits) -> int:
    max_generated = limits.max_model_len - num_prompt_tokens
    name, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        # A completion whose `max_tokens` is left out gets 16 tokens. One with null is like a chat: it may fill the
        # context.
        default = limits.beam_search_max_tokens if request.use_beam_search else max_generated
        if (
            isinstance(request, CompletionRequest)
            and not request.use_beam_search
            and name not in request.model_fields_set
        ):
            max_generated = min(max_generated, COMPLETION_TOKENS)
        return min(max_generated, limits.generation.defaults.max_new_tokens or default)
    if wanted == 0:
        # An engine always generates a token. With `echo`, clients send 0 to score a prompt, and the token is not shown.
        if isinstance(request, CompletionRequest) and request.echo:
            return 1
        raise BadRequestError(f"{name}: must be at least 1", param=name)
    # A limit of the operator shortens answers without an error, as in vLLM.
    wanted = min(wanted, limits.generation.max_tokens_limit or wanted)
    if wanted > max_generated:
        raise BadRequestError(
            f"this model's context is {limits.max_model_len} tokens, but the prompt has {num_prompt_tokens} tokens and "
            f"{name} asks for {wanted} more: reduce {name} or shorten the prompt",
            param=name,
            code="context_length_exceeded",
        )
    return wanted


def _first(asked: float | None, default: float | None, neutral: float) -> float:
    if asked is not None:
        return asked
    return neutral if default is None else default


def _prompt_logprobs(request: GenerationRequest, logprobs: int | None, limits: ModelLimits) -> int | None:
    # With `echo`, the logprobs of the answer begin with those of the prompt.
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        return max(logprobs, _all_or(request.prompt_logprobs, limits) or 0)
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return _all_or(request.prompt_logprobs, limits)


def _all_or(wanted: int | None, limits: ModelLimits) -> int | None:
    """Return the number of alternatives that a request wants, in which -1 is replaced by the size of the vocabulary (as
    in vLLM).
    """
    return limits.vocab_size if wanted == -1 else wanted


def check_num_prompt_logprobs(num_tokens: int, per_token: int | None, num_answers: int) -> None:
    """Raise `BadRequestError` if the answer would have too many logprobs of prompt tokens.

    `num_tokens` is the number of tokens of all prompts, `per_token` the number of alternatives for each (None: no
    prompt logprobs), and `num_answers` the number of answers to each prompt, which repeat them.
    """
    if per_token is None:
        return
    if (wanted := num_tokens * (per_token + 1) * num_answers) > MAX_LOGPROBS:
        raise BadRequestError(
            f"prompt_logprobs: {num_tokens} tokens have {wanted} logprobs in {num_answers} answers for each prompt, the"
            f" limit is {MAX_LOGPROBS}: ask for fewer alternatives or answers, or split the request",
            param="prompt_logprobs",
            code="too_many_values",
        )


def check_num_logprobs(num_logprobs: int, *, remedy: str) -> None:
    """Raise `BadRequestError` if an answer (with `best_of` or beams: all sequences) has too many logprobs. `remedy` is
    the end of the message: what the client can do.
    """
    if num_logprobs > MAX_LOGPROBS:
        raise BadRequestError(
            f"the answer has more than {MAX_LOGPROBS} logprobs: {remedy}", param="logprobs", code="too_many_values"
        )


def _check_logprobs(wanted: int | None, name: str, limits: ModelLimits, param: str | None = None) -> None:
    if wanted is not None and wanted > limits.max_logprobs:
        message = f"{name} is {wanted}, the limit is {limits.max_logprobs} (--max-logprobs)"
        raise BadRequestError(message, param=param or name)


def _seed(seed: int | None, seeds: random.Random) -> int:
    """Return the seed of a request, or a random one from `seeds` if it is None or -1 (as in vLLM).

    Every request gets a seed, so that a replay on another instance samples the same tokens.
    """
    return seeds.getrandbits(63) if seed is None or seed == -1 else seed & _SEED_MASK


def _logit_bias(given: Mapping[str, float], limits: ModelLimits) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        is_number = len(key) <= _MAX_ID_DIGITS and key.isascii() and key.isdigit()
        if not is_number or int(key) >= limits.vocab_size:
            raise BadRequestError(f"logit_bias: {key[:40]!r} is not a token id of this model", param="logit_bias")
        bias[int(key)] = value
    return bias


def _token_ids(given: Sequence[int] | None, param: str, limits: ModelLimits) -> list[int] | None:
    if given is None:
        return None
    if param == "allowed_token_ids" and not given:
        raise BadRequestError("allowed_token_ids must have at least one token id", param=param)
    check_token_ids(given, limits, param=param)
    return list(given)
