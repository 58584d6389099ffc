"""Entry point of `baton serve`: completes its settings, creates a cluster key, starts a router and instances, and
supervises them.
"""

import fcntl
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, get_args

import msgspec

from baton_serve.contracts.instance import Role
from baton_serve.contracts.model_path import is_lone_gguf, model_folder
from baton_serve.engine.config import RunnerType, Task
from baton_serve.engine.errors import EngineError
from baton_serve.engine.loading.native.dense_config import read_folder
from baton_serve.engine.pooling.model_kind import ModelKind, detect_model_kind
from baton_serve.model_hub import is_hub_name
from baton_serve.services.common.cpus.topology import this_host
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.http.listener import bind_tcp, reachable_url
from baton_serve.services.common.local_model import local_model, names_of_model
from baton_serve.services.common.logs import configure_logs
from baton_serve.services.common.process_lifecycle import Lifecycle, run
from baton_serve.services.common.settings.configuration import environment, load_with, log_notes, stop
from baton_serve.services.common.settings.options import Option
from baton_serve.services.common.settings.vllm_variables import without_vllm
from baton_serve.services.common.version import VERSION
from baton_serve.services.local.accelerators import can_torch_use_accelerators, device_indexes
from baton_serve.services.local.child import Console
from baton_serve.services.local.cluster_supervisor import MODULE, ClusterSupervisor, ClusterTimeouts
from baton_serve.services.local.launches import ForkLauncher, ProgramLauncher
from baton_serve.services.local.plan import (
    MANAGED_INSTANCE_OPTIONS,
    MANAGED_ROUTER_OPTIONS,
    GivenOptions,
    Machine,
    plan,
)
from baton_serve.services.local.pools import with_pools
from baton_serve.services.local.settings import DEMO_MODEL, DEMO_NAME, ServeSettings

PROGRAM = "baton serve"


class _KindOptions(TypedDict):
    """The settings by which a user states what the model computes, as `detect_model_kind` takes them."""

    runner: RunnerType
    task: Task


def main(argv: Sequence[str], *, router: Sequence[Option], instance: Sequence[Option]) -> int:
    """Run `baton serve` until a signal comes and return the exit status. `router` and `instance` are the options of
    those processes; the command line accepts them too and passes them on.
    """
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
        description="Serve a model on this machine: start a router and instances, and restart a process that dies.",
    )
    given = GivenOptions(loaded.others, loaded.sections, own_router, own_instance)
    configure_logs(level="warning", format="text")
    log_notes(loaded.notes, str(given.values.get("log_level", "info")))
    try:
        settings = _complete(loaded.settings, given, environ)
        _check_transport(settings, str(given.values.get("kv_transport", "auto")))
        names = _names(loaded.settings, given)
        machine = _machine(str(given.values.get("device", "auto")), environ)
        registry = f"memory:///@baton-{secrets.token_hex(8)}"
        processes = plan(settings, given, machine, names=names, registry=registry)
    except ConfigurationError as exc:
        stop(PROGRAM, str(exc))

    url = reachable_url(settings.host, settings.port, is_tls=bool(given.values.get("ssl_certfile")))
    # A process's name before a line would break JSON; the records name their process themselves.
    is_named = given.values.get("log_format") != "json"
    console = Console(sys.stderr, [process.name for process in processes], is_named=is_named)

    # Accelerator runtimes may not survive a fork, so instances start as programs there (`launches`).
    forks = (
        None
        if machine.device_indexes
        else ForkLauncher(MODULE, ProgramLauncher(MODULE), modules_to_fork(settings.model))
    )

    async def start(lifecycle: Lifecycle) -> None:
        supervisor = ClusterSupervisor(
            processes,
            console=console,
            url=url,
            # The processes get as flags what vLLM's variables say.
            environ=without_vllm(environ),
            forks=forks,
            timeouts=ClusterTimeouts(start_s=settings.start_timeout_s, drain_s=_drain_timeout_s(given)),
        )
        lifecycle.on_stop("processes", supervisor.stop, deadline_s=supervisor.stop_s + 10.0)
        # Register `stop` before `start`: if the start fails halfway, the processes that run must still be ended.
        supervisor.start()
        await supervisor.wait_ready(settings.start_timeout_s)
        sys.stdout.write(_banner(settings, given, names, url))
        sys.stdout.flush()

    return run(start, program=PROGRAM)


def _drain_timeout_s(given: GivenOptions) -> float:
    """Return the longest time in seconds that any instance gives its running requests when the cluster stops, by the
    options `given`.
    """
    defaults = [option.default for option in given.instance if option.name == "drain_timeout_s"]
    common = given.values.get("drain_timeout_s", *defaults)
    own = [section["drain_timeout_s"] for section in given.sections.values() if "drain_timeout_s" in section]
    return max(float(str(value)) for value in (common, *own))


