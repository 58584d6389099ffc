"""Which priority a request gets: what it asks for, where its key may. The smaller, the sooner, as in vLLM."""

from baton_serve.services.router.protocol.caller import Caller
from baton_serve.services.router.protocol.errors import PermissionDeniedError


def allowed(asked: int | None, caller: Caller) -> int:
    """A request that asks for none gets 0, or the least that its key may ask for where that is more. Raises
    `PermissionDeniedError`."""
    least = caller.min_priority
    if asked is None:
        return max(0, least or 0)
    if least is not None and asked < least:
        raise PermissionDeniedError(
            f"priority {asked} goes before {least}, the least that this key may ask for: leave it out or raise it"
            " (operators: min_priority of the key's line in --api-key-file, or --min-priority)",
            param="priority",
        )
    return asked
