"""Tool parsers (`--tool-call-parser`): formats of tool calls in generated text, for whole texts and streams.

To add a format, write one module with its scan, and add one line to `TOOL_CALL_FORMATS`. A scan never raises an error
for a text: text that is not a valid call is content.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton_serve.services.router.text.scanning.characters import Characters, Scan
from baton_serve.services.router.text.scanning.message_parts import PartReader, Parts
from baton_serve.services.router.text.tool_calls.deepseek_v3 import deepseek_v3
from baton_serve.services.router.text.tool_calls.hermes import hermes
from baton_serve.services.router.text.tool_calls.llama3_json import llama3_json
from baton_serve.services.router.text.tool_calls.mistral import mistral
from baton_serve.services.router.text.tool_calls.openai import openai
from baton_serve.services.router.text.tool_calls.parameter_types import Tools
from baton_serve.services.router.text.tool_calls.pythonic import pythonic
from baton_serve.services.router.text.tool_calls.qwen3_coder import qwen3_coder

__all__ = ["TOOL_CALL_FORMATS", "ToolCallFormat", "Tools"]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """One format in which models write tool calls, such as Hermes or Mistral: how it is parsed."""

    scan: Callable[[Characters, Parts, Tools], Scan[None]]
    """Splits a text into content and calls."""
    has_special_tokens: bool = False
    """Whether the markers are special tokens, which the detokenizer must then keep in the text."""

    def reader(self, tools: Tools) -> PartReader:
        """Return a new `PartReader` that finds tool calls in an answer to a request that offers these tools."""
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
"""The formats by the value of `--tool-call-parser`; the names are vLLM's."""
