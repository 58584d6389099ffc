"""Messages in OpenAI's harmony format, as gpt-oss writes them: a header of role, channel and recipient, then a body.

Format: https://cookbook.openai.com/articles/openai-harmony. Its markers are special tokens, and are expected as text.
"""

import re
from dataclasses import dataclass

from baton_serve.services.router.text.scanning.characters import Characters, Scan, collect, literal, until
from baton_serve.services.router.text.scanning.parts import Parts

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)

_RECIPIENT = re.compile(r"to=([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Header:
    """`raw` ends with the marker that begins the body."""

    raw: str
    channel: str
    recipient: str | None


def open_header(prompt: str) -> Header | None:
    """Of the message within which a prompt ends."""
    at = prompt.rfind(MESSAGE)
    if at < 0 or any(prompt.rfind(marker) > at for marker in ENDS):
        return None
    start = max(prompt.rfind(START, 0, at), 0)
    return _header(prompt[start : at + len(MESSAGE)])


def next_header(text: Characters, out: Parts, *, is_first: bool) -> Scan[Header | None]:
    """What comes before it is content. None at the end, or when a header never ends: it is content then."""
    marker = "to=" if is_first and (yield from _begins_with_recipient(text)) else ""
    while marker in ("", END, CALL, RETURN):
        marker = yield from until(text, out.content, (START, CHANNEL, END, CALL, RETURN))
        if not marker:
            return None
    body, end = yield from collect(text, (MESSAGE,))
    raw = marker + body + end
    if not end:
        out.content(raw)
        return None
    return _header(raw)


def _header(raw: str) -> Header:
    channel, recipient = _CHANNEL.search(raw), _RECIPIENT.search(raw)
    return Header(raw, channel.group(1) if channel else "", recipient.group(1) if recipient else None)


def _begins_with_recipient(text: Characters) -> Scan[bool]:
    """The prompt has begun the message, so that a recipient may come without any marker before it."""
    if (yield from literal(text, " to=")):
        return True
    return (yield from literal(text, "to="))
