"""Reasoning in generated text: one line a format. It is taken out before calls of tools are looked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.router.reasoning.gpt_oss import gpt_oss
from services.router.reasoning.tagged import tagged
from services.router.scanning.characters import Characters, Scan
from services.router.scanning.parts import PartReader, Parts

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`has_special_tokens`: its markers are special tokens, which must not be left out of the text."""

    scan: Callable[[Characters, Parts, str], Scan[None]]
    has_special_tokens: bool = False

    def reader(self, prompt: str) -> PartReader:
        """`prompt` is the rendered chat: its end may have begun the reasoning, or ended it."""
        return PartReader(lambda text, out: self.scan(text, out, prompt))


_THINK = ("<think>", "</think>")

REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat(partial(tagged, tags=_THINK, is_assumed=True)),
    "deepseek_v3": ReasoningFormat(partial(tagged, tags=_THINK, is_assumed=False)),
    "glm45": ReasoningFormat(partial(tagged, tags=_THINK, is_assumed=False)),
    "gpt_oss": ReasoningFormat(gpt_oss, has_special_tokens=True),
    "mistral": ReasoningFormat(
        partial(tagged, tags=("[THINK]", "[/THINK]"), is_assumed=False), has_special_tokens=True
    ),
    "qwen3": ReasoningFormat(partial(tagged, tags=_THINK, is_assumed=False)),
}
