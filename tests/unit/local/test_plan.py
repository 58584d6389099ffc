"""Which processes a local cluster is made of, and with which flags."""

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from baton_serve.services.common.cpus.allocation import Cpu, HostCpus
from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.settings.options import Value, options_of
from baton_serve.services.local.plan import GivenOptions, Machine, Process, plan
from baton_serve.services.local.settings import DEMO_MODEL, ServeSettings


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    cluster_key_file: str | None = None
    served_model_name: list[str] = []
    api_key: list[str] = []
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    max_model_len: int | None = None


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True):
    cluster_key_file: str | None = None
    rpc_socket: bool = False
    omp_threads_bind: str = "auto"
    core_turns: str | None = None
    served_model_name: list[str] = []
    max_model_len: int | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0)] = 0.9
    enforce_eager: bool = False
    tensor_parallel_size: int = 1


def processes(
    *,
    model: str = "/m",
    prefill: int = 1,
    decode: int = 1,
    encode: int = 0,
    threads: int | None = None,
    devices: list[int] | None = None,
    sections: dict[str, dict[str, object]] | None = None,
    **values: Value,
) -> dict[str, Process]:
    settings = ServeSettings(model=model, port=80, prefill=prefill, decode=decode, encode=encode, threads=threads)
    given = GivenOptions(values, sections or {}, options_of(RouterOptions), options_of(InstanceOptions))
    host = HostCpus(tuple(Cpu(number=number, core=number, node=0) for number in range(8)))
    machine = Machine(host, device_indexes=devices or [], core_turns="/proc/1/fd/3", cluster_key="/proc/1/fd/4")
    found = plan(settings, given, machine, names=["n"], registry="memory:///@r")
    return {process.name: process for process in found}


def test_each_instance_has_a_name_of_its_own_and_all_share_model_and_registry() -> None:
    found = processes(prefill=2)
    assert list(found) == ["router", "prefill-0", "prefill-1", "decode-0"]
    assert found["router"].argv[0] == "router" and "--port=80" in found["router"].argv
    for name in ("prefill-0", "prefill-1", "decode-0"):
        argv = found[name].argv
        assert argv[0] == name.partition("-")[0]
        assert {f"--instance-id={name}", "--model=/m", "--registry=memory:///@r", "--served-model-name=n"} <= set(argv)


def test_all_share_a_cluster_key_and_instances_take_requests_at_unix_sockets() -> None:
    found = processes()
    assert all("--cluster-key-file=/proc/1/fd/4" in process.argv for process in found.values())
    assert [name for name, process in found.items() if "--rpc-socket" in process.argv] == ["prefill-0", "decode-0"]


def test_a_cluster_key_that_was_given_is_taken() -> None:
    found = processes(cluster_key_file="/my/key")
    assert all("--cluster-key-file=/my/key" in process.argv for process in found.values())


def test_an_option_goes_to_all_who_know_it_and_to_nobody_else() -> None:
    found = processes(max_model_len=64, enforce_eager=True)
    assert all("--max-model-len=64" in process.argv for process in found.values())
    assert "--enforce-eager" in found["decode-0"].argv and "--enforce-eager" not in found["router"].argv


def test_the_demo_model_calls_tools_unless_the_options_say_otherwise() -> None:
    argv = processes(model=str(DEMO_MODEL))["router"].argv
    assert {"--enable-auto-tool-choice", "--tool-call-parser=hermes"} <= set(argv)
    assert "--tool-call-parser=mistral" in processes(model=str(DEMO_MODEL), tool_call_parser="mistral")["router"].argv
    assert not [word for word in processes()["router"].argv if "tool" in word]


def test_a_role_s_section_wins_over_what_was_given_for_all() -> None:
    found = processes(max_model_len=64, sections={"prefill": {"max_model_len": 32}})
    assert "--max-model-len=32" in found["prefill-0"].argv
    assert "--max-model-len=64" in found["decode-0"].argv


def test_secrets_are_variables_not_flags() -> None:
    router = processes(api_key=["a", "b"])["router"]
    assert not [word for word in router.argv if "api" in word]
    assert router.variables == {"BATON__ROUTER__API_KEY": "a,b"}


