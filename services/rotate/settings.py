"""Settings of `baton drain` and `baton rotate`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PoolName = Literal["all", "prefill", "decode", "unified", "encode"]

_KEY_TEXT = "file with the cluster key; needed for instances that run on other machines"


class DrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `baton drain`: the instance to drain, and how long to wait for it."""

    address: Annotated[
        str,
        Meta(
            description="HTTP address of the instance, which serves its /health, as HOST:PORT",
            min_length=1,
            extra={"group": "drain", "positional": True},
        ),
    ]
    exit: Annotated[bool, Meta(description="end the process of the instance once it is drained")] = True
    timeout_s: Annotated[float, Meta(description="longest time until no request runs on the instance", gt=0)] = 300.0
    cluster_key_file: Annotated[str | None, Meta(description=_KEY_TEXT)] = None


class RotateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `baton rotate`: the pools, and the router or registry that lists their instances."""

    pool: Annotated[
        PoolName,
        Meta(
            description="the pool whose instances are restarted, one by one",
            extra={"group": "rotate", "positional": True},
        ),
    ] = "all"
    url: Annotated[str, Meta(description="URL of a router of the cluster, which lists the instances")] = (
        "http://127.0.0.1:8000"
    )
    api_key: Annotated[
        str | None,
        Meta(description="API key of the router; a router with keys lists its instances only to clients with one"),
    ] = None
    registry: Annotated[
        str,
        Meta(description="registry that lists the instances, in place of a router: redis://…, rediss://… or unix:///…"),
    ] = ""
    timeout_s: Annotated[
        float, Meta(description="longest time for one instance to drain, restart and be ready again", gt=0)
    ] = 900.0
    cluster_key_file: Annotated[str | None, Meta(description=_KEY_TEXT)] = None
