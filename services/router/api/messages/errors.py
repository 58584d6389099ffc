"""Errors in the shape of Anthropic's API."""

from baton_serve.services.router.api.messages.answer import AnthropicError, ErrorAnswer
from baton_serve.services.router.protocol.errors import ApiError

MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")

_ERROR_TYPES = {
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
    return ErrorAnswer(AnthropicError(_ERROR_TYPES.get(error.status, "api_error"), error.message))
