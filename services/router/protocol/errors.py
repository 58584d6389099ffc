"""Define all errors of the router, each with its HTTP status and OpenAI error body. Clients see only `ApiError`, as a
JSON body in OpenAI's format.

The gateway turns any other exception into `InternalError` (status 500) and logs it. The tree, with HTTP statuses:

RouterError
├── ModelFolderError        the tokenizer or chat template cannot be used; the process does not start
├── ClientGoneError         the client has disconnected; no response is sent
└── ApiError                ends a request with an HTTP status
    ├── BadRequestError           400
    ├── AuthenticationError       401
    ├── HostNotAllowedError       403  the Host header names a host that is not allowed
    ├── PermissionDeniedError     403  the API key is valid but lacks a permission
    ├── ModelNotFoundError        404
    ├── NotFoundError             404
    ├── RequestTimeoutError       408  the client did not send its body in time
    ├── ConflictError             409
    ├── RequestTooLargeError      413
    ├── MediaTypeError            415  the Content-Type is not JSON
    ├── RateLimitError            429  has a Retry-After header
    ├── InternalError             500
    ├── UnavailableError          503  no instance can serve the request, or all replays failed
    └── DeadlineError             504
"""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """Describes one error in OpenAI's format: `param` names the field of the request, and `code` is a stable name for
    programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON body of an error response, in OpenAI's format."""

    error: ErrorDetail


class RouterError(Exception):
    """Base class of all errors of the router."""


class ModelFolderError(RouterError):
    """A file of the model's folder is missing or broken. The message is one line, which says what to do."""


class ClientGoneError(RouterError):
    """The client has disconnected, or has stopped reading its response."""


MAX_MESSAGE_CHARS = 1_000
"""Longest error message, in characters. Messages quote text of clients and are logged, so the text must be bounded."""


class ApiError(RouterError):
    """An error that ends a request with an HTTP status and an error body. `message` is sent to the client as it is."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        # Keep both ends: the beginning names the parameter, and the end has the limit or the remedy.
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS * 2 // 3]} … {message[-MAX_MESSAGE_CHARS // 3 :]}"
        super().__init__(message)
        self.message = message
        # `param` may be a field name that the client has made up.
        self.param = param if param is None else param[:MAX_MESSAGE_CHARS]
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def body(self) -> ErrorBody:
        """Return the body of the error response in OpenAI's format."""
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))


class BadRequestError(ApiError):
    """The request is invalid, or asks for something that the server or the model does not support (status 400)."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class AuthenticationError(ApiError):
    """The request's API key is missing or unknown (status 401)."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowedError(ApiError):
    """The request's Host header names a host that is not allowed (protection against DNS rebinding, status 403)."""

    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class PermissionDeniedError(ApiError):
    """The request's API key is valid but does not permit what the request asks for (status 403)."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFoundError(ApiError):
    """The request names a model that this router does not serve (status 404)."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(ApiError):
    """The request's path, or an object that it names, does not exist (status 404)."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ConflictError(ApiError):
    """The present state of the server does not allow the request, for example because the model sleeps (status 409)."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class RequestTimeoutError(ApiError):
    """The client did not send the body of its request in time (status 408)."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class RequestTooLargeError(ApiError):
    """The body of the request has more bytes than `--max-request-bytes` or another limit allows (status 413)."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class MediaTypeError(ApiError):
    """The Content-Type of the request is not one that the endpoint accepts (status 415)."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimitError(ApiError):
    """The server is overloaded, or the API key is over a limit (status 429). Set `retry_after_s` to send a Retry-After
    header.
    """

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class InternalError(ApiError):
    """The router or an instance has failed for a reason that the client cannot change (status 500)."""

    status = 500
    type = "server_error"
    code = "internal_error"


class UnavailableError(ApiError):
    """No instance can serve the request at present; a later try may succeed (status 503)."""

    status = 503
    type = "server_error"
    code = "no_instance"


class DeadlineError(ApiError):
    """The request did not finish within `--request-timeout-s` (status 504)."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"
