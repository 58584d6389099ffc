"""Errors in the shape of Anthropic's API."""

from services.router.dialects.messages_answer import AnthropicError, ErrorAnswer
from services.router.errors import ApiError

PATHS = ("/v1/messages", "/v1/messages/count_tokens")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_answer(error: ApiError) -> ErrorAnswer:
    return ErrorAnswer(AnthropicError(_TYPES.get(error.status, "api_error"), error.message))
