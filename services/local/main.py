"""`baton serve`: a router and instances on this machine, in one terminal. The whole wiring of the process."""

import fcntl
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import msgspec

from baton_serve.contracts.model_path import model_folder
from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.errors import EngineError
from baton_serve.engine.loading.native.config import read_folder
from baton_serve.engine.pooling.kind import ModelKind, detect_model_kind
from baton_serve.services.common.cpus.topology import this_host
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.listening import bind_tcp
from baton_serve.services.common.lifecycle import Lifecycle, run
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.settings.configuration import environment, load_with, stop
from baton_serve.services.common.settings.options import Option
from baton_serve.services.common.version import VERSION
from baton_serve.services.local.accelerators import can_torch_use_accelerators, device_indexes
from baton_serve.services.local.child import Console
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher
from baton_serve.services.local.model_cache import find_snapshot, is_hub_name, is_lone_gguf, unpack_gguf
from baton_serve.services.local.plan import (
    MANAGED_INSTANCE_OPTIONS,
    MANAGED_ROUTER_OPTIONS,
    GivenOptions,
    Machine,
    plan,
)
from baton_serve.services.local.settings import DEMO_MODEL, DEMO_NAME, ServeSettings
from baton_serve.services.local.supervisor import MODULE, STOP_DEADLINE_S, Supervisor

PROGRAM = "baton serve"


class _Stated(TypedDict):
    runner: RunnerType
    task: Task


_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "*": "127.0.0.1"}


def main(argv: Sequence[str], *, router: Sequence[Option], instance: Sequence[Option]) -> int:
    """`router` and `instance` are the options of those processes. Returns the exit status."""
    own_router = [option for option in router if option.name not in MANAGED_ROUTER_OPTIONS]
    own_instance = [option for option in instance if option.name not in MANAGED_INSTANCE_OPTIONS]
    environ = environment()
    loaded = load_with(
        ServeSettings,
        [*own_instance, *own_router],
        argv,
        environ,
        prefix="BATON__SERVE__",
        program=PROGRAM,
        description="Serves a model on this machine: starts a router and instances and keeps them running.",
    )
    given = GivenOptions(loaded.others, loaded.sections, own_router, own_instance)
    configure_logs(level="warning", format="text")
    try:
        settings = _complete(loaded.settings, given, environ)
        _check_transport(settings, str(given.values.get("kv_transport", "auto")))
        names = _names(loaded.settings, given)
        machine = _machine(str(given.values.get("device", "auto")), environ)
        registry = f"memory:///@baton-{secrets.token_hex(8)}"
        processes = plan(settings, given, machine, names=names, registry=registry)
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))

    scheme = "https" if given.values.get("ssl_certfile") else "http"
    url = f"{scheme}://{_reachable(settings.host)}:{settings.port}"
    is_named = given.values.get("log_format") != "json"
    console = Console(sys.stderr, [process.name for process in processes], is_named=is_named)

    forks = (
        None
        if machine.device_indexes
        else ForkLauncher(MODULE, ProgramLauncher(MODULE), _model_code(Path(settings.model)))
    )

    async def start(lifecycle: Lifecycle) -> None:
        supervisor = Supervisor(processes, console=console, url=url, environ=environ, forks=forks)
        lifecycle.on_stop("processes", supervisor.stop, deadline_s=STOP_DEADLINE_S + 10.0)
        supervisor.start()
        await supervisor.wait_ready(settings.start_timeout_s)
        sys.stdout.write(_banner(settings, given, names, url))
        sys.stdout.flush()

    return run(start, program=PROGRAM)


def _check_transport(settings: ServeSettings, transport: str) -> None:
    """Raises `ConfigurationError` for one by which these instances could not hand anything off."""
    if transport == "memory" and (settings.prefill or settings.decode):
        raise ConfigurationError(
            "--kv-transport memory joins instances of one process, and every instance is a process of its own:"
            " take auto, usm, zeromq or oneccl, or --prefill 0 --decode 0 --unified 1, which hands nothing off"
        )


