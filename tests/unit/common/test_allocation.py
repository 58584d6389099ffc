"""Assignment of cores to processes, on described hosts."""

from collections.abc import Sequence

import pytest

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cpus.allocation import BACKGROUND_NICE, Cpu, CpuAllocation, HostCpus, allocate_cpus


def host(*nodes: int, hyperthreads: int = 1, quota: float | None = None) -> HostCpus:
    """Nodes of so many cores. The first hardware thread of every core comes first, as Linux counts them."""
    cores = [node for node, count in enumerate(nodes) for _ in range(count)]
    return HostCpus(
        tuple(
            Cpu(number=half * len(cores) + core, core=core, node=node)
            for half in range(hyperthreads)
            for core, node in enumerate(cores)
        ),
        quota,
    )


def cpus(found: Sequence[CpuAllocation]) -> list[tuple[int, ...]]:
    return [allocation.cpus for allocation in found]


def test_one_instance_has_every_core_and_no_core_twice() -> None:
    assert allocate_cpus(host(8, hyperthreads=2), ["unified"]) == [CpuAllocation(8, tuple(range(8)))]


def test_two_instances_of_a_machine_with_two_sockets_take_one_each() -> None:
    found = allocate_cpus(host(16, 16, hyperthreads=2), ["prefill", "decode"])
    assert cpus(found) == [tuple(range(16)), tuple(range(16, 32))]
    assert [allocation.threads for allocation in found] == [16, 16]


def test_no_instance_lies_across_nodes_where_there_are_fewer_nodes() -> None:
    found = allocate_cpus(host(12, 12), ["prefill", "prefill", "decode", "decode", "decode"])
    nodes = [{number // 12 for number in allocation.cpus} for allocation in found]
    assert all(len(node) == 1 for node in nodes)
    assert sorted(number for allocation in found for number in allocation.cpus) == list(range(24))


def test_an_instance_takes_several_nodes_where_there_are_more_of_them() -> None:
    assert cpus(allocate_cpus(host(4, 4, 4, 4), ["unified", "unified"])) == [tuple(range(8)), tuple(range(8, 16))]


def test_on_few_cores_prefill_and_decode_take_turns_on_all_of_them() -> None:
    prefill, decode = allocate_cpus(host(2), ["prefill", "decode"])
    assert prefill == CpuAllocation(2, (0, 1), BACKGROUND_NICE, shares_cores=True)
    assert decode == CpuAllocation(2, (0, 1), shares_cores=True)
    assert cpus(allocate_cpus(host(6), ["prefill", "decode", "decode"])) == [tuple(range(6)), (0, 1, 2), (3, 4, 5)]


def test_instances_with_cores_of_their_own_take_no_turns() -> None:
    assert not any(allocation.shares_cores for allocation in allocate_cpus(host(8), ["prefill", "decode"]))
    assert not any(allocation.shares_cores for allocation in allocate_cpus(host(2), ["unified", "unified"]))
    assert not any(allocation.shares_cores for allocation in allocate_cpus(host(2), ["prefill"]))


def test_a_cgroup_s_limit_bounds_threads_and_binds_nobody() -> None:
    assert allocate_cpus(host(64, quota=16.0), ["prefill", "decode"]) == [CpuAllocation(8), CpuAllocation(8)]
    assert allocate_cpus(host(64, quota=0.5), ["unified"]) == [CpuAllocation(1)]
    assert host(64, quota=4.0).num_cores == 4


def test_turns_are_taken_under_a_cgroup_s_limit_too() -> None:
    found = allocate_cpus(host(64, quota=4.0), ["prefill", "decode"])
    assert found == [CpuAllocation(4, nice=BACKGROUND_NICE, shares_cores=True), CpuAllocation(4, shares_cores=True)]


def test_a_limit_of_all_there_is_limits_nothing() -> None:
    assert cpus(allocate_cpus(host(8, quota=8.0), ["unified"])) == [tuple(range(8))]


def test_more_instances_than_cores_are_bound_nowhere() -> None:
    assert allocate_cpus(host(2), ["unified"] * 3) == [CpuAllocation(1)] * 3
    one = CpuAllocation(1, shares_cores=True)
    assert allocate_cpus(host(1), ["prefill", "decode", "decode"]) == [
        CpuAllocation(1, nice=BACKGROUND_NICE, shares_cores=True),
        one,
        one,
    ]


@pytest.mark.parametrize("nodes", [(1, 3), (9, 9, 9, 1), (7, 7, 7, 1), (5,), (2, 2, 2, 1)])
@pytest.mark.parametrize("role", ["decode", "unified"])
def test_every_instance_has_cores_and_none_is_given_twice(nodes: tuple[int, ...], role: Role) -> None:
    machine = host(*nodes)
    for count in range(1, sum(nodes) + 1):
        found = allocate_cpus(machine, [role] * count)
        given = [number for allocation in found for number in allocation.cpus]
        assert len(found) == count and all(
            allocation.cpus and allocation.threads == len(allocation.cpus) for allocation in found
        )
        assert len(given) == len(set(given))
