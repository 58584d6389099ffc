"""Several models in one release: each has its own pools, and one router serves them all."""

import json
import re
from typing import Any

import helm_python
import pytest

from baton_serve.services.router.service_builder import settings_of_models
from baton_serve.services.router.text.served_model import ModelNames
from tests.helm.chart import ROOT, Manifest, container_of, named, objects, of_kind, pod_of, render
from tests.helm.kubernetes_schemas import validate_strictly
from tests.helm.test_settings import settings_of

SMALL: Manifest = {
    "name": "small",
    "model": {"source": {"download": {"repository": "Qwen/Qwen3-1.7B"}}},
    "engine": {"enablePrefixCaching": False, "maxNumSeqs": None},
    "prefill": {"replicas": 2},
    "decode": {"replicas": 3, "autoscaling": {"kind": "keda"}},
    "router": {"toolCallParser": "hermes", "enableAutoToolChoice": True, "defaultTtftMs": 500},
}
EMBEDDING: Manifest = {
    "name": "embed",
    "gpu": {"device": "cpu"},
    "model": {"source": {"kind": "hostPath", "hostPath": {"path": "/srv/models/bge"}}},
    "decode": {"replicas": 0},
    "unified": {"replicas": 1},
}
VALUES: Manifest = {"engine": {"maxNumSeqs": 64, "maxModelLen": 4096}, "models": [SMALL, EMBEDDING]}
POOLS = {
    "prefill": "main", "decode": "main",
    "small-prefill": "small", "small-decode": "small",
    "embed-prefill": "embed", "embed-decode": "embed", "embed-unified": "embed",
}  # fmt: skip


def deployments(rendered: list[Manifest]) -> dict[str, Manifest]:
    found = {o["metadata"]["name"].removeprefix("test-baton-"): o for o in of_kind(rendered, "Deployment")}
    del found["router"]
    return found


def test_each_model_has_pools_of_its_own_that_no_other_selector_matches() -> None:
    found = deployments(objects(VALUES))
    assert {name: o["metadata"]["labels"]["baton.dev/model"] for name, o in found.items()} == POOLS
    for kind in ("Deployment", "PodDisruptionBudget"):
        owners = [o for o in of_kind(objects(VALUES), kind) if not o["metadata"]["name"].endswith("-router")]
        for pool in found.values():
            labels = pool["spec"]["template"]["metadata"]["labels"].items()
            matching = [o for o in owners if o["spec"]["selector"]["matchLabels"].items() <= labels]
            assert [o["metadata"]["name"] for o in matching] == [pool["metadata"]["name"]], kind


def test_one_router_serves_all_models_by_name_with_their_own_settings() -> None:
    settings = settings_of(objects(VALUES), "router")
    main, small, embed = settings_of_models(settings)
    names = [ModelNames(each).all([]) for each in (main, small, embed)]
    assert names == [["Qwen/Qwen3-4B"], ["Qwen/Qwen3-1.7B"], ["embed"]]
    assert (small.tool_call_parser, small.default_ttft_ms, main.tool_call_parser) == ("hermes", 500, None)
    mounts = [mount["mountPath"] for mount in container_of(pod_of(objects(VALUES), "router"))["volumeMounts"]]
    for each in (main, small, embed):
        assert [mount for mount in mounts if each.model == mount or each.model.startswith(mount + "/")], each.model


def test_models_of_other_releases_stay_beside_those_of_this_one() -> None:
    elsewhere = {"router": {"settings": {"models": {"far": {"model": "/far"}}}}}
    assert set(settings_of(objects({**VALUES, **elsewhere}), "router").models) == {"far", "Qwen/Qwen3-1.7B", "embed"}


def test_aliases_of_a_model_reach_instances_and_router() -> None:
    model = {**SMALL["model"], "servedName": ["small", "tiny"]}
    rendered = objects({"models": [{**SMALL, "model": model}]})
    assert settings_of(rendered, "router").models["small"]["served_model_name"] == ["tiny"]
    assert named(rendered, "ConfigMap", "-small-decode")["data"]["BATON__DECODE__SERVED_MODEL_NAME"] == "small,tiny"


def test_an_entry_replaces_single_keys_of_the_release_also_by_false_and_null() -> None:
    rendered = objects(VALUES)
    config = {name: named(rendered, "ConfigMap", f"baton-{name}")["data"] for name in ("decode", "small-decode")}
    assert config["decode"]["BATON__DECODE__ENABLE_PREFIX_CACHING"] == "true"
    assert config["small-decode"]["BATON__DECODE__ENABLE_PREFIX_CACHING"] == "false"
    assert config["decode"]["BATON__DECODE__MAX_NUM_SEQS"] == "64"
    assert "BATON__DECODE__MAX_NUM_SEQS" not in config["small-decode"]
    assert config["small-decode"]["BATON__DECODE__MAX_MODEL_LEN"] == "4096"
    images = {name: container_of(o["spec"]["template"]["spec"])["image"] for name, o in deployments(rendered).items()}
    assert "worker-xpu" in images["small-decode"] and "worker-cpu" in images["embed-unified"]


