"""Decides whether a prompt alone is too long, and truncates it (`truncate_prompt_tokens`); with `max_tokens`:
`sampling_params.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from baton_serve.services.router.protocol.request_bounds import MAX_TOKENS
from baton_serve.services.router.text.sampling_params import COMPLETION_TOKENS, ModelLimits


@dataclass(frozen=True, slots=True)
class Truncation:
    """Says how the prompts of a request are truncated: to how many tokens, and whether the first or the last ones are
    kept.
    """

    num_tokens: int
    """Largest number of tokens that remain of a prompt."""
    keeps_beginning: bool = False
    """True if the first tokens of a prompt remain (`truncation_side: right`), False if the last ones do."""

    def cut(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a prompt that truncation keeps."""
        if self.num_tokens >= len(token_ids):
            return token_ids
        return token_ids[: self.num_tokens] if self.keeps_beginning else token_ids[-self.num_tokens :]


def truncation_of(request: GenerationRequest, limits: ModelLimits) -> Truncation | None:
    """Return how the prompts of a request are truncated, or None if they are not.

    `truncate_prompt_tokens` -1 keeps what fits into the context together with the answer (`max_tokens`), and 0 keeps
    everything. Raises `BadRequestError` if it exceeds the model's context.
    """
    wanted = request.truncate_prompt_tokens
    if not wanted:
        return None
    if wanted > limits.max_model_len:
        raise BadRequestError(
            f"truncate_prompt_tokens is {wanted}, greater than the context of {limits.max_model_len} tokens",
            param="truncate_prompt_tokens",
        )
    # With an answer that fills the whole context no prompt fits: the check of `max_tokens` says so later.
    num_tokens = max(1, limits.max_model_len - _answer_tokens(request)) if wanted == -1 else wanted
    return Truncation(num_tokens, keeps_beginning=request.truncation_side == "right")


def _answer_tokens(request: GenerationRequest) -> int:
    """Return the number of tokens to leave free for the answer: `max_tokens` of the request, and at least one."""
    wanted = request.max_tokens
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        wanted = request.max_completion_tokens
    if isinstance(request, CompletionRequest) and "max_tokens" not in request.model_fields_set:
        wanted = COMPLETION_TOKENS
    return wanted or 1


def check_prompt(token_ids: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raise `BadRequestError`, which names the field `param`, if a prompt is empty or leaves no room for an answer in
    the model's context.
    """
    if not token_ids:
        raise BadRequestError(f"{param}: the prompt is empty", param=param)
    if len(token_ids) >= limits.max_model_len:
        raise _too_long(len(token_ids), limits.max_model_len, param)


def check_num_tokens(num_tokens: int, *, param: str) -> None:
    """Raise `BadRequestError`, which names the field `param`, if all prompts of one request together have too many
    tokens.
    """
    if num_tokens > MAX_TOKENS:
        raise BadRequestError(
            f"{param}: the request has more than {MAX_TOKENS} tokens, the limit of this server: split it into several "
            "requests",
            param=param,
            code="too_many_values",
        )


def _too_long(num_tokens: int, max_model_len: int, param: str) -> BadRequestError:
    """Return the error for a prompt of `num_tokens` tokens that leaves no room for an answer in the model's context."""
    return BadRequestError(
        f"this model's context is {max_model_len} tokens, but the prompt has {num_tokens} tokens and needs room for an "
        "answer: shorten it, or set truncate_prompt_tokens",
        param=param,
        code="context_length_exceeded",
    )
