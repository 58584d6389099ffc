"""What a client hears when the cluster cannot serve its request. An instance's own fault stays in the logs."""

from baton_serve.contracts.messages import Failed
from baton_serve.services.router.placement.policy import NoCapacity
from baton_serve.services.router.protocol.errors import (
    ApiError,
    BadRequestError,
    DeadlineError,
    InternalError,
    RateLimitError,
    UnavailableError,
)


def no_capacity_error(no_capacity: NoCapacity) -> ApiError:
    if no_capacity.reason == "never_fits":
        return BadRequestError(no_capacity.message, code="context_length_exceeded")
    return UnavailableError(no_capacity.message, retry_after_s=1.0)


def failure_error(failed: Failed) -> ApiError:
    """For when replays are used up."""
    match failed.code:
        case "overloaded":
            return RateLimitError("the instances are overloaded", retry_after_s=1.0)
        case "timeout":
            return DeadlineError(failed.message)
        case "internal":
            return InternalError("an instance failed while it served this request")
        case _:
            return UnavailableError(f"the request could not be completed: {failed.message}", code=failed.code)
