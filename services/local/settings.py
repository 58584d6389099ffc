"""Settings of `baton serve` itself. All options of the router and of instances are taken too, and forwarded."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEMO_NAME = "baton-demo"

Count = Annotated[int, Meta(ge=0, le=1024)]


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str,
        Meta(
            description="folder of a Hugging Face model (default: the bundled demo model)",
            extra={"group": "cluster", "positional": True},
        ),
    ] = ""
    prefill: Annotated[Count, Meta(description="instances that read prompts")] = 1
    decode: Annotated[Count, Meta(description="instances that write answers (none for a model without any)")] = 1
    unified: Annotated[Count, Meta(description="instances that do both")] = 0
    host: Annotated[str, Meta(description="address that the router listens on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(description="port that the router listens on; 0 takes a free one", ge=0, le=65535)] = 8000
    threads: Annotated[
        int | None, Meta(description="CPU threads of each instance (default: the cores, divided among them)", ge=1)
    ] = None
    start_timeout_s: Annotated[float, Meta(description="longest time until all instances are ready", gt=0)] = 1800.0
