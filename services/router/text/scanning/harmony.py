"""Scans messages in OpenAI's harmony format (gpt-oss): a header (role, channel, recipient), then a body.

The format is described in https://cookbook.openai.com/articles/openai-harmony. Its markers are special tokens, so the
detokenizer must keep special tokens in the text.
"""

import re
from dataclasses import dataclass

from baton_serve.services.router.text.scanning.characters import Characters, Scan, collect, literal, until
from baton_serve.services.router.text.scanning.message_parts import Parts

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
"""Markers that end the body of a message. The start of the next message ends it too."""

_RECIPIENT = re.compile(r"to=([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one message in the harmony format of gpt-oss. `raw` is its text up to and including the marker that
    begins the body; `recipient` is the function of a tool call, or None.
    """

    raw: str
    channel: str
    recipient: str | None


def open_header(prompt: str) -> Header | None:
    """Return the header of the harmony message in whose body the prompt ends, or None if the prompt ends between
    messages.
    """
    at = prompt.rfind(MESSAGE)
    if at < 0 or any(prompt.rfind(marker) > at for marker in ENDS):
        return None
    start = max(prompt.rfind(START, 0, at), 0)
    return _header(prompt[start : at + len(MESSAGE)])


def next_header(text: Characters, out: Parts, *, is_first: bool) -> Scan[Header | None]:
    """Read up to the body of the next harmony message and return its header, or None at the end of the text.

    Text before the header is emitted to `out` as content, and so is a header that never ends. `is_first` says that this
    is the first message of the answer, whose role the prompt may already contain.
    """
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
    # The prompt ends with `<|start|>assistant`, so a recipient may follow without a marker.
    if (yield from literal(text, " to=")):
        return True
    return (yield from literal(text, "to="))
