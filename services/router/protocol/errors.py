"""Errors of the router. What a client may see is an `ApiError`, in OpenAI's shape; nothing else ever reaches one.

RouterError
├── ModelFolderError        the tokenizer or template cannot be used: the process does not start
├── ClientGoneError         the client went away: nobody is left to answer
└── ApiError                ends a request; has a status
    ├── BadRequestError           400
    ├── AuthenticationError       401
    ├── HostNotAllowedError       403  the server is not to be called by that name
    ├── PermissionDeniedError     403  the key may not have what was asked for
    ├── ModelNotFoundError        404
    ├── NotFoundError             404
    ├── RequestTimeoutError       408  the client did not send its body
    ├── RequestTooLargeError      413
    ├── MediaTypeError            415  the body is not said to be JSON
    ├── RateLimitError            429  with Retry-After
    ├── InternalError             500
    ├── UnavailableError          503  no instance, or replays are used up
    └── DeadlineError             504
"""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class RouterError(Exception):
    """Root of this tree."""


class ModelFolderError(RouterError):
    """One line: what is missing or broken in the model's folder, and what to do."""


class ClientGoneError(RouterError):
    """The client disconnected."""


LONGEST_MESSAGE = 1_000
"""Characters. Messages quote what clients sent, and are logged."""


class ApiError(RouterError):
    """`message` is for the client; it never quotes a traceback."""

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
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE * 2 // 3]} … {message[-LONGEST_MESSAGE // 3 :]}"
        super().__init__(message)
        self.message = message
        self.param = param if param is None else param[:LONGEST_MESSAGE]
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code))


class BadRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class AuthenticationError(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowedError(ApiError):
    status = 403
    type = "permission_error"
    code = "host_not_allowed"


class PermissionDeniedError(ApiError):
    """The key is known, and may not have what was asked for."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class RequestTimeoutError(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class RequestTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class MediaTypeError(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimitError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class InternalError(ApiError):
    status = 500
    type = "server_error"
    code = "internal_error"


class UnavailableError(ApiError):
    status = 503
    type = "server_error"
    code = "no_instance"


class DeadlineError(ApiError):
    status = 504
    type = "server_error"
    code = "deadline_exceeded"