def _check_transport(settings: ServeSettings, transport: str) -> None:
    """Raise `ConfigurationError` if `transport`, the value of `--kv-transport`, cannot connect instances in different
    processes and there are prefill or decode instances.
    """
    if transport == "memory" and (settings.prefill or settings.decode):
        raise ConfigurationError(
            "--kv-transport memory works only within one process, but each instance is a process: use auto, usm, zeromq"
            " or oneccl, or use --prefill 0 --decode 0 --unified 1, which needs no handoff"
        )


def _complete(settings: ServeSettings, given: GivenOptions, environ: Mapping[str, str]) -> ServeSettings:
    """Return the settings of `baton serve` with the model's folder, numbers of instances that fit the model, and the
    actual port.

    Raises `ConfigurationError` if the model is missing, if the instances cannot serve it, or if the port is in use.
    """
    if settings.model:
        source = settings.source(settings.model)
        if "tokenizer" in given.values:
            source = replace(source, tokenizer_revision=None)
        settings = msgspec.structs.replace(settings, model=local_model(source, environ))
    folder = model_folder(settings.model) if settings.model else DEMO_MODEL
    if not (folder / "config.json").is_file():
        if not settings.model:
            raise ConfigurationError(f"this installation lacks the bundled demo model ({folder}): name a MODEL")
        what = "has no config.json" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise ConfigurationError(
            f"MODEL {settings.model} {what}: give the folder of a Hugging Face model, a GGUF file, or ORG/NAME"
        )
    # Binding finds a port that is in use before anything is started, and chooses a free one for `--port 0`.
    with bind_tcp(settings.host, settings.port) as probe:
        port = probe.getsockname()[1]
    settings = msgspec.structs.replace(settings, model=settings.model or str(folder), port=port)
    return with_pools(settings, _kind(folder, given))


def _kind(folder: Path, given: GivenOptions) -> ModelKind:
    """Return what the model in `folder` computes, such as `generate` or `embed`. Raises `ConfigurationError` if that
    cannot be found, or contradicts the given options.
    """
    stated = {name: str(given.values.get(name, "auto")) for name in ("runner", "task")}
    try:
        return detect_model_kind(folder, **msgspec.convert(stated, _KindOptions))
    except EngineError as exc:
        raise ConfigurationError(str(exc)) from exc


def _names(settings: ServeSettings, given: GivenOptions) -> list[str]:
    """Return the names under which requests find the model. If the list is empty, each process uses its default."""
    chosen = given.values.get("served_model_name")
    if isinstance(chosen, list) and chosen:
        return [str(name) for name in chosen]
    if is_lone_gguf(settings.model) or is_hub_name(settings.model):
        return [settings.model]
    if settings.model and settings.source(settings.model).changes:
        return names_of_model(settings.model)
    return [] if settings.model else [DEMO_NAME]


def modules_to_fork(model: str) -> list[str]:
    """Return the modules that the fork server should import for this model, beside the engine.

    A model that the engine loads natively needs none. Others need transformers and its module for the model's type.
    """
    folder = model_folder(model)
    # transformers takes almost a second, which the native loader saves.
    if read_folder(folder) is not None:
        return []
    try:
        kind = json.loads((folder / "config.json").read_text())["model_type"].replace("-", "_")
    except (OSError, ValueError, KeyError, AttributeError):
        return ["baton_serve.engine.loading.transformers_loader"]
    return ["baton_serve.engine.loading.transformers_loader", f"transformers.models.{kind}.modeling_{kind}"]


def _machine(device: str, environ: dict[str, str]) -> Machine:
    indexes = device_indexes(device, environ) if can_torch_use_accelerators() else []
    # A memfd is freed when this process exits, even after a crash; instances open it by this path.
    turns = f"/proc/{os.getpid()}/fd/{os.memfd_create('baton-core-turns')}"
    return Machine(host=this_host(), device_indexes=indexes, core_turns=turns, cluster_key=new_key_file())


def new_key_file() -> str:
    """Write a new random cluster key into a memfd (anonymous file) and return its path, for `--cluster-key-file`.

    Only this user and root may open a path under /proc/PID/fd. The file exists until this process exits.
    """
    descriptor = os.memfd_create("baton-cluster-key", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o400)
    os.write(descriptor, secrets.token_hex(32).encode())
    # The seals keep the key constant: a process of this user that opens it cannot change it.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


# `services.local.serve_process` reads the URL from this banner, and takes "stop with" for its last line.
def _banner(settings: ServeSettings, given: GivenOptions, names: list[str], url: str) -> str:
    pools = {role: getattr(settings, role) for role in get_args(Role)}
    lines = {
        "url": f"{url}/v1",
        "page": f"{url}/",
        "model": f"{names[0]} ({settings.model})" if names else settings.model,
        "pools": ", ".join(f"{count} {role}" for role, count in pools.items() if count),
        "transport": str(given.values.get("kv_transport", "auto")),
        "stop with": "Ctrl-C",
    }
    width = max(map(len, lines))
    body = "".join(f"  {key:<{width}}  {value}\n" for key, value in lines.items())
    return f"\nBaton {VERSION} serves\n{body}\n"
