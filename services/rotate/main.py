"""Entry point of `baton rotate`: restarts the instances of a pool one after the other."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import get_args

import httpx

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cluster_key import read_cluster_key
from baton_serve.services.common.errors import ConfigurationError, RemoteError
from baton_serve.services.common.registry import registry_view
from baton_serve.services.common.settings.configuration import load_settings, stop
from baton_serve.services.rotate.admin_client import (
    TIMEOUT_S,
    InstanceAdmin,
    InstanceSource,
    RegistrySource,
    RouterSource,
)
from baton_serve.services.rotate.rotation import Rotation
from baton_serve.services.rotate.settings import RotateSettings

PROGRAM = "baton rotate"
ROLES: tuple[Role, ...] = get_args(Role)


def main(argv: Sequence[str]) -> int:
    """Run `baton rotate` with these arguments: restart the instances of a pool. Return the exit status: 0 if all were
    replaced, 1 if at least one was not.
    """
    settings = load_settings(
        RotateSettings,
        argv,
        prefix="BATON__ROTATE__",
        program=PROGRAM,
        description="Restart the instances of a pool one by one, without failed requests. Each instance is drained and "
        "exits; `baton serve`, Kubernetes or systemd must start it again.",
    )
    try:
        count = asyncio.run(rotate(settings))
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))
    except RemoteError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    say(f"{count} instances were replaced")
    return 0


def say(text: str) -> None:
    """Print one line to standard output immediately: a rotation takes minutes, and its output may go to a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def rotate(settings: RotateSettings) -> int:
    """Restart the instances of the pools that `settings` name, one by one, and return how many were replaced. Raises
    `RemoteError` at the first instance that could not be replaced.
    """
    roles = ROLES if settings.pool == "all" else (settings.pool,)
    key = read_cluster_key(settings.cluster_key_file)
    async with AsyncExitStack() as stack:
        # --url is often an address that the certificate does not name, so it is checked only if a secret is sent there.
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=TIMEOUT_S, verify=settings.api_key is not None)
        )
        source = await _source(settings, client, stack)
        rotation = Rotation(source, InstanceAdmin(client, key), timeout_s=settings.timeout_s, say=say)
        return await rotation.run(roles)


async def _source(settings: RotateSettings, client: httpx.AsyncClient, stack: AsyncExitStack) -> InstanceSource:
    if not settings.registry:
        return RouterSource(client, settings.url, settings.api_key)
    if settings.registry.startswith("memory:"):
        raise ConfigurationError("--registry memory://… is part of a router: leave it out and give the router as --url")
    view = registry_view(settings.registry)
    # `Rotation` polls the records, so the callback for changes does nothing.
    await view.start(lambda: None)
    stack.push_async_callback(view.close)
    return RegistrySource(view)
