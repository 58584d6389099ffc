"""Decides how many instances of each role `baton serve` starts: the defaults, all replicas, and what a model needs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec
from msgspec import Meta

from baton_serve.contracts.instance import Role
from baton_serve.engine.pooling.model_kind import ModelKind
from baton_serve.services.common.errors import ConfigurationError

if TYPE_CHECKING:
    from baton_serve.services.local.settings import ServeSettings  # its defaults are those below

Count = Annotated[int, Meta(ge=0, le=1024)]
"""A number of instances of one role."""
DEFAULT_POOLS: Mapping[Role, int] = {"prefill": 1, "decode": 1, "unified": 0, "encode": 0}
"""Numbers of instances without `--prefill`, `--decode`, `--unified` and `--encode`."""


def with_pools(settings: "ServeSettings", kind: ModelKind) -> "ServeSettings":
    """Return the settings with the total numbers of instances of all replicas. If the model computes vectors (`kind`),
    such as an embedding model, the number of decode instances becomes 0.

    Raises `ConfigurationError` if the remaining instances cannot serve the model.
    """
    # The number of replicas ends here: all later code counts processes.
    pools = {role: getattr(settings, role) * settings.data_parallel_size for role in get_args(Role)}
    settings = msgspec.structs.replace(settings, data_parallel_size=1, **pools)
    if kind != "generate":
        if settings.encode:
            raise ConfigurationError("--encode is for models that generate text from images, not for pooling models")
        if not settings.prefill and not settings.unified:
            raise ConfigurationError(
                "--prefill 0 needs --unified 1 or more for a pooling model: no other instance could compute its vectors"
            )
        return msgspec.structs.replace(settings, decode=0)
    if not settings.decode and not settings.unified:
        raise ConfigurationError("--decode 0 needs --unified 1 or more: no other instance could generate tokens")
    return settings
