"""`baton drain`: one instance, and waits until nothing runs there. What Kubernetes calls before it ends a pod."""

import asyncio
import sys
import time
from collections.abc import Sequence

import httpx

from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError, RemoteError
from baton_serve.services.common.settings.configuration import load_settings, stop
from baton_serve.services.rotate.admin_client import TIMEOUT_S, AdminRequestError, InstanceAdmin
from baton_serve.services.rotate.settings import DrainSettings

PROGRAM = "baton drain"
_POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """0 when it is drained (or gone), 1 when it did not answer, refused or took too long."""
    settings = load_settings(
        DrainSettings,
        argv,
        prefix="BATON__DRAIN__",
        program=PROGRAM,
        description="Takes an instance out of service: no new work, what runs ends or is handed over.",
    )
    try:
        asyncio.run(drain(settings))
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))
    except RemoteError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    return 0


async def drain(settings: DrainSettings) -> None:
    """Raises `AdminRequestError`."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        instances = InstanceAdmin(client, read_cluster_key(settings.cluster_key_file))
        deadline = time.monotonic() + settings.timeout_s
        await instances.drain(settings.address, exit_afterwards=settings.exit)
        while (state := await instances.state(settings.address)) is not None and state.status == "draining":
            if time.monotonic() > deadline:
                raise AdminRequestError(f"{state.requests} requests still run there after {settings.timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
