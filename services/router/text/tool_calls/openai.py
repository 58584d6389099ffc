"""gpt-oss: harmony messages to `functions.name` are calls; other messages are content, save those of analysis.

Analysis is reasoning: it is dropped here, and kept by the reasoning parser `gpt_oss`, which runs before.
"""

from collections.abc import Callable

from baton_serve.services.router.text.scanning.characters import Characters, Scan, until
from baton_serve.services.router.text.scanning.harmony import ENDS, START, next_header
from baton_serve.services.router.text.scanning.parts import Parts
from baton_serve.services.router.text.tool_calls.tools import Tools


def openai(text: Characters, out: Parts, tools: Tools) -> Scan[None]:
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
    """Reasoning that nobody asked for."""
