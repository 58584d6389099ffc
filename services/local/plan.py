"""Which processes a local cluster is made of, and their flags. Pure: values in, values out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cpus.allocation import CpuAllocation, HostCpus, allocate_cpus
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.settings.configuration import to_argv
from baton_serve.services.common.settings.options import Option, Value
from baton_serve.services.local.settings import ServeSettings

MANAGED_INSTANCE_OPTIONS = frozenset(
    "model instance_id device_index host advertise_host rpc_port rpc_socket transfer_port events_port http_port"
    " registry registry_ttl_s threads".split()
)
MANAGED_ROUTER_OPTIONS = frozenset("model host port registry".split())
"""Options that `serve` sets itself: nobody else may."""

GPU_MEMORY_UTILIZATION = 0.9
TENSOR_PARALLEL_OPTION = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Process:
    """`argv` begins with the role. `variables` are added to the environment, for secrets are not for command lines."""

    name: str
    argv: list[str]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """What was given for options of the router and of instances, by name; and by role in the file's sections."""

    values: Mapping[str, Value]
    sections: Mapping[str, Mapping[str, object]]
    router: Sequence[Option]
    instance: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Machine:
    """`device_indexes` are accelerators, none on a CPU machine. An instance takes several where the model is split.
    `core_turns` names a file of shared memory, `cluster_key` one with a new secret, which only this user can read."""

    host: HostCpus
    device_indexes: list[int]
    core_turns: str
    cluster_key: str


def plan(
    settings: ServeSettings, given: GivenOptions, machine: Machine, *, names: list[str], registry: str
) -> list[Process]:
    """The router first. `settings.port` is the real one, `names` those under which the model is served."""
    common = {"model": settings.model, "registry": registry, "served_model_name": names}
    common |= {"cluster_key_file": machine.cluster_key}
    router = _process("router", "router", common | {"host": settings.host, "port": settings.port}, given, given.router)
    counts: dict[Role, int] = {
        "prefill": settings.prefill,
        "decode": settings.decode,
        "unified": settings.unified,
    }
    instances = [(role, number) for role, count in counts.items() for number in range(count)]
    processes = [router]
    roles = [role for role, _ in instances]
    shares = _shares(machine, settings, roles, [_size(given, role) for role in roles])
    for (role, number), share in zip(instances, shares, strict=True):
        own = {**common, "instance_id": f"{role}-{number}", "rpc_socket": True, **share.values}
        process = _process(f"{role}-{number}", role, own, given, given.instance)
        processes.append(replace(process, variables={**process.variables, **share.variables}))
    return processes


def _size(given: GivenOptions, role: Role) -> int:
    """Devices of one instance."""
    value = given.sections.get(role, {}).get(TENSOR_PARALLEL_OPTION, given.values.get(TENSOR_PARALLEL_OPTION, 1))
    return int(str(value))


@dataclass(frozen=True, slots=True)
class _MachineShare:
    values: Mapping[str, Value]
    variables: Mapping[str, str] = field(default_factory=dict)


def _shares(
    machine: Machine, settings: ServeSettings, roles: Sequence[Role], sizes: Sequence[int]
) -> list[_MachineShare]:
    """The part of the machine that each instance gets, which takes so many devices. Raises `ConfigurationError`."""
    if not machine.device_indexes:
        if settings.threads:
            return [_MachineShare({"threads": settings.threads})] * len(sizes)
        found = allocate_cpus(machine.host, roles)
        return [_cpu_share(allocation, size, machine.core_turns) for allocation, size in zip(found, sizes, strict=True)]
    groups = _device_groups(machine.device_indexes, sizes)
    users = Counter(device for group in groups for device in group)
    return [_share(settings, group, max(users[device] for device in group)) for group in groups]


def _cpu_share(allocation: CpuAllocation, size: int, core_turns: str) -> _MachineShare:
    """`size`: processes that share the seat."""
    threads = max(1, allocation.threads // size)
    values: dict[str, Value] = {"engine_nice": allocation.nice} if allocation.nice else {}
    if allocation.shares_cores:
        values["core_turns"] = core_turns
    if allocation.cpus:
        values["omp_threads_bind"] = ",".join(map(str, allocation.cpus))
    if not allocation.cpus or size > 1:
        values["threads"] = threads
    return _MachineShare(values, {"OMP_NUM_THREADS": str(threads)})


def _device_groups(devices: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """In turns; from the first device again where too few are left."""
    groups: list[Sequence[int]] = []
    at = 0
    for size in sizes:
        if size > len(devices):
            raise ConfigurationError(
                f"--tensor-parallel-size {size} needs {size} devices for an instance, but this machine shows"
                f" {len(devices)}: lower it"
            )
        if at + size > len(devices):
            at = 0
        groups.append(devices[at : at + size])
        at += size
    return groups


def _share(settings: ServeSettings, devices: Sequence[int], sharers: int) -> _MachineShare:
    values: dict[str, Value] = {}
    variables: dict[str, str] = {}
    if len(devices) == 1:
        values["device_index"] = devices[0]
    else:
        mask = ",".join(map(str, devices))
        variables = {"ZE_AFFINITY_MASK": mask, "CUDA_VISIBLE_DEVICES": mask}
    if settings.threads:
        values["threads"] = settings.threads
    if sharers > 1:
        values["gpu_memory_utilization"] = round(GPU_MEMORY_UTILIZATION / sharers, 4)
    return _MachineShare(values, variables)


def _process(
    name: str, role: str, own: Mapping[str, object], given: GivenOptions, options: Sequence[Option]
) -> Process:
    """What was given wins over a share of the machine, and a role's section over what was given for all."""
    known = {option.name: option for option in options}
    values = dict(own)
    values |= {key: value for key, value in given.values.items() if key in known}
    values |= given.sections.get(role, {})
    secrets = {key for key in values if key in known and known[key].is_secret}
    variables = {f"BATON__{role.upper()}__{key.upper()}": _text(values.pop(key)) for key in sorted(secrets)}
    threads = values.get("threads")
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return Process(name, [role, *to_argv(values)], variables)


def _text(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