def _complete(settings: ServeSettings, given: GivenOptions, environ: Mapping[str, str]) -> ServeSettings:
    """With the model's folder, pools that suit it, and the real port. Raises `ConfigurationError`."""
    if is_hub_name(name := settings.model):
        settings = msgspec.structs.replace(settings, model=str(_downloaded(name, environ)))
    folder = model_folder(settings.model) if settings.model else DEMO_MODEL
    if is_lone_gguf(settings.model):
        settings = msgspec.structs.replace(settings, model=unpack_gguf(Path(settings.model), environ))
        folder = model_folder(settings.model)
    if not (folder / "config.json").is_file():
        if not settings.model:
            raise ConfigurationError(f"the bundled demo model is not in this installation ({folder}); name a MODEL")
        what = "has no config.json" if folder.is_dir() else "is no folder"
        raise ConfigurationError(f"MODEL {settings.model} {what}: give the folder of a Hugging Face model")
    with bind_tcp(settings.host, settings.port) as probe:
        port = probe.getsockname()[1]
    settings = msgspec.structs.replace(settings, model=settings.model or str(folder), port=port)
    return with_pools(settings, _kind(folder, given))


def _downloaded(name: str, environ: Mapping[str, str]) -> Path:
    if (folder := find_snapshot(name, environ)) is None:
        raise ConfigurationError(
            f"MODEL {name} is no folder, and not in the cache of the Hugging Face hub either. Baton fetches no models:"
            f" `hf download {name}`, then start again"
        )
    return folder


def with_pools(settings: ServeSettings, kind: ModelKind) -> ServeSettings:
    """No decode instances for a model that answers with vectors. Raises `ConfigurationError` for pools that cannot
    serve."""
    if kind != "generate":
        if not settings.prefill and not settings.unified:
            raise ConfigurationError("--prefill 0 needs --unified 1 or more: else no instance could compute a vector")
        return msgspec.structs.replace(settings, decode=0)
    if not settings.decode and not settings.unified:
        raise ConfigurationError("--decode 0 needs --unified 1 or more: else no instance could write an answer")
    return settings


def _kind(folder: Path, given: GivenOptions) -> ModelKind:
    """What the model is for. Raises `ConfigurationError`."""
    stated = {name: str(given.values.get(name, "auto")) for name in ("runner", "task")}
    try:
        return detect_model_kind(folder, **msgspec.convert(stated, _Stated))
    except EngineError as exc:
        raise ConfigurationError(str(exc)) from exc


def _names(settings: ServeSettings, given: GivenOptions) -> list[str]:
    """Under which the model is served; empty leaves it to the processes."""
    chosen = given.values.get("served_model_name")
    if isinstance(chosen, list) and chosen:
        return [str(name) for name in chosen]
    if is_lone_gguf(settings.model) or is_hub_name(settings.model):
        return [settings.model]
    return [] if settings.model else [DEMO_NAME]


def _model_code(folder: Path) -> list[str]:
    """What reads the model, where that is not the engine itself: transformers, and the module of it in which the
    model's layers usually are."""
    if read_folder(folder) is not None:
        return []
    try:
        kind = json.loads((folder / "config.json").read_text())["model_type"].replace("-", "_")
    except (OSError, ValueError, KeyError, AttributeError):
        return ["baton_serve.engine.loading.model_loader"]
    return ["baton_serve.engine.loading.model_loader", f"transformers.models.{kind}.modeling_{kind}"]


def _machine(device: str, environ: dict[str, str]) -> Machine:
    indexes = device_indexes(device, environ) if can_torch_use_accelerators() else []
    # Memory that is gone when this process is; its instances find it by this name.
    turns = f"/proc/{os.getpid()}/fd/{os.memfd_create('baton-core-turns')}"
    return Machine(host=this_host(), device_indexes=indexes, core_turns=turns, cluster_key=new_key_file())


def new_key_file() -> str:
    """A file with a new cluster key, as `--cluster-key-file` takes it. The kernel lets only this user and root open
    what another process has open; the file is gone when this process is."""
    descriptor = os.memfd_create("baton-cluster-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o400)
    os.write(descriptor, secrets.token_hex(32).encode())
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _reachable(host: str) -> str:
    return _WILDCARDS.get(host, f"[{host}]" if ":" in host else host)


def _banner(settings: ServeSettings, given: GivenOptions, names: list[str], url: str) -> str:
    pools = {"prefill": settings.prefill, "decode": settings.decode, "unified": settings.unified}
    lines = {
        "url": f"{url}/v1",
        "model": f"{names[0]} ({settings.model})" if names else settings.model,
        "pools": ", ".join(f"{count} {role}" for role, count in pools.items() if count),
        "transport": str(given.values.get("kv_transport", "auto")),
        "stop with": "Ctrl-C",
    }
    width = max(map(len, lines))
    body = "".join(f"  {key:<{width}}  {value}\n" for key, value in lines.items())
    return f"\nBaton {VERSION} serves\n{body}\n"
