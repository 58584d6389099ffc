"""The HTTP client of `baton chat` and `baton complete`: streams answers of any OpenAI-compatible server.

It is synchronous, so that Ctrl-C raises `KeyboardInterrupt` while it waits; leaving the stream cancels the request.
"""

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx
import msgspec

from baton_serve.services.local.demo_client import AnswerError

CONNECT_TIMEOUT_S = 5.0
MAX_PAUSE_S = 600.0
"""Longest time without a byte of an answer. The first one may wait for the queue and a long prompt."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    text: str | None = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    """One event of a streamed answer, or the body of an answer with an error status."""

    choices: list[_Choice] = []
    error: _Problem | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_Model]


class AnswerPart(msgspec.Struct, frozen=True):
    """A piece of a streamed answer: new text, or new text of the reasoning."""

    text: str
    is_reasoning: bool = False


class ChatClient:
    """An HTTP client of the OpenAI-compatible server at `url`, which may end with `/v1`. Close it, or use it in a
    `with` block.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        is_loopback = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(MAX_PAUSE_S, connect=CONNECT_TIMEOUT_S),
            # A proxy of the environment cannot reach a server on this machine.
            trust_env=not is_loopback,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises `AnswerError` if it lists none or does not
        answer.
        """
        try:
            answer = self._client.get("/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise self._unreachable(exc) from exc
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.content)
        try:
            names = [model.id for model in msgspec.json.decode(answer.content, type=_ModelList).data]
        except msgspec.MsgspecError as exc:
            raise AnswerError(
                f"{self.url}/v1/models is not a list of models: is this an OpenAI-compatible API?"
            ) from exc
        if not names:
            raise AnswerError(f"{self.url} serves no model")
        return names[0]

    def stream(self, path: str, body: dict[str, object]) -> Generator[AnswerPart, None, None]:
        """Send the request `body` to the server's `path` and yield the text of its answer as it arrives. Closing the
        generator cancels the request.

        Raises `AnswerError` if the server refuses the request, or if the answer ends before it is complete.
        """
        try:
            with self._client.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code != 200:
                    raise _refused(answer.status_code, answer.read())
                yield from _parts(answer.iter_bytes())
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, error: Exception) -> AnswerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol | httpx.InvalidURL):
            return AnswerError(
                f"no server answers at {self.url} ({error}): start one with `baton serve`, or name it with --url"
            )
        return AnswerError(f"the connection to {self.url} broke: {error or type(error).__name__}")


def _parts(received: Iterator[bytes]) -> Iterator[AnswerPart]:
    """Yield the pieces of a streamed answer from the received bytes (server-sent events), up to `[DONE]`. Raises
    `AnswerError` if the server reports an error, or if the stream ends before that.
    """
    rest = b""
    for data in received:
        # Not `iter_lines`, which also breaks lines at characters that JSON need not escape, such as U+2028.
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line.removeprefix(b"data:").strip()
            # Only this shows that the answer is whole: a connection that ends may have been cut.
            if payload == b"[DONE]":
                return
            yield from _texts(payload)
    raise AnswerError("the answer ended before it was complete")


def _texts(payload: bytes) -> Iterator[AnswerPart]:
    """Yield the new texts in `payload`, the JSON of one event of a streamed answer. Raises `AnswerError` if it reports
    an error.
    """
    try:
        event = msgspec.json.decode(payload, type=_Event)
    except msgspec.MsgspecError as exc:
        raise AnswerError(f"the server sent an event that cannot be read: {exc}") from exc
    if event.error is not None:
        raise AnswerError(event.error.message or "the server reports an error without a message")
    for choice in event.choices:
        delta = choice.delta or _Delta()
        if delta.reasoning_content:
            yield AnswerPart(delta.reasoning_content, is_reasoning=True)
        if text := delta.content or choice.text:
            yield AnswerPart(text)


def _refused(status: int, body: bytes) -> AnswerError:
    """Return the error to raise for an answer with the error status `status`, with the server's message if `body` has
    one.
    """
    # A proxy in front of the server may answer with a page of its own.
    try:
        problem = msgspec.json.decode(body, type=_Event).error
    except msgspec.MsgspecError:
        problem = None
    reason = problem.message if problem is not None and problem.message else f"the server answers with status {status}"
    if status == 401:
        reason += ": give the API key with --api-key or in VLLM_API_KEY or OPENAI_API_KEY"
    return AnswerError(reason)
