"""From a checked request to what engines need (`SamplingParams`) and what the router does itself (`TextRules`).

Checks that need the model: token ids against the vocabulary, lengths against the context.
"""

import random
from collections.abc import Mapping, Sequence

import msgspec

from baton_serve.contracts.sampling import SamplingParams
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from baton_serve.services.router.protocol.sizes import MAX_TOKEN_RULES, MAX_TOKENS

_random = random.Random()
_SEED_MASK = 2**63 - 1
_MOST_DIGITS = 20
"""Of a token id that is spelled as a text. Python refuses to read thousands."""

_WITHOUT_BEAMS: Mapping[str, tuple[object, ...]] = {
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
    "min_tokens": (None, 0),
    "stop": (None, []),
}
"""What may be said of a search for beams, by parameter."""

COMPLETION_TOKENS = 16
"""OpenAI's and vLLM's limit of a completion that says nothing; `null` asks for as many as fit."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that says nothing gets. Names are those of generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """`max_model_len` is what every live instance can serve."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_sequences: int
    beam_search_max_tokens: int
    defaults: SamplingDefaults


class TextRules(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become the answer's text, and what that text must and must not be."""

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


def chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """Number of alternatives wanted, None for no logprobs at all."""
    if request.top_logprobs and not request.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def text_rules(request: GenerationRequest, *, logprobs: int | None, tokens_as_ids: bool) -> TextRules:
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
    """What a request says of single tokens. All its prompts share the lists."""

    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    stop_token_ids: list[int]
    bad_words: list[list[int]]


def token_rules(request: GenerationRequest, rules: TextRules, limits: ModelLimits, *, num_prompts: int) -> TokenRules:
    """Raises `BadRequestError`."""
    if not (request.logit_bias or request.stop_token_ids or rules.bad_words) and request.allowed_token_ids is None:
        return TokenRules(logit_bias={}, allowed_token_ids=None, stop_token_ids=[], bad_words=[])
    sizes = {
        "logit_bias": len(request.logit_bias or ()),
        "allowed_token_ids": len(request.allowed_token_ids or ()),
        "stop_token_ids": len(request.stop_token_ids or ()),
        "bad_words": sum([len(word) for word in rules.bad_words]),
    }
    if num_prompts * sum(sizes.values()) > MAX_TOKEN_RULES:
        param = max(sizes, key=sizes.__getitem__)
        raise BadRequestError(
            f"{param}: {sum(sizes.values())} tokens for each of {num_prompts} prompts, the limit is {MAX_TOKEN_RULES} "
            "for all of them: send several requests",
            param=param,
            code="too_many_values",
        )
    return TokenRules(
        logit_bias=_logit_bias(request.logit_bias or {}, limits),
        allowed_token_ids=_token_ids(request.allowed_token_ids, "allowed_token_ids", limits),
        stop_token_ids=_token_ids(request.stop_token_ids, "stop_token_ids", limits) or [],
        bad_words=list(rules.bad_words),
    )


def sampling_params(
    request: GenerationRequest, num_prompt_tokens: int, rules: TextRules, tokens: TokenRules, limits: ModelLimits
) -> SamplingParams:
    """Raises `BadRequestError`. Call once per prompt: `max_tokens` depends on its length."""
    logprobs = rules.logprobs
    max_tokens = _max_tokens(request, num_prompt_tokens, limits)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequestError(f"min_tokens is {min_tokens}, greater than max_tokens, {max_tokens}", param="min_tokens")
    defaults = limits.defaults
    prompt_logprobs = _prompt_logprobs(request, logprobs)
    is_chat = isinstance(request, ChatCompletionRequest)
    _check_logprobs(logprobs, "top_logprobs" if is_chat else "logprobs", limits)
    _check_logprobs(prompt_logprobs, "prompt_logprobs", limits)
    return SamplingParams(
        seed=_seed(request.seed),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        top_p=_first(request.top_p, defaults.top_p, 1.0),
        top_k=int(_first(request.top_k, defaults.top_k, -1)) or -1,
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=tokens.logit_bias,
        allowed_token_ids=tokens.allowed_token_ids,
        bad_words=tokens.bad_words,
        grammar=rules.grammar,
        stop_token_ids=tokens.stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class SequenceCounts(msgspec.Struct, frozen=True):
    """Of each prompt `width` sequences or beams are looked at, and `count` are the answer."""

    count: int
    width: int


def sequence_counts(request: GenerationRequest, num_prompts: int, limits: ModelLimits) -> SequenceCounts:
    """Raises `BadRequestError`."""
    count = request.n or 1
    width = request.best_of or count
    if width < count:
        raise BadRequestError(f"best_of is {width}, less than n, {count}", param="best_of")
    if width * num_prompts > limits.max_sequences:
        param = "best_of" if request.best_of else "n"
        raise BadRequestError(
            f"{param}: the request asks for {width * num_prompts} sequences, the limit is {limits.max_sequences}",
            param=param,
        )
    return SequenceCounts(count, width)


def with_ranking_logprobs(sampling: SamplingParams, size: SequenceCounts) -> SamplingParams:
    """Where the best are to be chosen, every token's log-probability is needed."""
    if size.width == size.count or sampling.logprobs is not None:
        return sampling
    return msgspec.structs.replace(sampling, logprobs=0)


def check_beams(request: GenerationRequest, width: int, rules: TextRules, limits: ModelLimits) -> None:
    """Beams follow the model's own probabilities: nothing else may be asked of them. Raises `BadRequestError`."""
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False))):
            if getattr(request, name) not in neutral:
                raise BadRequestError(f"{name} needs use_beam_search", param=name)
        return
    for name, neutral_values in _WITHOUT_BEAMS.items():
        if getattr(request, name, None) not in neutral_values:
            raise BadRequestError(f"{name} cannot be combined with use_beam_search", param=name)
    if rules.grammar is not None:
        raise BadRequestError("use_beam_search cannot be combined with a stated form", param="use_beam_search")
    if 2 * width > limits.max_logprobs:
        raise BadRequestError(
            f"use_beam_search: {width} beams need {2 * width} alternatives a token, the limit is {limits.max_logprobs} "
            "(--max-logprobs)",
            param="best_of" if request.best_of else "n",
        )


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raises `BadRequestError` when no answer could follow this prompt."""
    if not token_ids:
        raise BadRequestError(f"{param}: the prompt is empty", param=param)
    if len(token_ids) >= limits.max_model_len:
        raise too_long(len(token_ids), limits.max_model_len, param)


def check_num_tokens(num_tokens: int, *, param: str) -> None:
    """Of all prompts of a request. Raises `BadRequestError`."""
    if num_tokens > MAX_TOKENS:
        raise BadRequestError(
            f"{param}: the request has more than {MAX_TOKENS} tokens, the limit of this server: send several requests",
            param=param,
            code="too_many_values",
        )


def check_token_ids(token_ids: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """For ids that come from a client. Raises `BadRequestError`."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < limits.vocab_size)
        raise BadRequestError(f"{param}: token id {wrong} is not in the vocabulary of {limits.vocab_size}", param=param)


