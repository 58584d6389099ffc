"""Calls of tools in generated text: one format, one file, one line in the table. Whole texts and streams alike.

Nothing here raises for anything that a model writes: what is no call is content.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.parts import PartReader, Parts
from baton_serve.services.router.text.tool_calls.deepseek_v3 import deepseek_v3
from baton_serve.services.router.text.tool_calls.hermes import hermes
from baton_serve.services.router.text.tool_calls.llama3_json import llama3_json
from baton_serve.services.router.text.tool_calls.mistral import mistral
from baton_serve.services.router.text.tool_calls.openai import openai
from baton_serve.services.router.text.tool_calls.pythonic import pythonic
from baton_serve.services.router.text.tool_calls.qwen3_coder import qwen3_coder
from baton_serve.services.router.text.tool_calls.tools import Tools

__all__ = ["TOOL_CALL_FORMATS", "ToolCallFormat", "Tools"]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """`has_special_tokens`: its markers are special tokens, which must not be left out of the text."""

    scan: Callable[[Characters, Parts, Tools], Scan[None]]
    has_special_tokens: bool = False

    def reader(self, tools: Tools) -> PartReader:
        return PartReader(lambda text, out: self.scan(text, out, tools))


TOOL_CALL_FORMATS = {
    "deepseek_v3": ToolCallFormat(deepseek_v3, has_special_tokens=True),
    "hermes": ToolCallFormat(hermes),
    "llama3_json": ToolCallFormat(llama3_json, has_special_tokens=True),
    "mistral": ToolCallFormat(mistral, has_special_tokens=True),
    "openai": ToolCallFormat(openai, has_special_tokens=True),
    "pythonic": ToolCallFormat(pythonic, has_special_tokens=True),
    "qwen3_coder": ToolCallFormat(qwen3_coder),
}
