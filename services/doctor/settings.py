"""Settings of `baton doctor`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which checks run, and how the result is printed."""

    json: Annotated[bool, Meta(description="print the findings as one JSON object", extra={"group": "checks"})] = False
    registry: Annotated[
        str, Meta(description="check this registry: redis://…, rediss://…, unix:///… or memory://HOST:PORT")
    ] = ""
    peer: Annotated[
        list[str], Meta(description="check that these routers and instances accept connections, each as HOST:PORT")
    ] = []
    device: Annotated[bool, Meta(description="test the accelerators (in a child process that loads torch)")] = True
    probe: Annotated[
        bool,
        Meta(description="test every KV transport: send known bytes between two child processes and compare them"),
    ] = False
    probe_timeout_s: Annotated[
        float, Meta(description="longest time of the accelerator test, and of each transport's test", gt=0)
    ] = 120.0
