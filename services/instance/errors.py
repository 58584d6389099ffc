"""Errors of an instance process.

InstanceError
├── RequestFailed   one request ends here; the router is told why
├── EngineBroken    the engine's thread has ended; so does the process
└── StartFailed     the process cannot start; one line for a human, with the remedy
"""

from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.messages import ErrorCode


class InstanceError(Exception):
    """Root of this tree."""


class RequestFailed(InstanceError):  # noqa: N818 - what happened, not a kind of error
    """Becomes `messages.Failed`. `lost` names a peer that is to blame."""

    def __init__(self, code: ErrorCode, message: str, *, lost: InstanceId | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.lost = lost


class EngineBroken(InstanceError):  # noqa: N818
    """A step of the engine raised: nobody knows what state it is in."""


class StartFailed(InstanceError):  # noqa: N818
    """The message is one line."""
