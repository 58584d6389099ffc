"""Tool parser of gpt-oss: harmony messages to `functions.name` are calls, and other messages are content.

Messages of the channel `analysis` are reasoning and are dropped. To keep them, use `--reasoning-parser gpt_oss`, which
removes them from the text before this scan.
"""

from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, until
from baton_serve.services.router.text.scanning.harmony import ENDS, START, next_header
from baton_serve.services.router.text.scanning.message_parts import Parts
from baton_serve.services.router.text.tool_calls.parameter_types import Tools


def openai(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
    """Divide an answer in the harmony format (gpt-oss) into content and tool calls, and emit them to `out`. Reasoning
    is dropped here.
    """
    is_first = True
    while (header := (yield from next_header(text, out, is_first=is_first))) is not None:
        is_first = False
        emit: Callable[[str], None] = _drop if header.channel == "analysis" else out.content
        name = (header.recipient or "").removeprefix("functions.")
        if name:
            out.begin(name)
            emit = out.arguments
        if (yield from until(text, emit, ENDS)) == START:
            text.back(START)


def _drop(_: str) -> None:
    """Ignore the text of reasoning, which is not sent to clients without a reasoning parser."""
