"""Errors of an instance process.

InstanceError
├── RequestFailed   one request ends; its router receives `Failed` with the reason
├── EngineBroken    the engine thread has stopped; the process ends
└── StartFailed     the process cannot start; the message is one line with the remedy
"""

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import ErrorCode


class InstanceError(Exception):
    """Base class of the errors that an instance process raises itself."""


class RequestFailed(InstanceError):  # noqa: N818 - named after the event, as in `messages.Failed`
    """Ends one request. It is sent to the router as `messages.Failed` with `code` and text; `lost` names another
    instance that caused it by being dead or unreachable.
    """

    def __init__(self, code: ErrorCode, message: str, *, lost: InstanceId | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


class EngineBroken(InstanceError):  # noqa: N818
    """The engine cannot continue: a step raised, hung, or lost a rank. The state of the engine is undefined, so it is
    not used again.
    """


class StartFailed(InstanceError):  # noqa: N818
    """The instance process cannot start. The message is one line that states cause and remedy."""
