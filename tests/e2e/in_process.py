"""Router, prefill and decode in one process, on real sockets: the whole path without the seconds that imports cost."""

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import torch

from baton_serve.bench.ports import free_port
from baton_serve.contracts.instance import Role
from baton_serve.services.common.process_lifecycle import Lifecycle
from baton_serve.services.decode.block_queue import BlockQueue
from baton_serve.services.decode.handler import DecodeHandler
from baton_serve.services.instance.instance_process import InstanceProcess, no_handler
from baton_serve.services.instance.request_server import RoleHandler
from baton_serve.services.instance.role_interface import RoleDependencies
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.prefill.handler import prefill_handler
from baton_serve.services.router import main as router
from baton_serve.services.router.settings import RouterSettings
from baton_serve.services.unified.main import UnifiedHandler
from tests.devices import DEVICE
from tests.e2e.cluster import Api

BLOCK = 16

Wrap = Callable[[Role, RoleHandler], RoleHandler]


def _decode(parts: RoleDependencies) -> RoleHandler:
    return DecodeHandler(
        parts.engine,
        parts.transfer,
        parts.router,
        parts.puller,
        counter=parts.counter,
        fallback="fail",
        block_queue=BlockQueue(parts.engine, max_waiting=16),
    )


def _unified(parts: RoleDependencies) -> RoleHandler:
    return UnifiedHandler(parts.engine, parts.puller, parts.images)


_HANDLERS: dict[Role, Callable[[RoleDependencies], RoleHandler]] = {
    "prefill": prefill_handler,
    "decode": _decode,
    "unified": _unified,
    "encode": no_handler,
}


def _handler(wrap: Wrap, role: Role, parts: RoleDependencies) -> RoleHandler:
    return wrap(role, _HANDLERS[role](parts))


def _unchanged(role: Role, handler: RoleHandler) -> RoleHandler:
    return handler


@asynccontextmanager
async def served(
    model: Path,
    *,
    transport: str,
    roles: Sequence[Role] = ("prefill", "decode"),
    wrap: Wrap = _unchanged,
    instance: Mapping[str, Any] = MappingProxyType({}),
    decode: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router with an instance of each of `roles`, float32, every prompt handed off in chunks. `settings`
    are the router's, `instance` those of instances, over which `decode` goes for those of that role; `wrap` may put
    something around what these do with requests."""
    # The router's, which is there for all, and those of instances.
    of_router, lifecycles = Lifecycle(), [Lifecycle() for _ in roles]
    registry = f"memory://127.0.0.1:{free_port()}"
    port = free_port()
    before = sys.getswitchinterval(), torch.get_num_threads()
    patch = pytest.MonkeyPatch()
    # All tests share this process: what it freezes or never collects would stay for the tests that follow.
    patch.setattr(gc, "collect", lambda: 0)
    patch.setattr(gc, "freeze", lambda: None)
    try:
        await router.start(
            RouterSettings(model=str(model), port=port, registry=registry, disaggregation_min_tokens=0, **settings),
            of_router,
        )
        for number, (role, lifecycle) in enumerate(zip(roles, lifecycles, strict=True)):
            name = f"{role}-{roles[:number].count(role)}"
            values = {**instance, **(decode if role == "decode" else {})}
            own = instance_settings(model, registry, name, transport, **values)
            await InstanceProcess(own, role, partial(_handler, wrap, role)).start(lifecycle)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            yield client
    finally:
        await asyncio.gather(*(lifecycle.stop_all() for lifecycle in lifecycles))
        await of_router.stop_all()
        sys.setswitchinterval(before[0])
        torch.set_num_threads(before[1])
        patch.undo()


@contextmanager
def in_background(model: Path, **settings: Any) -> Iterator[Api]:
    """`served` on a thread of its own, for many tests that wait for their answers."""
    ended = threading.Event()
    address: list[str] = []
    ready = threading.Event()
    failures: list[BaseException] = []

    async def serve() -> None:
        async with served(model, transport="usm", **settings) as client:
            num_roles = len(settings.get("roles", ("prefill", "decode")))
            while sum((await client.get("/health")).json()["pools"].values()) < num_roles:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            address.append(str(client.base_url))
            ready.set()
            await asyncio.to_thread(ended.wait)

    def live() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=live)
    thread.start()
    ready.wait(60)
    try:
        if failures:
            raise failures[0]
        with Api(address[0]) as api:
            yield api
    finally:
        ended.set()
        thread.join(30)


def instance_settings(model: Path, registry: str, instance: str, transport: Any, **more: Any) -> InstanceSettings:
    values: dict[str, Any] = {
        "model": str(model),
        "instance_id": instance,
        "registry": registry,
        "device": DEVICE,
        "dtype": "float32",
        "threads": 1,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 16 << 20,
        "kv_transport": transport,
    }
    return InstanceSettings(**(values | more))
