"""Reads the forms of a prompt: a text, a list of token ids, a dict with one of them, or several of these. Several
prompts are a list.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NotRequired, TypeAlias, TypedDict, cast

from baton_serve.engine.errors import ConfigError
from baton_serve.engine.offline.request_params import SamplingParams


class TextPrompt(TypedDict):
    """A text, as vLLM's dict form. `multi_modal_data` may have images and videos, and `multi_modal_uuids` names for
    them. `mm_processor_kwargs` replaces settings of the model's processor.
    """

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]


class TokensPrompt(TypedDict):
    """A list of token ids, as vLLM's dict form, with the other keys of `TextPrompt`."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]


Prompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


class ParsedPrompt(NamedTuple):
    """One prompt: exactly one of `text` and `token_ids` is set.

    `media` are its images (the bytes of a file each) and videos, in the prompt's order within each kind. `settings` are
    the `mm_processor_kwargs`.
    """

    text: str | None
    token_ids: list[int] | None
    media: Sequence[Any] = ()
    settings: Mapping[str, Any] = MappingProxyType({})


def parse_prompts(prompts: Prompts) -> list[ParsedPrompt]:
    """Return prompts in any form of vLLM's API (texts, token ids, dicts; one or several) as a list. Raises
    `ConfigError` for anything else."""
    if isinstance(prompts, (str, dict)):
        return [_one(prompts)]
    given = list(prompts)
    # A list of integers is one prompt of token ids, not several prompts.
    if given and all(isinstance(item, int) for item in given):
        return [ParsedPrompt(None, cast("list[int]", given))]
    return [_one(item) for item in given]


def checked_tokenizer(tokenizer: Any) -> Any:
    """Return `tokenizer` itself. Raises `ConfigError` if it is None, because the engine was started with
    `skip_tokenizer_init`."""
    if tokenizer is None:
        raise ConfigError("skip_tokenizer_init: there is no tokenizer; leave it out, or give token ids")
    return tokenizer


def without_text(prompt: ParsedPrompt, params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request to an engine without a tokenizer: the answer has token ids and no text.

    Raises `ConfigError` if the prompt is a text, or if a parameter needs a tokenizer.
    """
    if prompt.token_ids is None:
        raise ConfigError("skip_tokenizer_init: the engine has no tokenizer; give prompt_token_ids instead of a text")
    needs = {"stop": params.stops, "bad_words": params.bad_words, "structured_outputs": params.form}
    if given := [name for name, value in needs.items() if value]:
        raise ConfigError(f"skip_tokenizer_init: {given[0]} needs the text of the answer, and there is no tokenizer")
    # The caller's object stays as it is.
    params = params.clone()
    params.detokenize = False
    return params


def _one(prompt: object) -> ParsedPrompt:
    match prompt:
        # An empty dict is accepted, which vLLM's callers often pass.
        case {"multi_modal_data": dict() as data, **rest} if data:
            from baton_serve.engine.offline.images import media_of  # loads Pillow, which texts do not need

            others = cast("dict[str, Any]", rest)
            found = media_of(data, others.get("multi_modal_uuids") or {})
            return _one(rest)._replace(media=found, settings=others.get("mm_processor_kwargs") or {})
        case str():
            return ParsedPrompt(prompt, None)
        case {"prompt_token_ids": list() as token_ids}:
            return ParsedPrompt(None, [int(token) for token in token_ids])
        case {"prompt": str() as text}:
            return ParsedPrompt(text, None)
        case list() if all(isinstance(token, int) for token in prompt):
            return ParsedPrompt(None, prompt)
        case _:
            raise ConfigError("a prompt is a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'")
