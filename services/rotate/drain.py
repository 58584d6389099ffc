"""Entry point of `baton drain`: drains one instance and waits until no request runs there.

Kubernetes runs it as preStop hook before it ends a pod.
"""

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
"""Time between two looks at the instance's /health."""


def main(argv: Sequence[str]) -> int:
    """Run `baton drain` with these arguments. Return the exit status: 0 if the instance is drained or gone, 1 if it
    refused or took too long.
    """
    settings = load_settings(
        DrainSettings,
        argv,
        prefix="BATON__DRAIN__",
        program=PROGRAM,
        description="Take one instance out of service: it refuses new requests, and running requests finish there or "
        "are continued by other instances.",
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
    """Drain the instance that `settings` name, and wait until no request runs there.

    Raises `AdminRequestError` if it does not answer, refuses, or has not finished after `timeout_s` seconds.
    """
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        # Without a key the instance accepts only requests of its own user and root on the same machine.
        instances = InstanceAdmin(client, read_cluster_key(settings.cluster_key_file))
        deadline = time.monotonic() + settings.timeout_s
        await instances.drain(settings.address, exit_afterwards=settings.exit)
        # With `exit` the process may be gone before this sees it idle; None ends the loop as well.
        while (state := await instances.state(settings.address)) is not None and state.status == "draining":
            if time.monotonic() > deadline:
                raise AdminRequestError(
                    f"{state.requests} requests still run on {settings.address} after {settings.timeout_s:g} s "
                    "(--timeout-s); it goes on draining"
                )
            await asyncio.sleep(_POLL_S)
