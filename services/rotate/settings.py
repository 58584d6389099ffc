"""Settings of `baton drain` and `baton rotate`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PoolName = Literal["all", "prefill", "decode", "unified"]

_KEY_TEXT = "file with the cluster's secret, for instances on other machines"


class DrainSettings(msgspec.Struct, frozen=True, kw_only=True):
    address: Annotated[
        str,
        Meta(
            description="HOST:PORT of the instance's /health",
            min_length=1,
            extra={"group": "drain", "positional": True},
        ),
    ]
    exit: Annotated[bool, Meta(description="end the process when it is drained")] = True
    timeout_s: Annotated[float, Meta(description="longest time to wait until nothing runs there", gt=0)] = 300.0
    cluster_key_file: Annotated[str | None, Meta(description=_KEY_TEXT)] = None


class RotateSettings(msgspec.Struct, frozen=True, kw_only=True):
    pool: Annotated[
        PoolName,
        Meta(description="which instances are restarted, one by one", extra={"group": "rotate", "positional": True}),
    ] = "all"
    url: Annotated[str, Meta(description="a router of the cluster, which knows its instances")] = (
        "http://127.0.0.1:8000"
    )
    registry: Annotated[
        str, Meta(description="redis://…, rediss://… or unix:///…: ask the registry for instances, not a router")
    ] = ""
    timeout_s: Annotated[
        float, Meta(description="longest time for one instance to drain, restart and serve again", gt=0)
    ] = 900.0
    cluster_key_file: Annotated[str | None, Meta(description=_KEY_TEXT)] = None
