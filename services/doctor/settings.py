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
        Meta(
            description="also test every KV transport, with known bytes between two child processes, and the kernels"
            " of the engine, against plain torch"
        ),
    ] = False
    report: Annotated[
        bool,
        Meta(
            description="test as --probe does, and print one text for an issue: versions of kernel, drivers and"
            " packages, devices and findings, without host names, user names and paths of the user"
        ),
    ] = False
    probe_timeout_s: Annotated[
        float,
        Meta(description="longest time of the accelerator test, of each transport's test, and of all kernels", gt=0),
    ] = 120.0

    def __post_init__(self) -> None:
        if self.report and (self.json or self.registry or self.peer):
            raise ValueError("--report is a text without addresses: leave out --json, --registry and --peer")
