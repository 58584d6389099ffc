"""`baton rotate`: the whole wiring."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

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
ROLES: tuple[Role, ...] = ("prefill", "decode", "unified")


def main(argv: Sequence[str]) -> int:
    """0 when all are replaced, 1 when one was not."""
    settings = load_settings(
        RotateSettings,
        argv,
        prefix="BATON__ROTATE__",
        program=PROGRAM,
        description="Restarts the instances of a pool one by one, without a failed request.",
    )
    try:
        count = asyncio.run(rotate(settings))
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))
    except RemoteError as exc:
        sys.stderr.write(f"{PROGRAM}: {exc}\n")
        return 1
    say(f"{count} instances have been replaced")
    return 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def rotate(settings: RotateSettings) -> int:
    roles = ROLES if settings.pool == "all" else (settings.pool,)
    key = read_cluster_key(settings.cluster_key_file)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S, verify=False))
        source = await _source(settings, client, stack)
        rotation = Rotation(source, InstanceAdmin(client, key), timeout_s=settings.timeout_s, say=say)
        return await rotation.run(roles)


async def _source(settings: RotateSettings, client: httpx.AsyncClient, stack: AsyncExitStack) -> InstanceSource:
    if not settings.registry:
        return RouterSource(client, settings.url)
    if settings.registry.startswith("memory:"):
        raise ConfigurationError("--registry memory://… lives inside a router: ask that with --url")
    view = registry_view(settings.registry)
    await view.start(lambda: None)
    stack.push_async_callback(view.close)
    return RegistrySource(view)
