"""Decides which processes a local cluster has, with their flags, devices, CPU cores and ports; numbers: `pools.py`.

It is pure: it reads neither files nor the environment.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cpus.allocation import CpuAllocation, HostCpus, allocate_cpus
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.settings.configuration import to_argv
from baton_serve.services.common.settings.options import Option, Value
from baton_serve.services.local.settings import DEMO_MODEL, ServeSettings

# The ports are among them: instances on one machine take free ports, or Unix sockets.
MANAGED_INSTANCE_OPTIONS = frozenset(
    "model instance_id device_index host advertise_host rpc_port rpc_socket transfer_port events_port http_port"
    " registry registry_ttl_s threads nnodes node_rank master_addr master_port node_wait_s".split()
)
"""Options of instances that `baton serve` sets itself, or that need several hosts. They are not accepted on its command
line."""
MANAGED_ROUTER_OPTIONS = frozenset("model host port registry".split())
"""Options of the router that `baton serve` sets itself or has itself."""

DEMO_OPTIONS: Mapping[str, Value] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
"""Options of the router for the bundled demo model, which was trained to call tools in this format."""

GPU_MEMORY_UTILIZATION = 0.9
"""Fraction of a device's memory that the instances on it use together."""
PARALLEL_OPTIONS = ("tensor_parallel_size", "pipeline_parallel_size")
"""Options whose product is the number of devices of an instance."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process that `baton serve` starts. `argv` are its arguments and begin with the role.

    `variables` are added to its environment. Secrets are passed there, because every user can read command lines.
    """

    name: str
    argv: list[str]
    variables: Mapping[str, str]
    device: str = ""
    """Name of the accelerator that it uses, such as `device 1`; empty for a process on the CPU."""


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """Options that the user of `baton serve` has given for the router and for instances.

    `values` come from flags, variables and the configuration file, by name. `sections` come from the file's sections
    for one role. `router` and `instance` list the options that each kind of process knows.
    """

    values: Mapping[str, Value]
    sections: Mapping[str, Mapping[str, object]]
    router: Sequence[Option]
    instance: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine that `baton serve` divides among its instances."""

    host: HostCpus
    device_indexes: list[int]
    """Accelerators; empty on a CPU machine. An instance uses several of them if it is divided."""
    core_turns: str
    """Path of the shared memory through which instances take turns on the same cores."""
    cluster_key: str
    """Path of a file with a new cluster key, which only this user can read."""


def plan(
    settings: ServeSettings, given: GivenOptions, machine: Machine, *, names: list[str], registry: str
) -> list[Process]:
    """Return the processes that `baton serve` starts, the router first.

    `settings.port` must be the actual port. `names` are the names under which the model is served, and `registry` is
    the URL of the registry. Raises `ConfigurationError` if an instance needs more devices than there are.
    """
    common: dict[str, Value] = {"model": settings.model, "registry": registry, "served_model_name": names}
    # The router obtains the models of --models and --tokenizer itself.
    common |= {"cluster_key_file": machine.cluster_key, "offline": settings.offline or None}
    of_router = {
        "host": settings.host,
        "port": settings.port,
        "download_dir": settings.download_dir,
        "hf_token": settings.hf_token,
        "tokenizer_revision": settings.tokenizer_revision if "tokenizer" in given.values else None,
        **(DEMO_OPTIONS if settings.model == str(DEMO_MODEL) else {}),
    }
    router = _process("router", "router", common | of_router, given, given.router)
    counts: dict[Role, int] = {
        "prefill": settings.prefill,
        "decode": settings.decode,
        "unified": settings.unified,
        "encode": settings.encode,
    }
    instances = [(role, number) for role, count in counts.items() for number in range(count)]
    processes = [router]
    roles = [role for role, _ in instances]
    shares = _shares(machine, settings, roles, [_size(given, role) for role in roles])
    for (role, number), share in zip(instances, shares, strict=True):
        own = {**common, "instance_id": f"{role}-{number}", "rpc_socket": True, **share.values}
        process = _process(f"{role}-{number}", role, own, _given_to(role, given), given.instance)
        variables = {**process.variables, **share.variables}
        processes.append(replace(process, variables=variables, device=share.device))
    return processes


def _given_to(role: Role, given: GivenOptions) -> GivenOptions:
    """Return the options that instances of a role get: an encode instance always has one device."""
    if role != "encode":
        return given
    return replace(given, values={name: value for name, value in given.values.items() if name not in PARALLEL_OPTIONS})


def _size(given: GivenOptions, role: Role) -> int:
    """Return the number of devices over which one instance of `role` divides its model, by the options
    that were given.
    """
    if role == "encode":
        return 1
    own = given.sections.get(role, {})
    return prod(int(str(own.get(name, given.values.get(name, 1)))) for name in PARALLEL_OPTIONS)


@dataclass(frozen=True, slots=True)
class _MachineShare:
    """The options and environment variables that give one instance its part of this machine: devices or CPU cores."""

    values: Mapping[str, Value]
    variables: Mapping[str, str] = field(default_factory=dict)
    device: str = ""


def _shares(
    machine: Machine, settings: ServeSettings, roles: Sequence[Role], sizes: Sequence[int]
) -> list[_MachineShare]:
    """Return the part of the machine for each instance, in the order of `roles`. `sizes` are their numbers of devices
    (ranks).

    Raises `ConfigurationError` if an instance needs more devices than there are.
    """
    if not machine.device_indexes:
        if settings.threads:
            return [_MachineShare({"threads": settings.threads})] * len(sizes)
        found = allocate_cpus(machine.host, roles)
        return [_cpu_share(allocation, size, machine.core_turns) for allocation, size in zip(found, sizes, strict=True)]
    groups = _device_groups(machine.device_indexes, sizes)
    # Instances on the same device must divide its memory, or the second one would fail to allocate its KV cache.
    users = Counter(device for group in groups for device in group)
    return [_share(settings, group, max(users[device] for device in group)) for group in groups]


def _cpu_share(allocation: CpuAllocation, size: int, core_turns: str) -> _MachineShare:
    """Return the part of the machine for an instance on the CPU whose cores (`allocation`) its `size` ranks share.
    `core_turns` is the path for `--core-turns`.
    """
    threads = max(1, allocation.threads // size)
    values: dict[str, Value] = {"engine_nice": allocation.nice} if allocation.nice else {}
    if allocation.shares_cores:
        values["core_turns"] = core_turns
    if allocation.cpus:
        values["omp_threads_bind"] = ",".join(map(str, allocation.cpus))
    # Without this option an instance takes one thread for each core that it is bound to, which is right for one rank.
    if not allocation.cpus or size > 1:
        values["threads"] = threads
    return _MachineShare(values, {"OMP_NUM_THREADS": str(threads)})


def _device_groups(devices: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return the devices of each instance: the next `size` ones for each of `sizes`, beginning again with the first
    device when too few are left.

    Raises `ConfigurationError` if an instance needs more devices than there are.
    """
    groups: list[Sequence[int]] = []
    at = 0
    for size in sizes:
        if size > len(devices):
            raise ConfigurationError(
                f"--tensor-parallel-size times --pipeline-parallel-size is {size}, but this machine has"
                f" {len(devices)} devices: choose a product of {len(devices)} or less"
            )
        if at + size > len(devices):
            at = 0
        groups.append(devices[at : at + size])
        at += size
    return groups


