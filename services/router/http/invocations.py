"""Serve `POST /invocations` (SageMaker): the fields of the body decide which endpoint answers.

The fields of the body decide which endpoint serves the request, as in vLLM.
"""

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from typing import Annotated, Any

import msgspec

from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.protocol.asgi import Asgi, Receive, Scope, Send, read_body
from baton_serve.services.router.protocol.body_scan import check_counts
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.protocol.request_bounds import MAX_NAME_CHARS
from baton_serve.services.router.protocol.request_parsing import beside_loop

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]

# In this order: a score or rerank request may hold further fields, and a chat may not be taken for one of them.
_MARKS = (
    ("text_1", "/score"),
    ("documents", "/rerank"),
    ("texts", "/rerank"),
    ("prompt", "/v1/completions"),
    ("messages", "/v1/chat/completions"),
)


class InvocationsEndpoint:
    """Answers `POST /invocations`: passes a request on to the endpoint that its fields belong to. `direct` has these
    endpoints by path. It is a plain ASGI application.
    """

    def __init__(self, service: ModelService, direct: Mapping[str, Asgi]) -> None:
        self._service = service
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive)
        # Only an instance's record says whether the model generates text or vectors, so one must be known.
        await self._service.serving(None)
        endpoint = self._direct[path_for(await beside_loop(body, marks_of), self._tasks)]
        is_read = False

        # The body has been consumed here. The endpoint gets it once more, and after it the connection's own messages,
        # which it needs to notice that the client has left.
        async def replay_body() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await endpoint(scope, replay_body, send)

    def _tasks(self, model: str | None) -> list[str]:
        """Return the tasks of a pooling model, such as `embed`; the list is empty for a model that generates text. None
        stands for the default model.
        """
        profiles = [worker.record.pooling for worker in self._service.of(model).view.workers()]
        return [task for profile in profiles if profile is not None for task in profile.tasks]


class Marks(msgspec.Struct, frozen=True):
    """The parts of a request's body that decide which endpoint answers it: the names of its fields, and the model."""

    keys: Container[str]
    model: str | None


def path_of(body: bytes, tasks_of: Callable[[str | None], Sequence[str]]) -> str:
    """Return the path of the endpoint that serves a request with this body. Raises `ApiError` as `path_for` and
    `marks_of` do.
    """
    return path_for(marks_of(body), tasks_of)


def marks_of(body: bytes) -> Marks:
    """Read the field names and the model from a request's body. Raises `BadRequestError` if it is not a JSON object."""
    check_counts(body)
    try:
        # The values stay unparsed: the endpoint parses the body by its own schema later.
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(keys["model"], type=Name | None) if "model" in keys else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequestError(
            f"the body must be a JSON object, and its model a string: {exc}", code="invalid_json"
        ) from exc
    return Marks(frozenset(keys), model)


def path_for(marks: Marks, tasks_of: Callable[[str | None], Sequence[str]]) -> str:
    """Return the path of the endpoint that serves a request with these fields.

    `tasks_of` returns the pooling tasks of a model (None: the default model), and an empty list for a model that
    generates text. Raises `ApiError` if no endpoint fits or the model does not exist.
    """
    keys = marks.keys
    tasks = tasks_of(marks.model)
    # `input` and `messages` fit both kinds of models, so the model decides.
    if tasks and ("input" in keys or "messages" in keys):
        if "task" in keys:
            return "/pooling"
        return "/v1/embeddings" if "embed" in tasks else "/classify"
    for key, path in _MARKS:
        if key in keys:
            return path
    if "input" in keys:
        return "/v1/embeddings"
    raise BadRequestError(
        "the body has none of the fields messages, prompt, input, text_1 and documents, which decide how it is served"
    )
