"""Errors of an instance process.

InstanceError
├── RequestFailed   one request ends; its router receives `Failed` with the reason
├── EngineBroken    the engine thread has stopped; the process ends
└── StartFailed     the process cannot start; the message is one line with the remedy
"""

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import ErrorCode


class InstanceError(Exception):
    """Base class of all errors in this module."""


class RequestFailed(InstanceError):  # noqa: N818 - named after the event, as in `messages.Failed`
    """Ends one request. It is sent to the router as `messages.Failed`; `lost` names a peer instance that caused it."""

    def __init__(self, code: ErrorCode, message: str, *, lost: InstanceId | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


class EngineBroken(InstanceError):  # noqa: N818
    """Reports that a step of the engine raised. The state of the engine is undefined, so it is not used again."""


class StartFailed(InstanceError):  # noqa: N818
    """Reports that the process cannot start. The message is one line that states cause and remedy."""
