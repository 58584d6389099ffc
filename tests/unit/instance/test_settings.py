import socket
from pathlib import Path

import pytest

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance.addresses import advertised, check_ports, for_routers, tcp
from baton_serve.services.instance.errors import StartFailed
from baton_serve.services.instance.settings import (
    InstanceSettings,
    instance_id,
    model_names,
    peer_access,
    short_waits,
    visible_device,
    with_local_model,
)
from tests.unit.local.hub_cache import downloaded


def settings(*argv: str) -> InstanceSettings:
    return load(InstanceSettings, argv, {}, prefix="BATON__DECODE__", program="baton decode", description="")


def test_engine_flags_carry_vllm_s_names() -> None:
    given = settings(
        "--model=/m",
        "--max-model-len",
        "4k",
        "--no-enable-prefix-caching",
        "--kv-cache-memory",
        "1G",
        "--dtype=bfloat16",
    )
    assert (given.max_model_len, given.enable_prefix_caching, given.dtype) == (4000, False, "bfloat16")
    assert given.kv_cache_memory_bytes == 1 << 30


def test_a_bad_value_stops_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--model=/m", "--kv-transport=pigeon")
    (line,) = capsys.readouterr().err.splitlines()
    assert "--kv-transport" in line and "usm" in line


def test_the_first_served_name_is_the_model_s() -> None:
    assert model_names(settings("--model=/models/llama")) == ["/models/llama", "llama"]
    assert model_names(settings("--model=/m", "--served-model-name", "a", "b")) == ["a", "b"]


def test_an_instance_without_a_name_gets_one() -> None:
    assert instance_id(settings("--model=/m"), "decode").startswith("decode-")
    assert instance_id(settings("--model=/m", "--instance-id=x"), "decode") == "x"


def test_a_wildcard_is_not_advertised() -> None:
    wild = settings("--model=/m", "--host=0.0.0.0")
    assert advertised(wild, "tcp://0.0.0.0:55") == f"tcp://{socket.gethostname()}:55"
    named = settings("--model=/m", "--host=0.0.0.0", "--advertise-host=10.0.0.7")
    assert advertised(named, "tcp://0.0.0.0:55") == "tcp://10.0.0.7:55"
    assert tcp(settings("--model=/m", "--host=::1"), 0) == "tcp://[::1]:0"


def test_a_port_in_use_is_named_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=f"--rpc-port {port}"):
            check_ports(settings("--model=/m", f"--rpc-port={port}"))


def test_requests_are_taken_at_a_unix_socket_or_at_a_port() -> None:
    assert for_routers(settings("--model=/m", "--rpc-port=55")) == "tcp://127.0.0.1:55"
    at_socket = settings("--model=/m", "--rpc-socket", "--advertise-host=10.0.0.7")
    assert for_routers(at_socket) == "ipc://@*"
    assert advertised(at_socket, "ipc://@baton-1") == "ipc://@baton-1"
    with pytest.raises(StartFailed, match="remove --rpc-port"):
        check_ports(settings("--model=/m", "--rpc-socket", "--rpc-port=55"))


def test_one_device_is_shown_to_the_process() -> None:
    assert visible_device(settings("--model=/m")) == {}
    assert visible_device(settings("--model=/m", "--device-index=1"))["ZE_AFFINITY_MASK"] == "1"


def test_waits_are_short_unless_the_operator_says_otherwise() -> None:
    assert short_waits({}) == {"GOMP_SPINCOUNT": "2000"}
    assert short_waits({"OMP_WAIT_POLICY": "active"}) == {}


def test_peer_access_is_read_from_oneccl_s_own_variable() -> None:
    assert [peer_access(environ) for environ in ({}, {"CCL_TOPO_P2P_ACCESS": "0"})] == ["", "0"]
    assert peer_access({"CCL_TOPO_P2P_ACCESS": "1"}) == "1"
    with pytest.raises(StartFailed, match="CCL_TOPO_P2P_ACCESS=yes is invalid"):
        peer_access({"CCL_TOPO_P2P_ACCESS": "yes"})


@pytest.mark.parametrize("text", ["0-", "all", "1,,2"])
def test_cores_are_a_list_or_one_of_two_words(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert settings("--model=/m", "--omp-threads-bind=0-3,8").omp_threads_bind == "0-3,8"
    with pytest.raises(SystemExit):
        settings("--model=/m", f"--omp-threads-bind={text}")
    assert "omp" in capsys.readouterr().err


def test_a_model_of_the_hub_gets_its_path_and_keeps_its_name(tmp_path: Path) -> None:
    folder = downloaded(tmp_path, "org/small", "abc")
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    found = with_local_model(settings("org/small"), cache, "decode")
    assert found.model == str(folder) and model_names(found) == ["org/small", "small"]
    named = with_local_model(settings("org/small", "--served-model-name", "mine"), cache, "decode")
    assert model_names(named) == ["mine"]
    assert with_local_model(settings(str(folder)), {}, "decode") == settings("--model", str(folder))


def test_a_missing_model_of_the_hub_stops_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        with_local_model(settings("org/small", "--offline"), {"HF_HUB_CACHE": str(tmp_path)}, "decode")
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2
    assert line.startswith("baton decode: MODEL org/small is neither") and "baton pull org/small" in line
