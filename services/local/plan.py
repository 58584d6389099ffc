"""Which processes a local cluster is made of, and their flags. Pure: values in, values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contracts.instance import Role
from services.common.configuration import to_argv
from services.common.options import Option, Value
from services.local.settings import ServeSettings

MANAGED_OF_INSTANCE = frozenset(
    "model instance_id device_index host advertise_host rpc_port transfer_port events_port http_port registry"
    " registry_ttl_s threads".split()
)
MANAGED_OF_ROUTER = frozenset("model host port registry".split())
"""Options that `serve` sets itself: nobody else may."""

MEMORY_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Process:
    """`argv` begins with the role. `variables` are added to the environment, for secrets are not for command lines."""

    name: str
    argv: list[str]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """What was given for options of the router and of instances, by name; and by role in the file's sections."""

    values: Mapping[str, Value]
    sections: Mapping[str, Mapping[str, object]]
    router: Sequence[Option]
    instance: Sequence[Option]


@dataclass(frozen=True, slots=True)
class Machine:
    """`device_indexes` are accelerators, none on a CPU machine."""

    cores: int
    device_indexes: list[int]


def plan(settings: ServeSettings, given: Given, machine: Machine, *, names: list[str], registry: str) -> list[Process]:
    """The router first. `settings.port` is the real one, `names` those under which the model is served."""
    common = {"model": settings.model, "registry": registry, "served_model_name": names}
    router = _process("router", "router", common | {"host": settings.host, "port": settings.port}, given, given.router)
    counts: dict[Role, int] = {
        "prefill": settings.prefill,
        "decode": settings.decode,
        "unified": settings.unified,
    }
    instances = [(role, number) for role, count in counts.items() for number in range(count)]
    processes = [router]
    for place, (role, number) in enumerate(instances):
        own = common | {"instance_id": f"{role}-{number}"} | _share(machine, settings, place, len(instances))
        processes.append(_process(f"{role}-{number}", role, own, given, given.instance))
    return processes


def _share(machine: Machine, settings: ServeSettings, place: int, count: int) -> dict[str, Value]:
    """The part of the machine that one of `count` instances gets."""
    devices = machine.device_indexes
    if not devices:
        return {"threads": settings.threads or max(1, machine.cores // count)}
    sharers = len(range(place % len(devices), count, len(devices)))
    share: dict[str, Value] = {"device_index": devices[place % len(devices)]}
    if settings.threads:
        share["threads"] = settings.threads
    if sharers > 1:
        share["gpu_memory_utilization"] = round(MEMORY_FRACTION / sharers, 4)
    return share


def _process(name: str, role: str, own: Mapping[str, object], given: Given, options: Sequence[Option]) -> Process:
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
