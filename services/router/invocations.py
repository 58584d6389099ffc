"""`POST /invocations`, as SageMaker asks: any of the other requests, told apart by what it has."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from services.router.asgi import Receive, Scope, Send, read_body
from services.router.errors import BadRequestError
from services.router.frontend import Frontend
from services.router.shell import Asgi

_MARKS = (
    ("text_1", "/score"),
    ("documents", "/rerank"),
    ("prompt", "/v1/completions"),
    ("messages", "/v1/chat/completions"),
)


class InvocationsEndpoint:
    """A plain ASGI application. `direct` are the endpoints that it may hand a request to."""

    def __init__(self, frontend: Frontend, direct: Mapping[str, Asgi]) -> None:
        self._frontend = frontend
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        await self._frontend.serving(None)  # what the model does, an instance says
        endpoint = self._direct[path_of(body, self._tasks)]
        is_read = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await endpoint(scope, again, send)

    def _tasks(self, model: str | None) -> list[str]:
        profiles = [member.record.pooling for member in self._frontend.of(model).members()]
        return [task for profile in profiles if profile is not None for task in profile.tasks]


def path_of(body: bytes, tasks_of: Callable[[str | None], Sequence[str]]) -> str:
    """The endpoint that a request is for. `tasks_of` a model are those of one that answers with vectors; none for one
    that writes text. Raises `ApiError`."""
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(keys["model"], type=str | None) if "model" in keys else None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"the body is no JSON object with a model's name: {exc}", code="invalid_json") from exc
    tasks = tasks_of(model)
    if tasks and ("input" in keys or "messages" in keys):
        if "task" in keys:
            return "/pooling"
        return "/v1/embeddings" if "embed" in tasks else "/classify"
    for key, path in _MARKS:
        if key in keys:
            return path
    if "input" in keys:
        return "/v1/embeddings"
    raise BadRequestError("the body has none of messages, prompt, input, text_1 and documents: which request is it?")
