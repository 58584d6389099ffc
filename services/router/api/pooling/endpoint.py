"""Run a request of any pooling endpoint: check that the model has the task, tokenize, send to instances, count
`usage`.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from baton_serve.contracts.pooling import PoolingInput, PoolingProfile, PoolingSpec, PoolingTask
from baton_serve.services.router.api.model_service import ModelService
from baton_serve.services.router.api.pooling.inputs import RequestInputs
from baton_serve.services.router.api.pooling.schema import PoolingCommon
from baton_serve.services.router.protocol.asgi import (
    DisconnectWatch,
    Receive,
    RequestContext,
    Scope,
    Send,
    read_body,
    send_encoded,
)
from baton_serve.services.router.protocol.errors import BadRequestError, ClientGoneError
from baton_serve.services.router.protocol.openai_responses import Usage
from baton_serve.services.router.protocol.request_parsing import is_long, parsed
from baton_serve.services.router.quota.api_keys import allowed
from baton_serve.services.router.requests.pooling_dispatcher import PoolingPrompts, Vector

R = TypeVar("R", bound=PoolingCommon)

# For errors: the endpoints that a model with this task serves.
_SERVED_BY = {
    "embed": "/v1/embeddings, /score and /rerank",
    "token_embed": "/pooling",
    "classify": "/classify, /pooling and, with a single class, /score and /rerank",
}


class PoolingEndpoint(Generic[R]):
    """Serves one path of pooling models, such as /score. It is a plain ASGI application that parses a request and
    answers with the result of the function `respond`.
    """

    def __init__(
        self,
        service: ModelService,
        schema: type[R],
        respond: "Callable[[PoolingCall, R], Awaitable[object]]",
        *,
        prefix: str,
    ) -> None:
        """Create the endpoint. `service` is that of the default model, `schema` the class of its requests; `respond`
        computes the answer to a request; `prefix` starts the ids of answers.
        """
        self._service = service
        self._schema = schema
        self._respond = respond
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        body = await read_body(scope, receive)
        request = await parsed(body, self._schema)
        service = await self._service.serving(request.model)
        call = PoolingCall(service, request, context, prefix=self._prefix, is_long=is_long(body))
        try:
            encoded = await self._encoded_answer(call, request, context, receive)
        finally:
            call.inputs.close()
        await send_encoded(send, encoded)

    async def _encoded_answer(
        self, call: "PoolingCall", request: R, context: RequestContext, receive: Receive
    ) -> bytes:
        """Return the answer to a request as JSON. Raises `ApiError`, and `ClientGoneError` if the client disconnects.

        Nothing else that the answer was made of is kept then: a slow client may take minutes to receive 50 MB.
        """
        # A task of its own, so that it can be cancelled wherever it waits once the client has disconnected.
        response_task = asyncio.ensure_future(self._respond(call, request))
        is_gone = False

        def abandon() -> None:
            nonlocal is_gone
            is_gone = True
            response_task.cancel()

        try:
            with DisconnectWatch(receive, abandon, context.exchange):
                return msgspec.json.encode(await response_task)
        except asyncio.CancelledError:
            # Either the client has disconnected, or the server cancels this request. In the second case the
            # cancellation must go on.
            response_task.cancel()
            if is_gone:
                raise ClientGoneError("the client disconnected") from None
            raise


class PoolingCall:
    """One request to a pooling model: has its inputs converted to tokens, computes their vectors on the instances, and
    counts its tokens.

    The endpoint creates it for each request and gives it to the function that computes the answer.
    """

    def __init__(
        self, service: ModelService, request: PoolingCommon, context: RequestContext, *, prefix: str, is_long: bool
    ) -> None:
        """Start with a parsed `request`. Raises `ApiError` if `service` does not serve a pooling model under the
        requested name.

        `prefix` starts the id of the answer. `is_long` says that the body was large; see `RequestInputs`.
        """
        self.service = service
        self.model = service.view.model_name(request.model)
        self.profile: PoolingProfile = service.view.pooling_profile()
        self.id = f"{prefix}-{request.request_id or context.request_id}"
        self.created = service.now()
        self._request = request
        self._arrived_at = context.arrived_at
        self._caller = context.caller
        self._slo = service.slo(context)
        self._trace_headers = context.trace_headers
        self._num_tokens = 0
        self.inputs = RequestInputs(service, request, self._caller.name, is_long=is_long)

    def require(self, *tasks: PoolingTask) -> None:
        """Raise `BadRequestError` if the model can perform none of `tasks`. The error names the endpoints that this
        model serves.
        """
        if not set(tasks) & set(self.profile.tasks):
            served = dict.fromkeys(_SERVED_BY[task] for task in self.profile.tasks)
            raise BadRequestError(
                f"this model does not serve {' or '.join(tasks)}; it answers at {'; '.join(served)}",
                code="unsupported_endpoint",
            )

    async def compute(self, inputs: Sequence[PoolingInput], params: PoolingSpec) -> list[Vector]:
        """Compute one vector for each input on the instances, and return them in the same order. `params` has the task
        and what is done with its result. Raises `ApiError` if an input cannot be computed.
        """
        prompts = PoolingPrompts(
            # Instances need unique ids, but clients may choose ids (x-request-id) and use one twice.
            request_id=f"{self.id}-{secrets.token_hex(4)}",
            inputs=inputs,
            params=params,
            priority=allowed(self._request.priority, self._caller),
            caller=self._caller,
            slo=self._slo,
            trace_headers=self._trace_headers,
            model=self.service.view.only_names(),
            images=self.inputs.images,
        )
        self._num_tokens += prompts.num_tokens
        return await self.service.pooling.vectors(prompts, arrived_at=self._arrived_at)

    def usage(self) -> Usage:
        """Return the number of tokens of all inputs that were given to `compute` so far."""
        return Usage(prompt_tokens=self._num_tokens, total_tokens=self._num_tokens, completion_tokens=0)