def test_cores_are_divided_among_instances_without_accelerators() -> None:
    found = processes()
    assert "--omp-threads-bind=0,1,2,3" in found["prefill-0"].argv
    assert "--omp-threads-bind=4,5,6,7" in found["decode-0"].argv
    assert found["decode-0"].variables["OMP_NUM_THREADS"] == "4"
    assert "--threads=1" in processes(prefill=20)["decode-0"].argv


def test_threads_that_were_asked_for_are_bound_nowhere() -> None:
    argv = processes(threads=3)["decode-0"].argv
    assert "--threads=3" in argv and not [word for word in argv if "bind" in word]


def test_on_few_cores_prefill_stands_back_and_all_share_the_memory_of_turns() -> None:
    found = processes(prefill=2)
    assert "--engine-nice=10" in found["prefill-1"].argv
    assert not [word for word in found["decode-0"].argv if "nice" in word]
    assert all("--core-turns=/proc/1/fd/3" in found[name].argv for name in ("prefill-0", "prefill-1", "decode-0"))
    assert not [word for word in processes()["decode-0"].argv if "turns" in word]


def test_cores_of_a_role_s_section_win() -> None:
    argv = processes(sections={"decode": {"omp_threads_bind": "5"}})["decode-0"].argv
    assert "--omp-threads-bind=5" in argv and not [word for word in argv if "threads=" in word]


def test_each_instance_sees_one_accelerator() -> None:
    found = processes(devices=[4, 6])
    assert "--device-index=4" in found["prefill-0"].argv
    assert "--device-index=6" in found["decode-0"].argv
    assert (found["router"].device, found["decode-0"].device) == ("", "device 6")
    assert processes()["decode-0"].device == ""
    assert not [word for word in found["decode-0"].argv if "utilization" in word or "threads" in word]


def test_instances_that_share_an_accelerator_share_its_memory() -> None:
    found = processes(prefill=2, devices=[0, 1])
    assert "--gpu-memory-utilization=0.45" in found["prefill-0"].argv
    assert "--gpu-memory-utilization=0.45" in found["decode-0"].argv
    assert not [word for word in found["prefill-1"].argv if "utilization" in word]
    chosen = processes(prefill=2, devices=[0], gpu_memory_utilization=0.2)
    assert "--gpu-memory-utilization=0.2" in chosen["decode-0"].argv


def test_an_instance_of_several_ranks_sees_several_accelerators() -> None:
    found = processes(devices=[0, 2, 4, 6], tensor_parallel_size=2)
    assert found["prefill-0"].variables == {"ZE_AFFINITY_MASK": "0,2", "CUDA_VISIBLE_DEVICES": "0,2"}
    assert found["decode-0"].variables["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert found["decode-0"].device == "devices 4, 6"
    assert "--tensor-parallel-size=2" in found["decode-0"].argv
    assert not [word for word in found["decode-0"].argv if "device-index" in word or "utilization" in word]
    crowded = processes(devices=[0, 1], sections={"prefill": {"tensor_parallel_size": 2}})
    assert crowded["prefill-0"].variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert {"--device-index=0", "--gpu-memory-utilization=0.45"} <= set(crowded["decode-0"].argv)
    with pytest.raises(ConfigurationError, match="is 3, but this machine has 2 devices"):
        processes(devices=[0, 1], tensor_parallel_size=3)
    staged = processes(devices=[0, 1, 2, 3, 4], tensor_parallel_size=2, pipeline_parallel_size=2)
    assert staged["prefill-0"].variables["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_ranks_divide_the_cores_too() -> None:
    assert "--threads=2" in processes(tensor_parallel_size=2)["decode-0"].argv


def test_an_encode_instance_has_one_device_however_many_the_others_have() -> None:
    found = processes(encode=1, devices=[0, 1, 2, 3, 4], tensor_parallel_size=2)
    assert found["encode-0"].argv[0] == "encode" and "--device-index=4" in found["encode-0"].argv
    assert not [flag for flag in found["encode-0"].argv if "parallel" in flag]
    assert "--tensor-parallel-size=2" in found["prefill-0"].argv
