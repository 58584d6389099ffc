"""What a prompt may be: a text, token ids, or a dict of either. Several make a list."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypedDict, cast

from baton_serve.engine.errors import ConfigError


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


class ParsedPrompt(NamedTuple):
    """One of them is None."""

    text: str | None
    token_ids: list[int] | None


def parse_prompts(prompts: Prompts) -> list[ParsedPrompt]:
    """Raises `ConfigError`."""
    if isinstance(prompts, (str, dict)):
        return [_one(prompts)]
    given = list(prompts)
    if given and all(isinstance(item, int) for item in given):
        return [ParsedPrompt(None, cast("list[int]", given))]
    return [_one(item) for item in given]


def check_chats(chats: Iterable[Iterable[Mapping[str, object]]]) -> None:
    """Raises `ConfigError` for messages with more than text, which a template would leave out."""
    for content in (message.get("content") for chat in chats for message in chat):
        kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
        if kinds - {"text"}:
            raise ConfigError(_TEXT_ALONE)


_TEXT_ALONE = "prompts are texts here: images are read by servers, such as `baton serve`"


def _one(prompt: object) -> ParsedPrompt:
    match prompt:
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
