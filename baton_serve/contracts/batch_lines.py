"""Decides which fields a line of a batch file must have; number, size and duplicate ids:
`router/batch/input_file.py`.

The router's batch API and `baton run-batch` read and write the same files. Everything here is pure.
"""

from collections.abc import Collection
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

BATCH_ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
"""Paths of the endpoints that the lines of a batch may call."""

MAX_CUSTOM_ID_CHARS = 512
_PROMPT_FIELDS = ("model", "tools", "instructions", "messages", "prompt", "input", "query", "text_1")
"""The fields that decide the prompt, in the order in which they get into it."""
_LEVELS = (64, 256, 1024, 4096, 16384)
"""Lengths in bytes of the prefixes that are compared."""
_DIGEST_BYTES = 6


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of the input file of a batch (OpenAI's Batch API). `body` is the JSON of the request, not parsed."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID_CHARS)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


_ABSENT = msgspec.Raw(b"")


class _Body(msgspec.Struct, frozen=True):
    """The fields of a request's body that are checked when a batch is read, or that decide its place among the lines,
    as unparsed JSON.

    All other fields are skipped: a dictionary of a million fields would keep the interpreter's lock for seconds.
    """

    stream: msgspec.Raw = msgspec.Raw(b"false")
    background: msgspec.Raw = msgspec.Raw(b"false")
    priority: msgspec.Raw = _ABSENT
    model: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT
    instructions: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    query: msgspec.Raw = _ABSENT
    text_1: msgspec.Raw = _ABSENT


class BatchResponse(msgspec.Struct, frozen=True):
    """The HTTP response to the request in one line of a batch."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """The reason why the request in one line of a batch got no HTTP response."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """One line of the output file or the error file of a batch. Either `response` or `error` is None."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: LineError | None = None


class InvalidLineError(ValueError):
    """Reports that a line of a batch's input file is not valid. `param` names the wrong field; None: the whole line."""

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


def parse_line(line: bytes, endpoints: Collection[str]) -> BatchRequest:
    """Return the request in one line of a batch's input file. Its `url` must be one of `endpoints`. Raises
    `InvalidLineError` if the line is not valid."""
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidLineError(f"the line is not a JSON object with custom_id, method, url and body: {exc}") from exc
    if request.url not in endpoints:
        raise InvalidLineError(
            f"the url {request.url[:100]!r} is not that of the batch: use {', '.join(endpoints)}",
            code="invalid_url",
            param="url",
        )
    if bytes(body.stream).strip() not in (b"false", b"null"):
        raise InvalidLineError("an answer in a file cannot be streamed: leave stream out", param="body.stream")
    # Such a line would be answered at once, and its request would run beside the pace of the batch.
    if bytes(body.background).strip() not in (b"false", b"null"):
        raise InvalidLineError(
            "a batch runs in the background already, and its file needs the whole answer: leave background out",
            param="body.background",
        )
    if bytes(body.priority):
        raise InvalidLineError(
            "the requests of a batch have the lowest priority: leave priority out", param="body.priority"
        )
    return request


def prefix_key(body: bytes) -> bytes:
    """Return a sort key for the body of a request. If the lines of a batch are sorted by it, requests whose prompts
    begin alike are neighbours, so that they share cached prefixes.

    The key has one digest for each length in `_LEVELS`, the shortest first: requests that share their first 64 bytes
    are next to each other, and among them the ones that share 256, and so on. Its length is fixed, however long the
    prompt.
    """
    # The JSON of the fields is compared, not the rendered prompt: rendering all prompts of a file would take minutes.
    fields = msgspec.json.decode(body, type=_Body)
    text = b"\0".join(part for name in _PROMPT_FIELDS if (part := bytes(getattr(fields, name))))
    return b"".join(blake2b(text[:level], digest_size=_DIGEST_BYTES).digest() for level in _LEVELS)
