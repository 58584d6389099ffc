"""`POST /invocations`, as SageMaker asks: any of the other requests, told apart by what it has."""

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from typing import Annotated, Any

import msgspec

from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import Asgi, Receive, Scope, Send, read_body
from baton_serve.services.router.protocol.body_scan import check_counts
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.request_parsing import beside_loop
from baton_serve.services.router.protocol.sizes import MAX_NAME_CHARS

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]

_MARKS = (
    ("text_1", "/score"),
    ("documents", "/rerank"),
    ("prompt", "/v1/completions"),
    ("messages", "/v1/chat/completions"),
)


class InvocationsEndpoint:
    """A plain ASGI application. `direct` are the endpoints that it may hand a request to."""

    def __init__(self, service: ModelService, direct: Mapping[str, Asgi]) -> None:
        self._service = service
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        await self._service.serving(None)  # what the model does, an instance says
        endpoint = self._direct[path_for(await beside_loop(body, marks_of), self._tasks)]
        is_read = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await endpoint(scope, again, send)

    def _tasks(self, model: str | None) -> list[str]:
        profiles = [worker.record.pooling for worker in self._service.of(model).workers()]
        return [task for profile in profiles if profile is not None for task in profile.tasks]


class Marks(msgspec.Struct, frozen=True):
    """What a body says of which request it is."""

    keys: Container[str]
    model: str | None


def path_of(body: bytes, tasks_of: Callable[[str | None], Sequence[str]]) -> str:
    """The endpoint that a request is for. Raises `ApiError`."""
    return path_for(marks_of(body), tasks_of)


def marks_of(body: bytes) -> Marks:
    """Raises `BadRequestError`."""
    check_counts(body)
    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(keys["model"], type=Name | None) if "model" in keys else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(f"the body is no JSON object with a model's name: {exc}", code="invalid_json") from exc
    return Marks(frozenset(keys), model)


def path_for(marks: Marks, tasks_of: Callable[[str | None], Sequence[str]]) -> str:
    """`tasks_of` a model are those of one that answers with vectors; none for one that writes text. Raises
    `ApiError`."""
    keys = marks.keys
    tasks = tasks_of(marks.model)
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