def test_each_model_is_kept_in_a_claim_of_its_own() -> None:
    rendered = objects(VALUES)
    claims = {o["metadata"]["name"] for o in of_kind(rendered, "PersistentVolumeClaim")}
    assert claims == {"test-baton-model", "test-baton-small-model"}
    (volume,) = [v for v in pod_of(rendered, "small-decode")["volumes"] if v["name"] == "model"]
    assert volume["persistentVolumeClaim"]["claimName"] == "test-baton-small-model"
    downloads = pod_of(rendered, "router")["initContainers"]
    assert [container["name"] for container in downloads] == ["download", "download-small"]
    folders = [variable["value"] for c in downloads for variable in c["env"] if variable["name"] == "FOLDER"]
    assert folders == ["/models/model/main/Qwen/Qwen3-4B", "/models/small/main/Qwen/Qwen3-1.7B"]


def test_pools_of_different_models_roll_independently() -> None:
    (job,) = [job for job in of_kind(objects(VALUES), "Job") if "-rollout-" in job["metadata"]["name"]]
    environ = {e["name"]: json.loads(e["value"]) for e in container_of(job["spec"]["template"]["spec"])["env"][-2:]}
    assert [[name.removeprefix("test-baton-") for name in of_model] for of_model in environ["POOLS"]] == [
        ["prefill", "decode"],
        ["small-prefill", "small-decode"],
        ["embed-prefill", "embed-decode", "embed-unified"],
    ]
    assert environ["WANTED"]["test-baton-small-decode"] == {"replicas": 3, "autoscaled": True}


def test_every_object_is_valid_and_none_occurs_twice() -> None:
    monitoring = {"prometheusRule": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    rendered = objects({**VALUES, "monitoring": monitoring, "gpu": {"dra": {"enabled": True}}})
    keys = [(o["kind"], o["metadata"]["name"]) for o in rendered if "helm.sh/hook" not in str(o["metadata"])]
    assert len(set(keys)) == len(keys)
    for each in rendered:
        if each["kind"] not in ("ScaledObject", "PrometheusRule", "ServiceMonitor"):
            validate_strictly(each, "1.34")


def test_policies_and_monitoring_cover_the_roles_of_all_models() -> None:
    rendered = objects({**VALUES, "monitoring": {"serviceMonitor": {"enabled": True}}})
    policy = named(rendered, "NetworkPolicy", "-unified")["spec"]["podSelector"]["matchLabels"]
    labels = deployments(rendered)["embed-unified"]["spec"]["template"]["metadata"]["labels"]
    assert policy.items() <= labels.items()
    assert named(rendered, "Service", "-unified-metrics")["spec"]["selector"].items() <= labels.items()


def test_signals_of_autoscaling_belong_to_one_pool() -> None:
    rendered = objects({**VALUES, "monitoring": {"prometheusRule": {"enabled": True}}})
    (scaled,) = of_kind(rendered, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "test-baton-small-decode"
    for name in POOLS:
        pod = f"test-baton-{name}-6d4cf56db6-abcde"
        rules = named(rendered, "PrometheusRule", "baton")["spec"]["groups"][0]["rules"]
        patterns = {found for rule in rules for found in re.findall(r'pod=~"([^"]+)"', rule["expr"])}
        assert [pattern for pattern in patterns if re.fullmatch(pattern, pod)] == [f"test-baton-{name}-.*"]


def test_an_empty_pool_of_each_model_raises_an_alert() -> None:
    rendered = objects({**VALUES, "monitoring": {"prometheusRule": {"enabled": True}}})
    rules = named(rendered, "PrometheusRule", "baton")["spec"]["groups"][1]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == "BatonPoolEmpty"]
    watched = dict(re.findall(r'model_name="([^"]+)",role=~"([^"]+)"', rule["expr"]))
    assert watched == {
        "Qwen/Qwen3-4B": "prefill|decode",
        "Qwen/Qwen3-1.7B": "prefill|decode",
        "embed": "prefill|unified",
    }


def test_the_longest_names_are_ones_that_kubernetes_accepts() -> None:
    values = {"models": [{**EMBEDDING, "name": "m" * 12}], "monitoring": {"serviceMonitor": {"enabled": True}}}
    rendered = objects(values, release="r" * 53)
    assert max(len(o["metadata"]["name"]) for o in rendered) <= 63
    volumes = [volume["name"] for volume in pod_of(rendered, "router")["volumes"]]
    assert len(set(volumes)) == len(volumes) and max(map(len, volumes)) <= 63


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({"model": {}}, id="no name"),
        pytest.param({"name": "m" * 13}, id="a long name"),
        pytest.param({"name": "a-b"}, id="a hyphen, which would make pods of two pools look alike"),
        pytest.param({"name": "decode"}, id="the name of a role"),
        pytest.param({"name": "small", "models": []}, id="unknown key"),
        pytest.param({"name": "small", "engine": {"maxModellen": 1}}, id="misspelt key"),
        pytest.param({"name": "small", "router": {"toolCallParser": "unknown"}}, id="wrong setting of the router"),
    ],
)
def test_wrong_entries_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        objects({"models": [entry]})


def test_the_example_serves_a_chat_and_an_embedding_model() -> None:
    rendered = render(ROOT / "examples" / "several-models.yaml")
    names = [ModelNames(each).all([])[0] for each in settings_of_models(settings_of(rendered, "router"))]
    assert names == ["Qwen/Qwen3-8B", "Qwen/Qwen3-Embedding-0.6B"]
    assert set(deployments(rendered)) == {"prefill", "decode", "embed-prefill", "embed-decode"}


def test_a_name_must_not_occur_twice() -> None:
    with pytest.raises(helm_python.HelmError, match="occurs twice"):
        objects({"models": [SMALL, SMALL]})
