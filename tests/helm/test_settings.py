"""No drift between chart and code: every setting has one place in the chart, and every variable is a setting.

The values of each variant are read by the processes' own configuration code.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.common.settings.options import options_of
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.router.settings import RouterSettings
from tests.helm.chart import (
    CHART,
    ROLES,
    VARIANTS,
    Manifest,
    container_of,
    environment_of,
    named,
    objects,
    of_kind,
    pod_of,
    render,
    values_of,
    variant,
    variant_name,
)
from tools.helm_schema import snake

VALUES = values_of(CHART / "values.yaml")
SECRETS = {"REDIS_PASSWORD": "hush", "API_KEYS": "sk-1"}
FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.7"}

# Fields that the chart sets itself; other fields are keys of `engine` or `router.settings`.
INSTANCE_DECIDED = set(
    "model served_model_name device host rpc_port transfer_port events_port http_port instance_id advertise_host"
    " registry cluster_key_file kv_transport kv_checksum kv_rank_transfers kv_tail_parts kv_zeromq_connections"
    " kv_lease_s kv_run_dir"
    " drain_timeout_s log_level log_format otlp_traces_endpoint".split()
)
ROUTER_DECIDED = set(
    "model served_model_name host port registry api_key_file ssl_keyfile ssl_certfile max_logprobs handoff_timeout_s"
    " shutdown_timeout_s cluster_key_file log_level log_format otlp_traces_endpoint batch_folder".split()
)
# Settings that have no place in Kubernetes: the pod sees its own cards alone; keys belong into a file from a Secret;
# which cores a pod has, and who gives way on them, is the kubelet's affair; a Unix socket does not leave its pod; the
# model is always a path, because another container downloads it; changes of its config belong into its config.json,
# because they would need a folder that can be written; logs go to stderr as JSON, where the cluster's collector reads
# them; and an ingress asks clients for certificates.
MODEL_SOURCE_UNUSED = {
    "offline", "revision", "code_revision", "tokenizer_revision", "download_dir", "hf_token",
    "hf_overrides", "rope_scaling", "rope_theta",
}  # fmt: skip
# Only pools with `nodesPerInstance` have these (test_hosts.py); all pods have the same port.
OF_SEVERAL_HOSTS = {"nnodes", "node_rank", "master_addr", "master_port"}
INSTANCE_UNUSED = MODEL_SOURCE_UNUSED | OF_SEVERAL_HOSTS | {
    "log_config_file", "disable_hybrid_kv_cache_manager",
    "device_index", "omp_threads_bind", "engine_nice", "core_turns", "core_turns_share", "rpc_socket",
}  # fmt: skip
ROUTER_UNUSED = MODEL_SOURCE_UNUSED | {"api_key", "log_config_file", "ssl_ca_certs", "ssl_cert_reqs"}

COLLECTOR = "http://collector.observability:4318/v1/traces"

every_variant = pytest.mark.parametrize("path", VARIANTS, ids=variant_name)


def settings_of(rendered: list[Manifest], role: str) -> Any:
    """Return the settings as the process in the container reads them."""
    container = container_of(pod_of(rendered, role))
    return load(
        RouterSettings if role == "router" else InstanceSettings,
        container["args"][1:],
        environment_of(rendered, container, secrets=SECRETS, fields=FIELDS),
        prefix=f"BATON__{role.upper()}__",
        program=f"baton {role}",
        description="",
    )


def names(settings: type[msgspec.Struct]) -> set[str]:
    return {option.name for option in options_of(settings)}


def test_every_setting_of_an_instance_has_one_place_in_the_values() -> None:
    own = {snake(key) for key in VALUES["engine"]}
    assert own.isdisjoint(INSTANCE_DECIDED | INSTANCE_UNUSED)
    assert own | INSTANCE_DECIDED | INSTANCE_UNUSED == names(InstanceSettings)


def test_every_setting_of_the_router_has_one_place_in_the_values() -> None:
    own = {snake(key) for key in VALUES["router"]["settings"]}
    assert own.isdisjoint(ROUTER_DECIDED | ROUTER_UNUSED)
    assert own | ROUTER_DECIDED | ROUTER_UNUSED == names(RouterSettings)


def everything_set() -> list[Manifest]:
    """No value is null or empty, so that every variable appears."""
    engine = {"maxModelLen": 9, "maxNumSeqs": 8, "maxNumBatchedTokens": 7, "kvCacheMemoryBytes": "4G", "blockSize": 6}
    engine |= {"hostKvGb": 1.5, "numGpuBlocksOverride": 5, "threads": 3, "asyncScheduling": True}
    engine |= {"engineStepTimeoutS": 90, "modelLoaderExtraConfig": {"num_threads": 4}}
    engine |= {"quantization": "sym_int4", "quantizationSkip": "lm_head", "pipelineLayerPartition": "20,12"}
    engine |= {"maxCpuLoras": 4, "enableLora": True, "loraModules": "poet=/adapters/poet,clerk=/adapters/clerk"}
    router = {"tokenizer": "/t", "rootPath": "/r", "maxModelLen": 9, "chatTemplate": "/c.jinja"}
    router |= {"auditLog": "/r/audit", "allowedOrigins": "*", "allowedHosts": "*", "middleware": "a.B"}
    router |= {"limitMmPerPrompt": "image=2", "allowedMediaDomains": "*", "allowedLocalMediaPath": "/pictures"}
    router |= {"mmProcessorKwargs": '{"fps": 1}'}
    router |= {"overrideGenerationConfig": {"temperature": 0.5}, "seed": 7}
    router |= {"models": {"small": {"model": "/s"}}, "jointPrefillMinTokens": 4096}
    router |= {"defaultTtftMs": 2000, "defaultItlMs": 50, "loraResolverFolder": "/adapters"}
    router |= {"updateWeightsFolder": "/weights"}
    router |= {"enableAutoToolChoice": True, "toolCallParser": "hermes", "reasoningParser": "qwen3", "maxLogLen": 200}
    tls = {"secretName": "tls"}
    return objects(
        {
            "engine": engine,
            "router": {"settings": router, "tls": tls, "batches": {"claimName": "batches"}},
            "kvTransfer": {"usm": {"enabled": True}, "tailParts": 4},
            "auth": {"encryptPods": True},
            "unified": {"replicas": 1},
            "encode": {"replicas": 1},
            "tracing": {"otlpTracesEndpoint": COLLECTOR},
        }
    )


@pytest.mark.parametrize("role", ["router", *ROLES])
def test_variables_of_a_container_are_the_settings_of_its_process(role: str) -> None:
    rendered = everything_set()
    prefix = f"BATON__{role.upper()}__"
    environ = environment_of(rendered, container_of(pod_of(rendered, role)), secrets=SECRETS, fields=FIELDS)
    variables = {name.removeprefix(prefix).lower() for name in environ if name.startswith("BATON__")}
    unused = ROUTER_UNUSED if role == "router" else INSTANCE_UNUSED
    assert variables == names(RouterSettings if role == "router" else InstanceSettings) - unused


@every_variant
def test_the_processes_accept_what_the_chart_gives_them(path: Path | None) -> None:
    rendered = render(path)
    for deployment in of_kind(rendered, "Deployment"):
        role = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        settings = settings_of(rendered, role)
        assert settings.log_format == "json"
        if role != "router":
            assert settings.advertise_host == "10.0.0.7"
            ports = {p["name"]: p["containerPort"] for p in container_of(pod_of(rendered, role))["ports"]}
            given = {name: getattr(settings, f"{name}_port") for name in ports}
            assert given == ports


def test_values_arrive_unchanged() -> None:
    rendered = everything_set()
    decode, router = settings_of(rendered, "decode"), settings_of(rendered, "router")
    assert (decode.max_model_len, decode.max_num_seqs, decode.kv_cache_memory_bytes) == (9, 8, 4 << 30)
    assert (decode.kv_run_dir, decode.drain_timeout_s, decode.kv_lease_s) == ("/run/baton", 90.0, 10.0)
    assert (router.tokenizer, router.root_path, router.ssl_certfile) == ("/t", "/r", "/run/secrets/tls/tls.crt")
    assert router.otlp_traces_endpoint == decode.otlp_traces_endpoint == COLLECTOR
    assert router.served_model_name == decode.served_model_name == ["Qwen/Qwen3-4B"]


def test_values_that_are_not_given_are_the_processes_own_defaults() -> None:
    own: list[tuple[str, msgspec.Struct, set[str]]] = [
        ("router", RouterSettings(model="m"), ROUTER_DECIDED),
        ("decode", InstanceSettings(model="m"), INSTANCE_DECIDED),
    ]
    for role, defaults, decided in own:
        chart = settings_of(render(None), role)
        other = {name for name in names(type(defaults)) if getattr(chart, name) != getattr(defaults, name)}
        assert other <= decided


def test_the_registry_is_redis_with_the_password_of_the_secret() -> None:
    assert settings_of(render(None), "decode").registry == "redis://:hush@test-baton-redis:6379/0"
    external = settings_of(render(variant("external-redis")), "router").registry
    assert external == "rediss://:hush@redis.example.com:6380/0?ssl_ca_certs=/run/secrets/redis/ca.crt"


def test_a_path_of_the_configuration_is_a_mount() -> None:
    rendered = everything_set()
    for role in ("router", *ROLES):
        container = container_of(pod_of(rendered, role))
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        settings = settings_of(rendered, role)
        paths = [
            settings.model,
            *(
                getattr(settings, name, None)
                for name in ("api_key_file", "ssl_keyfile", "kv_run_dir", "cluster_key_file")
            ),
        ]
        for path in filter(None, paths):
            assert any(path == mount or path.startswith(mount + "/") for mount in mounts), path


def test_the_config_map_of_a_role_is_mounted_by_that_role_alone() -> None:
    for role in ("prefill", "decode"):
        config = named(render(None), "ConfigMap", f"-{role}")
        assert all(key.startswith(f"BATON__{role.upper()}__") for key in config["data"])


def test_further_variables_of_a_pool_reach_its_containers() -> None:
    values = values_of(variant("cpu-minimal"))
    further = [{"name": "CCL_WORKER_COUNT", "value": "4"}]
    rendered = objects({**values, "decode": {**values.get("decode", {}), "extraEnv": further}})
    assert further[0] in container_of(pod_of(rendered, "decode"))["env"]
    assert further[0] not in container_of(pod_of(rendered, "prefill"))["env"]
