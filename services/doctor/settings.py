"""Settings of `baton doctor`."""

from typing import Annotated

import msgspec
from msgspec import Meta


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `baton doctor`: which checks run, and how the result is printed."""

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
    kernels: Annotated[
        bool,
        Meta(
            description="prove the kernels of the engine alone, with the shapes of MODEL, and print a table of all"
            " operations: whether each implementation is right, its difference from plain torch, and its time"
        ),
    ] = False
    model: Annotated[
        str, Meta(description="with --kernels: a folder with a config.json", extra={"positional": True})
    ] = ""
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
        if self.model and not self.kernels:
            raise ValueError("a model is proved with --kernels only: baton doctor --kernels MODEL")
        if self.kernels and self.report:
            raise ValueError("--report proves kernels too: leave out --kernels")
        if self.report and (self.json or self.registry or self.peer):
            raise ValueError("--report is a text without addresses: leave out --json, --registry and --peer")