def _share(settings: ServeSettings, devices: Sequence[int], sharers: int) -> _MachineShare:
    """Return the part of the machine for an instance on the accelerators `devices`. At most `sharers` instances use
    each of them, and divide its memory.
    """
    values: dict[str, Value] = {}
    variables: dict[str, str] = {}
    if len(devices) == 1:
        values["device_index"] = devices[0]
    else:
        # Ranks number their devices from 0, so the instance must see its own devices alone.
        mask = ",".join(map(str, devices))
        variables = {"ZE_AFFINITY_MASK": mask, "CUDA_VISIBLE_DEVICES": mask}
    if settings.threads:
        values["threads"] = settings.threads
    if sharers > 1:
        values["gpu_memory_utilization"] = round(GPU_MEMORY_UTILIZATION / sharers, 4)
    name = f"device {devices[0]}" if len(devices) == 1 else f"devices {', '.join(map(str, devices))}"
    return _MachineShare(values, variables, name)


def _process(
    name: str, role: str, own: Mapping[str, object], given: GivenOptions, options: Sequence[Option]
) -> Process:
    """Return a process of `role` with its flags. `own` are the options that `baton serve` sets; options of the user
    override them, and the configuration file's section for the role overrides both. `options` are the options
    that the process knows.
    """
    known = {option.name: option for option in options}
    values = dict(own)
    values |= {key: value for key, value in given.values.items() if key in known}
    values |= given.sections.get(role, {})
    secrets = {key for key in values if key in known and known[key].is_secret and values[key] is not None}
    variables = {f"BATON__{role.upper()}__{key.upper()}": _text(values.pop(key)) for key in sorted(secrets)}
    # OpenMP's runtime reads its number of threads from the environment when it starts.
    threads = values.get("threads")
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return Process(name, [role, *to_argv(values)], variables)


def _text(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
