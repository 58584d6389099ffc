"""Check the priority that a request asks for against the limit of its API key.

As in vLLM, a smaller value is served earlier. The limit is therefore a smallest value.
"""

from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import PermissionDeniedError


def allowed(requested: int | None, caller: Caller) -> int:
    """Return the priority that a request gets: `requested`, or the default if it is None.

    The default is 0, or the smallest value that the key may ask for if that is larger. Raises `PermissionDeniedError`
    if `requested` is smaller than that value.
    """
    smallest = caller.min_priority
    if requested is None:
        return max(0, smallest or 0)
    if smallest is not None and requested < smallest:
        raise PermissionDeniedError(
            f"priority {requested} is below {smallest}, the smallest value that this API key may ask for: raise it or"
            " leave it out (operators: min_priority of the key's line in --api-key-file, or --min-priority)",
            param="priority",
        )
    return requested
