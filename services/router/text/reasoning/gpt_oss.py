"""Reasoning parser of gpt-oss: harmony messages of the channel `analysis` are reasoning.

Messages to a tool are passed on with their markers, for the tool call format `openai`. All other messages are content.
"""

from baton_serve.contracts.lark import Lark
from baton_serve.services.router.text.scanning.characters import Characters, Scan, until
from baton_serve.services.router.text.scanning.harmony import (
    CHANNEL,
    END,
    ENDS,
    MESSAGE,
    START,
    next_header,
    open_header,
)
from baton_serve.services.router.text.scanning.message_parts import Parts


def gpt_oss(text: Characters, out: Parts, prompt: str) -> Scan[None]:
    """Divide an answer in the harmony format (gpt-oss) into reasoning and content, and emit them to `out`. Tool calls
    stay in the content as they are.
    """
    header = open_header(prompt)
    if header is None or header.recipient is not None:
        header = yield from next_header(text, out, is_first=True)
    else:
        out.within_reasoning()
    while header is not None:
        is_call = header.recipient is not None
        if is_call:
            out.content(header.raw)
        emit = out.reasoning if header.channel == "analysis" and not is_call else out.content
        end = yield from until(text, emit, ENDS)
        # A message that the next one ends without a marker of its own: the start belongs to the next header.
        if end == START:
            text.back(START)
        elif is_call:
            out.content(end)
        header = yield from next_header(text, out, is_first=False)


def gpt_oss_rule(lark: Lark, prompt: str) -> str:
    """Return the grammar expression for what gpt-oss writes before an answer that follows a grammar: messages with
    reasoning, and the header of the final message. It depends on where the `prompt` ends.

    The messages with reasoning have the channel `analysis` or `commentary` and no recipient.
    """
    channel, message = lark.literal(CHANNEL), lark.literal(MESSAGE)
    again = f"{lark.text_up_to(END)} {lark.literal(START)} {lark.literal('assistant')}"
    header = open_header(prompt)
    if header is not None and header.channel == "final":
        return ""
    first = "" if header is None else f"{again} "
    return f'{first}({channel} ("analysis" | "commentary") {message} {again})* {channel} "final" {message}'
