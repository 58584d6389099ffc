"""The forms of a prompt: a text, a list of token ids, or a dict with one of them. Several prompts are a list."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypedDict, cast

from baton_serve.engine.errors import ConfigError


class TextPrompt(TypedDict):
    """A text, as vLLM's dict form."""

    prompt: str


class TokensPrompt(TypedDict):
    """A list of token ids, as vLLM's dict form."""

    prompt_token_ids: list[int]


Prompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


class ParsedPrompt(NamedTuple):
    """One prompt; exactly one of the two fields is set."""

    text: str | None
    token_ids: list[int] | None


def parse_prompts(prompts: Prompts) -> list[ParsedPrompt]:
    """Return the prompts of any accepted form as a list. Raises `ConfigError` for anything else."""
    if isinstance(prompts, (str, dict)):
        return [_one(prompts)]
    given = list(prompts)
    # A list of integers is one prompt of token ids, not several prompts.
    if given and all(isinstance(item, int) for item in given):
        return [ParsedPrompt(None, cast("list[int]", given))]
    return [_one(item) for item in given]


def check_chats(chats: Iterable[Iterable[Mapping[str, object]]]) -> None:
    """Check that chat messages contain only text. Raises `ConfigError`.

    A chat template would silently leave out images and other parts.
    """
    for content in (message.get("content") for chat in chats for message in chat):
        kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
        if kinds - {"text"}:
            raise ConfigError(_TEXT_ALONE)


_TEXT_ALONE = "the offline API takes text only; use a server (`baton serve`) for prompts with images"


def _one(prompt: object) -> ParsedPrompt:
    match prompt:
        # An empty dict is accepted, which vLLM's callers often pass.
        case {"multi_modal_data": data} if data:
            raise ConfigError(_TEXT_ALONE)
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