def too_long(num_tokens: int, max_model_len: int, param: str) -> BadRequestError:
    return BadRequestError(
        f"this model's context is {max_model_len} tokens, but the prompt has {num_tokens} tokens and needs room for an "
        "answer: shorten it, or set truncate_prompt_tokens",
        param=param,
        code="context_length_exceeded",
    )


def kept(wanted: int | None, limits: ModelLimits) -> int | None:
    """How many tokens of a prompt `truncate_prompt_tokens` keeps; None: all. Raises `BadRequestError`."""
    if wanted is None:
        return None
    keep = limits.max_model_len - 1 if wanted == -1 else wanted
    if keep > limits.max_model_len:
        raise BadRequestError(
            f"truncate_prompt_tokens is {keep}, greater than the context of {limits.max_model_len} tokens",
            param="truncate_prompt_tokens",
        )
    return keep or None


def truncated(token_ids: list[int], wanted: int | None, limits: ModelLimits) -> list[int]:
    """Keeps the last `wanted` tokens; -1 means as many as the context allows."""
    keep = kept(wanted, limits)
    return token_ids if keep is None or keep >= len(token_ids) else token_ids[len(token_ids) - keep :]


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, limits: ModelLimits) -> int:
    room = limits.max_model_len - num_prompt_tokens
    name, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        most = limits.beam_search_max_tokens if request.use_beam_search else room
        if (
            isinstance(request, CompletionRequest)
            and not request.use_beam_search
            and name not in request.model_fields_set
        ):
            room = min(room, COMPLETION_TOKENS)
        return min(room, limits.defaults.max_new_tokens or most)
    if wanted == 0:
        if isinstance(request, CompletionRequest) and request.echo:
            return 1
        raise BadRequestError(f"{name}: must be at least 1", param=name)
    if wanted > room:
        raise BadRequestError(
            f"this model's context is {limits.max_model_len} tokens, but the prompt has {num_prompt_tokens} tokens and "
            f"{name} asks for {wanted} more",
            param=name,
            code="context_length_exceeded",
        )
    return wanted


def _first(asked: float | None, default: float | None, neutral: float) -> float:
    if asked is not None:
        return asked
    return neutral if default is None else default


def _prompt_logprobs(request: GenerationRequest, logprobs: int | None) -> int | None:
    if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
        return max(logprobs, request.prompt_logprobs or 0)
    if request.prompt_logprobs is not None and request.stream:
        raise BadRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return request.prompt_logprobs


def _check_logprobs(wanted: int | None, param: str, limits: ModelLimits) -> None:
    if wanted is not None and wanted > limits.max_logprobs:
        raise BadRequestError(f"{param}: {wanted} were asked for, the limit is {limits.max_logprobs}", param=param)


def _seed(seed: int | None) -> int:
    """A drawn seed makes a replay go on as the stream would have. -1 means none, as in vLLM."""
    return _random.getrandbits(63) if seed is None or seed == -1 else seed & _SEED_MASK


def _logit_bias(given: Mapping[str, float], limits: ModelLimits) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        is_number = len(key) <= _MOST_DIGITS and key.isascii() and key.isdigit()
        if not is_number or int(key) >= limits.vocab_size:
            raise BadRequestError(f"logit_bias: {key[:40]!r} is not a token id of this model", param="logit_bias")
        bias[int(key)] = value
    return bias


def _token_ids(given: Sequence[int] | None, param: str, limits: ModelLimits) -> list[int] | None:
    if given is None:
        return None
    if param == "allowed_token_ids" and not given:
        raise BadRequestError("allowed_token_ids: at least one is needed", param=param)
    check_token_ids(given, limits, param=param)
    return list(given)
