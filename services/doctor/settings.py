"""Settings of `baton doctor`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True):
    json: Annotated[bool, Meta(description="print one JSON object", extra={"group": "checks"})] = False
    registry: Annotated[str, Meta(description="registry to reach: redis://…, rediss://… or unix:///…")] = ""
    peer: Annotated[list[str], Meta(description="HOST:PORT of routers and instances to reach")] = []
    device: Annotated[bool, Meta(description="load torch and try the accelerators, in a process of its own")] = True
    probe: Annotated[
        bool, Meta(description="send known bytes over every transport, between two processes of this machine")
    ] = False
    probe_timeout_s: Annotated[
        float, Meta(description="longest time for the accelerators' answer, and for each end of a probe", gt=0)
    ] = 120.0
