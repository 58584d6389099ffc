"""Router, prefill and decode in one process, on real sockets: the whole path without the seconds that imports cost."""

import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from services.common.lifecycle import Lifecycle
from services.decode.handler import DecodeHandler
from services.instance.process import InstanceProcess, Parts
from services.instance.serving import RoleHandler
from services.instance.settings import InstanceSettings
from services.prefill.handler import PrefillHandler
from services.router import main as router
from services.router.settings import RouterSettings
from tests.e2e.cluster import free_port

BLOCK = 16


def _prefill(parts: Parts) -> RoleHandler:
    return PrefillHandler(parts.engine, parts.transfer, counter=parts.counter, clock=time.monotonic)


def _decode(parts: Parts) -> RoleHandler:
    return DecodeHandler(
        parts.engine, parts.transfer, parts.router, counter=parts.counter, fallback="fail", max_waiting=16
    )


@asynccontextmanager
async def served(model: Path, *, transport: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router with one prefill and one decode instance, float32, every prompt handed off in chunks."""
    lifecycle = Lifecycle()
    registry = f"memory://127.0.0.1:{free_port()}"
    port = free_port()
    before = sys.getswitchinterval(), torch.get_num_threads()
    try:
        await router.start(
            RouterSettings(model=str(model), port=port, registry=registry, disaggregation_min_tokens=0), lifecycle
        )
        prefill = InstanceProcess(instance_settings(model, registry, "prefill-0", transport), "prefill", _prefill)
        decode = InstanceProcess(instance_settings(model, registry, "decode-0", transport), "decode", _decode)
        await prefill.start(lifecycle)
        await decode.start(lifecycle)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
            yield client
    finally:
        await lifecycle.stop_all()
        sys.setswitchinterval(before[0])
        torch.set_num_threads(before[1])
        gc.unfreeze()


def instance_settings(model: Path, registry: str, instance: str, transport: Any) -> InstanceSettings:
    return InstanceSettings(
        model=str(model),
        instance_id=instance,
        registry=registry,
        device="cpu",
        dtype="float32",
        threads=1,
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=4 << 20,
        kv_transport=transport,
    )
