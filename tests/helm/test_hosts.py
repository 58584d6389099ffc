"""A pool whose instances are several pods: a LeaderWorkerSet, of which routers reach the leaders."""

from copy import deepcopy
from typing import Any

import helm_python
import pytest

from baton_serve.services.common.settings.configuration import load
from baton_serve.services.instance.nodes.agreement import check_nodes
from baton_serve.services.instance.settings import InstanceSettings
from tests.helm.chart import HOSTS, Manifest, container_of, environment_of, named, objects, of_kind, render
from tests.helm.custom_resources import CUSTOM, validate_custom
from tests.helm.kubernetes_schemas import validate_strictly
from tests.helm.test_settings import FIELDS, SECRETS

# The controller of LeaderWorkerSet puts these before the variables of every container.
OF_LEADER, OF_WORKER = (
    [
        {"name": "LWS_LEADER_ADDRESS", "value": "llm-0.llm.ns"},
        {"name": "LWS_GROUP_SIZE", "value": "2"},
        {"name": "LWS_WORKER_INDEX", "value": index},
    ]
    for index in "01"
)


def templates(rendered: list[Manifest]) -> tuple[Manifest, Manifest]:
    pods = named(rendered, "LeaderWorkerSet", "-decode")["spec"]["leaderWorkerTemplate"]
    assert pods["size"] == 2
    return deepcopy(pods["leaderTemplate"]), deepcopy(pods["workerTemplate"])


def settings_of(rendered: list[Manifest], template: Manifest, given: list[dict[str, str]]) -> InstanceSettings:
    """Return the settings as the process of a pod reads them."""
    container = container_of(template["spec"])
    container["env"] = [*given, *container["env"]]
    environ = environment_of(rendered, container, secrets=SECRETS, fields=FIELDS)
    return load(
        InstanceSettings, container["args"][1:], environ, prefix="BATON__DECODE__", program="baton", description=""
    )


def test_the_pods_of_an_instance_meet_at_their_leader() -> None:
    rendered = render(HOSTS)
    leader, worker = templates(rendered)
    first, second = settings_of(rendered, leader, OF_LEADER), settings_of(rendered, worker, OF_WORKER)
    for settings in (first, second):
        check_nodes(settings, "decode")
        assert (settings.nnodes, settings.num_devices) == (2, 4)
    # The leader is found by its own address, before the name is known to DNS.
    assert (first.node_rank, first.master_addr) == (0, FIELDS["status.podIP"])
    assert (second.node_rank, second.master_addr) == (1, "llm-0.llm.ns")
    assert first.master_port == second.master_port


def test_every_object_is_valid() -> None:
    for each in render(HOSTS):
        if each["kind"] in CUSTOM:
            validate_custom(each)
        else:
            validate_strictly(each, "1.34")


def test_its_pods_are_valid_and_only_the_leader_has_ports_and_probes() -> None:
    rendered = render(HOSTS)
    deployment = named(rendered, "Deployment", "-prefill")
    leader, worker = templates(rendered)
    for template in (leader, worker):
        labels = {"matchLabels": template["metadata"]["labels"]}
        validate_strictly({**deployment, "spec": {"selector": labels, "template": template}}, "1.34")
        assert container_of(template["spec"])["resources"]["limits"]["gpu.intel.com/xe"] == 2
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    own = {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"}
    assert set(container_of(leader["spec"])) - set(container_of(worker["spec"])) == own


def test_other_objects_know_that_it_is_no_deployment() -> None:
    rendered = render(HOSTS)
    assert not [o for o in of_kind(rendered, "Deployment") if o["metadata"]["name"].endswith("-decode")]
    assert named(rendered, "ScaledObject", "-decode")["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    assert [o for o in of_kind(rendered, "Role") + of_kind(rendered, "Job") if "test-baton-decode" in str(o)] == []
    rules = named(rendered, "NetworkPolicy", "-decode")["spec"]["ingress"]
    labels = templates(rendered)[1]["metadata"]["labels"]
    (peers,) = [rule["from"] for rule in rules if "ports" not in rule]
    assert [peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in peers] == [True]


def test_its_number_stands_in_the_manifest() -> None:
    rendered = objects({"decode": {"nodesPerInstance": 2, "replicas": 3, "engine": {"tensorParallelSize": 2}}})
    pool = named(rendered, "LeaderWorkerSet", "-decode")
    validate_custom(pool)
    assert pool["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    "values",
    [
        {"decode": {"nodesPerInstance": 2, "engine": {"tensorParallelSize": 3}}},
        {"auth": {"encryptPods": False}, "decode": {"nodesPerInstance": 2, "engine": {"tensorParallelSize": 2}}},
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmError):
        objects(values)
